"""One rank of a launch: `run.py FOLDER MODULE ARGUMENT…` performs the cases of a module of this folder.

A module with a `TIMEOUT` has each case in a process and a process group of its own; its arguments are names of cases.
Results are JSON files in the folder, one for each case and rank, so that a case that fails hides no other.
"""

import importlib
import sys
from pathlib import Path

from one_rank import perform, perform_apart

if __name__ == "__main__":
    folder, module = Path(sys.argv[1]), importlib.import_module(sys.argv[2])
    if hasattr(module, "TIMEOUT"):
        perform_apart(folder, module.cases(folder), sys.argv[3:], module.TIMEOUT)
    perform(folder, module.cases(folder, *sys.argv[3:]))
