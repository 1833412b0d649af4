"""`python -m trl_replay`, the same as `trl-replay`."""

from __future__ import annotations

import sys

from .cli import main

sys.exit(main())
