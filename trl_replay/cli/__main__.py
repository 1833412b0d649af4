"""`python -m trl_replay.cli`."""

from __future__ import annotations

import sys

from .commands import main

sys.exit(main())
