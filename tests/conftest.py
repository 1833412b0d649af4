"""Set-up for all tests: one torch thread and no network.

Nothing heavy is imported here: most of tests/unit needs neither torch nor TRL.
"""

from __future__ import annotations

import functools
import gc
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
gc.disable()  # until everything is imported: importing leaves little garbage, and looking for it takes seconds


def pytest_collection_finish() -> None:
    """Every test module is imported by now, and with them torch and TRL, where any test needs them."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    if "accelerate" in sys.modules:  # each trainer asks a dozen times, and reads the packages' metadata for it
        imports = sys.modules["accelerate.utils.imports"]
        imports._is_package_available = functools.cache(imports._is_package_available)
    gc.enable()
    gc.collect()
    gc.freeze()  # a trainer collects garbage when training ends: what the imports left need not be walked each time
    if "forked" in sys.modules:
        sys.modules["forked"].prepare()
