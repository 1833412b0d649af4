"""The drift canary on the installed TRL, and on doctored sources of it."""

import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
from drift import CALLBACKS, TRAINER, drift, installed
from packaging.version import Version

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
    "def _calculate_rewards(": ("def _score_rewards(", "GRPOTrainer has no method _calculate_rewards any more"),
    "self._generate_and_score_completions(generation_batch)": (
        "self._generate_and_score_completions(generation_batch, True)",
        "_prepare_inputs calls _generate_and_score_completions with 2 arguments, not 1",
    ),
    "return self._compute_loss(model, inputs)": (
        "return self._fused_loss(model, inputs)",
        "compute_loss does not call self._compute_loss any more",
    ),
    "        return self._compute_loss(model, inputs)": (
        "        if self.fast: return self.fast_loss(model, inputs)\n        return self._compute_loss(model, inputs)",
        "compute_loss has a loss path of its own: fast_loss",
    ),
    'output["tool_mask"] = tool_mask': (
        'output["turn_mask"] = tool_mask',
        "_generate_and_score_completions returns a new key: 'turn_mask'",
    ),
    '            "advantages": advantages,\n': (
        "",
        "_generate_and_score_completions does not return 'advantages' any more",
    ),
    '            "prompt_ids": prompt_ids,\n            "prompt_mask": prompt_mask,\n': (
        '            "prompt_mask": prompt_mask,\n            "prompt_ids": prompt_ids,\n',
        "_generate_and_score_completions returns 'prompt_mask' first, not 'prompt_ids'",
    ),
    "        # Compute the per-token log probabilities for the model\n        prompt_ids, prompt_mask = inputs": (
        '        early = inputs.get("old_per_token_logps")\n        prompt_ids, prompt_mask = inputs',
        "_compute_loss reads 'old_per_token_logps' before it calls _get_per_token_logps_and_entropies",
    ),
    "        # Compute the per-token log probabilities for the model\n": (
        '        signal = inputs["advantages"]\n',
        "_compute_loss reads 'advantages' before it calls _get_per_token_logps_and_entropies",
    ),
    'inputs.get("old_per_token_logps")': (
        'inputs.get("behavior_logps")',
        "_compute_loss does not read 'old_per_token_logps' any more",
    ),
    "self._get_per_token_logps_and_entropies(\n            model,": (
        "self._fused_logps(\n            model,",
        "_compute_loss calls _get_per_token_logps_and_entropies 0 times",
    ),
    "gather(loss_mask.sum()).sum()": (
        "gather(completion_mask.sum()).sum()",
        "num_items_in_batch counts something else: self.accelerator.gather(completion_mask.sum()).sum()",
    ),
    "shuffle_sequence_dict(generation_batch)": (
        "generation_batch",
        "_prepare_inputs does not call shuffle_sequence_dict any more",
    ),
    "scale_rewards": ("reward_scaling", "GRPOTrainer has no attribute 'scale_rewards' any more"),
    "class GRPOTrainer(": ("class PolicyTrainer(", "grpo_trainer.py has no class GRPOTrainer"),
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


def test_every_case_is_a_line_of_the_newest_release():
    source = installed()
    assert source is not None
    text = (source / TRAINER).read_text()
    if Version(version("trl")) < Version("1.16"):
        pytest.skip("the cases are lines of 1.16")
    assert [old for old in DOCTORED if old not in text] == []


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


def test_a_reference_sync_of_another_name_is_told(copy):
    path = copy / CALLBACKS
    path.write_text(path.read_text().replace("class SyncRefModelCallback", "class SyncReference"))
    assert any("has no SyncRefModelCallback any more" in problem for problem in drift(copy))


def test_only_compat_asks_which_release_is_installed():
    """Differences between releases are handled in one place."""
    package = Path(trl_replay.__file__).parent
    asking = [path.name for path in package.rglob("*.py") if 'version("trl")' in path.read_text(encoding="utf-8")]
    assert asking == ["compat.py"]


def test_a_folder_that_is_no_trl_is_told(tmp_path):
    assert drift(tmp_path) == [f"{TRAINER} does not exist"]
