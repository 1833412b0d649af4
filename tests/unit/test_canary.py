"""The drift canary on the installed TRL, and on doctored sources of it."""

import shutil
from pathlib import Path

import pytest
from drift import CALLBACKS, TRAINER, drift, installed

import trl_replay


def test_24_the_installed_trl_is_what_the_seam_relies_on():
    folder = installed()
    assert folder is not None
    assert drift(folder) == []


DOCTORED = {
    "def _compute_loss(self, model, inputs):": (
        "def _compute_loss(self, inputs, model):",
        "_compute_loss takes (inputs, model) where it took (model, inputs)",
    ),
    "        return self._compute_loss(model, inputs)": (
        "        if self.fast: return self.fast_loss(model, inputs)\n        return self._compute_loss(model, inputs)",
        "compute_loss has a loss path of its own: fast_loss",
    ),
    'output["tool_mask"] = tool_mask': (
        'output["turn_mask"] = tool_mask',
        "_generate_and_score_completions returns a new key: 'turn_mask'",
    ),
    "        # Compute the per-token log probabilities for the model\n": (
        '        signal = inputs["advantages"]\n',
        "_compute_loss reads 'advantages' before it calls _get_per_token_logps_and_entropies",
    ),
    "gather(loss_mask.sum()).sum()": (
        "gather(completion_mask.sum()).sum()",
        "num_items_in_batch counts something else: self.accelerator.gather(completion_mask.sum()).sum()",
    ),
    "scale_rewards": ("reward_scaling", "GRPOTrainer has no attribute 'scale_rewards' any more"),
}


@pytest.fixture
def copy(tmp_path):
    """A copy of the two files that the canary reads."""
    source = installed()
    assert source is not None
    (tmp_path / "trainer").mkdir()
    for path in (TRAINER, CALLBACKS):
        shutil.copy(source / path, tmp_path / path)
    return tmp_path


@pytest.mark.parametrize("old", DOCTORED)
def test_a_change_is_told_in_words(copy, old):
    new, words = DOCTORED[old]
    path = copy / TRAINER
    text = path.read_text()
    if old not in text:
        pytest.skip("this release words it differently; on the newest one every case runs")
    path.write_text(text.replace(old, new))
    found = drift(copy)
    assert any(words in problem for problem in found), found


def test_what_transformers_has_need_not_stand_in_trl(copy):
    """TRL up to 1.7 has no `_load_optimizer_and_scheduler` of its own, and never names `_get_output_dir`."""
    path = copy / TRAINER
    text = path.read_text()
    for name in ("_load_optimizer_and_scheduler", "_get_output_dir"):
        text = text.replace(name, "something_else")
    path.write_text(text)
    assert drift(copy) == []


def test_only_compat_asks_which_release_is_installed():
    """Differences between releases are handled in one place."""
    package = Path(trl_replay.__file__).parent
    asking = [path.name for path in package.rglob("*.py") if 'version("trl")' in path.read_text(encoding="utf-8")]
    assert asking == ["compat.py"]
