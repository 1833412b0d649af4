"""Loss and gradient of every training step against those written down by hand, in Unsloth's trainer."""

from __future__ import annotations

from typing import Any

import pytest
from combinations import COMBINATIONS, follow
from real_unsloth import trainer_of


@pytest.mark.parametrize("name", list(COMBINATIONS))
def test_loss_and_gradient_are_those_by_hand_with(tmp_path: Any, name: str) -> None:
    follow(tmp_path, name, trainer_of)
