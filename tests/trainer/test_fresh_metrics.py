"""The log: of what was generated, of what was trained on, and of what the loss computes over fresh rows."""

from pathlib import Path
from unittest import mock

import pytest
from releases import since
from scenarios import train
from support import DEAD, HALF, LIVE, Spy
from teacher import TEACHER

import trl_replay
from trl_replay.data.counters import METRICS

pytestmark = pytest.mark.usefixtures("all_metrics")

SCRIPT = ([LIVE, HALF, LIVE], [DEAD, LIVE, DEAD])


class Told(Spy):
    """Keeps the entropies that the loss was given, and what the adaptive control made of them."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.controlled = []

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        self.losses[-1]["entropies"] = self.entropies
        self.controlled.append(getattr(self, "_last_world_entropy", 0.0))
        return loss

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        result = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
        self.entropies = result[1].detach() if result[1] is not None else None
        return result


ADAPTIVE = {"use_adaptive_entropy": True, "entropy_target": 3.0, "entropy_coef_delta": 0.01}


@since("1.8.0", "the adaptive entropy bonus")
def test_103_a_first_window_of_replayed_rows_alone_counts_with_their_own_entropy(tmp_path):
    """TRL begins with an infinite last reading: taken for a mean, it turns the bonus off for good."""
    run = train(
        tmp_path, [DEAD] * 3, trainer_class=Told, max_steps=3, steps_per_generation=1, gradient_accumulation_steps=2,
        file=[{**row, "prompt": prompt} for prompt in ("1=", "2=", "3=", "4=") for row in TEACHER[:4]],
        **{**ADAPTIVE, "entropy_target": 100.0},
    )  # fmt: skip
    assert run.counters["replaced"] > 6
    read = run.trainer.controlled[1::2]
    assert all(0.0 < value < 10.0 for value in read), read
    assert run.trainer.entropy_coef == pytest.approx(3 * ADAPTIVE["entropy_coef_delta"])


@since("1.8.0", "the entropy bonus")
def test_104_the_quantile_of_entropies_is_taken_once_a_loss(tmp_path):
    """It is a collective: a process that trains a batch without replay would not take part in a second one."""
    taken = []

    class Counts(Told):
        def get_high_entropy_mask(self, *args):
            taken.append(len(self.losses))
            return super().get_high_entropy_mask(*args)

    settings = {"replaced": 4, "max_steps": 3, "top_entropy_quantile": 0.5, **ADAPTIVE}
    run = train(tmp_path, *SCRIPT, trainer_class=Counts, **settings)
    assert len(taken) == len(set(taken)) == len(run.trainer.losses)


@since("1.8.0", "the entropy bonus")
def test_104_a_loss_that_chooses_no_tokens_by_their_entropy_is_refused(tmp_path):
    class Forgets(Told):
        def _compute_loss(self, model, inputs):
            with mock.patch.object(self, "top_entropy_quantile", 1.0):
                return super()._compute_loss(model, inputs)

    settings = {"trainer_class": Forgets, "max_steps": 1, "top_entropy_quantile": 0.5, "entropy_coef": 0.1}
    with pytest.raises(trl_replay.SeamError, match="never called get_high_entropy_mask"):
        train(tmp_path, [LIVE] * 3, **settings)


OF_THE_LOSS = {
    "loss", "grad_norm", "policy_loss", "kl", "entropy", "entropy_coef", "aux_loss", "clip_ratio/low_mean",
    "clip_ratio/low_min", "clip_ratio/high_mean", "clip_ratio/high_max", "clip_ratio/region_mean", "cispo_clip_ratio",
    "vespo/phi_seq_mean",
}  # fmt: skip


@pytest.mark.parametrize("loss", ["dapo", "cispo", "vespo"])
def test_49_of_trls_own_keys_only_those_that_the_loss_computes_tell_of_replayed_rows(tmp_path, loss):
    logs = []
    for dry in (True, False):
        settings = {"max_steps": 2, "beta": 0.1, "epsilon": 0.05, "loss_type": loss, "learning_rate": 2e-2}
        run = train(tmp_path / str(dry), *SCRIPT, replay_dry_run=dry, **settings)
        logs.append(run.trainer.state.log_history[1])
    changed = {key for key, value in logs[0].items() if value != logs[1].get(key) and "time" not in key}
    of_trl = {key for key in changed if not key.startswith("replay/")}
    assert {"kl", "entropy"} <= of_trl <= OF_THE_LOSS
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert all(f"`{key}`" in page or f"`{key.partition('/')[0]}/*`" in page for key in OF_THE_LOSS)


def test_the_page_has_every_metric_of_the_table():
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert [key for key in METRICS if f"`{key}" not in page] == []
