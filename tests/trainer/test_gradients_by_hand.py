"""Loss and gradient of every training step against those written down by hand, in many combinations of settings.

Behavior log-probs by hand are of forwards of every row alone, without padding, at the time of its generation.
"""

import pytest
from releases import since
from scenarios import COMBINATIONS, follow

NEWER = {
    "entropy bonus": since("1.8.0", "the entropy bonus"),
    "luspo, sequence level, beta": since("1.14.0", "a KL term of luspo that leaves padding out"),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=NEWER.get(name, ())) for name in COMBINATIONS])
def test_16_and_35_loss_and_gradient_are_those_by_hand_with(tmp_path, name):
    follow(tmp_path, name)
