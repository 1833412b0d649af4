"""Trainers built on GRPOTrainer: TRL's own, those refused by name, and batches and losses of other shapes."""

from __future__ import annotations

import ast
from importlib.resources import files

import pictures
import pytest
import torch
from credit import SHARES, Credit, credited
from loss_by_hand import forward
from releases import shipping
from replaying import Checked, Watch, build, check_batches, check_losses, replay
from scenarios import train
from support import DEAD, HALF, LIVE, Rewards, Spy, scoring
from users_losses import CASES

import trl_replay
from trl_replay.errors import ContractError, HookError, RefusedError
from trl_replay.testing import make_model, make_tokenizer, make_trainer

SCRIPT = ([LIVE, DEAD, HALF], [DEAD, LIVE, DEAD])
KNOWN = {
    "dppo.DPPOTrainer", "gfpo.GFPOTrainer", "gmpo.GMPOTrainer", "gspo_token.GRPOTrainer", "minillm.MiniLLMTrainer",
    "papo.PAPOTrainer", "grpo_with_replay_buffer.GRPOWithReplayBufferTrainer",
}  # fmt: skip


@pytest.fixture
def made(tmp_path):
    """Makes trainers of a class, by the script."""
    return lambda trainer_class, **settings: build(tmp_path, Rewards(*SCRIPT), trainer_class=trainer_class, **settings)


def test_all_of_trls_own_subclasses_are_known():
    """Each trainer of trl.experimental that inherits GRPOTrainer, in any release, has its test here."""
    found = set()
    for path in (files("trl") / "experimental").iterdir():
        for source in path.glob("*.py") if path.is_dir() else []:
            classes = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.ClassDef)]
            bases = {f"{path.name}.{one.name}": {ast.unparse(base) for base in one.bases} for one in classes}
            found |= {name for name, names in bases.items() if names & {"GRPOTrainer", "_GRPOTrainer"}}
    assert found
    assert found <= KNOWN, "a trainer of TRL's is new: test it here"


@shipping("gmpo")
def test_replay_is_right_with_gmpo(made):
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    class Gmpo(Checked, GMPOTrainer):
        reference_kind = "gmpo"

    replay(made(Gmpo, config_class=GMPOConfig, learning_rate=5e-2))


@shipping("gspo_token")
@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
def test_replay_is_right_with_gspo_token(made, level):
    from trl.experimental.gspo_token import GRPOTrainer

    class GspoToken(Checked, GRPOTrainer):
        pass

    settings = {"importance_sampling_level": level, "learning_rate": 3e-2}
    replay(made(GspoToken, **settings))


@shipping("minillm")
def test_replay_is_right_with_minillm(made):
    """Its loss adds the teacher's view of each token to the advantage: of replayed rows as the policy is now."""
    from trl.experimental.minillm import MiniLLMConfig, MiniLLMTrainer

    class MiniLLM(Checked, MiniLLMTrainer):
        def complete(self, rows, inputs):
            (own, *_), (taught, *_) = forward(self, rows, inputs), forward(self, rows, inputs, self.teacher_model)
            for row, mine, teachers in zip(rows, own, taught, strict=True):
                if isinstance(row["advantage"], float):
                    row["advantage"] = row["advantage"] + teachers - mine

    teacher = make_model(make_tokenizer(), seed=1)
    settings = {"config_class": MiniLLMConfig, "learning_rate": 3e-2, "arguments": {"teacher_model": teacher}}
    replay(made(MiniLLM, **settings))


@shipping("papo")
def test_replay_is_right_with_papo(tmp_path):
    from trl.experimental.papo import PAPOConfig, PAPOTrainer

    class Papo(Spy, PAPOTrainer):
        pass

    classes = {"trainer_class": Papo, "config_class": PAPOConfig}
    trainer = pictures.make_trainer(tmp_path, pictures.llava(), (1, 1, 1), Rewards(*SCRIPT), **classes)
    session = trl_replay.attach(trainer)
    watch = Watch(session, 4, trainer._tokenizer.pad_token_id)
    trainer.train()
    assert session.totals.counters["replaced"] > 0
    check_batches(watch)
    assert session.metrics["replay/ratio_mean"] != 1.0


@shipping("gfpo")
def test_gfpo_is_replayed_while_it_filters_nothing_and_refused_when_it_does(made):
    from trl.experimental.gfpo import GFPOConfig, GFPOTrainer

    class Gfpo(Checked, GFPOTrainer):
        pass

    replay(made(Gfpo, config_class=GFPOConfig))
    trainer = made(
        Gfpo, config_class=GFPOConfig, num_remains_in_group=2,
        arguments={"group_filter_func": lambda group_completions, group_rewards: group_rewards},
    )  # fmt: skip
    check_refused(trainer, r"6 rows per process, but 12 rows on 1 process.es. have|for 12 rows, and its batch holds 6")


class AroundTheTap(Spy):
    """A trainer whose loss computes log-probs some other way."""

    def _compute_loss(self, model, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        return model(input_ids=ids).logits.float().mean()


class AroundTheLoss(Spy):
    """A trainer that does not call `_compute_loss`."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        return AroundTheTap._compute_loss(self, model, inputs)


def check_refused(trainer, words, **settings):
    session = trl_replay.attach(trainer, **settings)
    with pytest.raises(trl_replay.SeamError, match=words):
        trainer.train()
    assert session.totals.counters["replaced"] == 0
    return session


@pytest.mark.parametrize(
    ("trainer_class", "words"),
    [(AroundTheTap, "never called _get_per_token_logps_and_entropies"), (AroundTheLoss, "goes around the seam")],
)
def test_29_training_around_the_seam_is_an_error_before_anything_is_replayed(tmp_path, trainer_class, words):
    trainer = make_trainer(tmp_path, Rewards([LIVE, DEAD, DEAD]), trainer_class=trainer_class)
    check_refused(trainer, words)
    assert trainer.state.global_step == 0


class Later(Spy):
    def compute_loss(self, model, inputs, *args, **kwargs):
        if self.state.global_step == 2:
            return AroundTheTap._compute_loss(self, model, inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)


def test_125_a_loss_that_goes_around_the_seam_later_or_since_a_resume_is_an_error_before_the_optimizer_steps(tmp_path):
    for checkpoint in (None, str(tmp_path / "checkpoint-2")):
        trainer = make_trainer(
            tmp_path, Rewards([LIVE, DEAD, DEAD]), trainer_class=Later, max_steps=6, save_strategy="steps",
            save_steps=2,
        )  # fmt: skip
        trl_replay.attach(trainer)
        with pytest.raises(trl_replay.SeamError, match="goes around the seam"):
            trainer.train(resume_from_checkpoint=checkpoint)
        assert trainer.state.global_step == 2


def test_a_loss_that_stands_in_compute_loss_is_refused_at_attach(tmp_path):
    """As a published trainer has it. In _compute_loss, where it belongs, it is trained in test_users_losses.py."""
    whole = CASES["whole_loss_that_of_its_own"](Spy)._compute_loss
    trainer = make_trainer(
        tmp_path, Rewards(*SCRIPT), trainer_class=type("WholeElsewhere", (Spy,), {"compute_loss": whole})
    )
    with pytest.raises(ContractError, match=r"Name it _compute_loss\(self, model, inputs\)"):
        trl_replay.attach(trainer)


class Survives(Spy):
    """Runs out of memory in the first batch, and skips the third one."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.state.global_step == 2:
            self._prepare_inputs(inputs)
            return torch.zeros(())
        try:
            return super().training_step(model, inputs, num_items_in_batch)
        except torch.OutOfMemoryError:
            return torch.zeros(())

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        if self.model.training and torch.is_grad_enabled() and self.state.global_step == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)


@pytest.mark.parametrize("dry", [False, True])
def test_a_training_step_that_survives_an_error_or_skips_a_batch_trains_on(tmp_path, dry):
    run = train(tmp_path, SCRIPT[0], trainer_class=Survives, max_steps=6, replay_dry_run=dry)
    assert run.trainer.state.global_step == 6
    assert run.counters["stored"] > 0


@shipping("dppo")
@pytest.mark.generates  # it reads more of a generation than its sequences
def test_dppo_is_refused_in_its_first_loss(made):
    """It takes its ratio to the sampler's log-probs, and never reads the old ones."""
    from trl.experimental.dppo import DPPOConfig, DPPOTrainer

    trainer = made(DPPOTrainer, config_class=DPPOConfig)
    check_refused(trainer, "did not use 'old_per_token_logps'")


def test_rloo_is_refused_by_name(tmp_path):
    from trl import RLOOConfig, RLOOTrainer

    settings = {"trainer_class": RLOOTrainer, "config_class": RLOOConfig, "beta": 0.0}
    trainer = build(tmp_path, Rewards(*SCRIPT), **settings)
    before = dict(trainer.__dict__)
    with pytest.raises(ContractError, match="RLOOTrainer: its loss reads one old log-prob a sequence"):
        trl_replay.attach(trainer)
    assert trainer.__dict__ == before


@pytest.mark.parametrize("name", ["UnslothGRPOTrainer", "_UnslothGRPOTrainer", "GRPOWithReplayBufferTrainer"])
def test_trainers_that_go_around_the_tap_are_refused_by_name(made, name):
    """Here a class of that name, which Unsloth has not generated."""
    trainer = made(type(name, (Checked,), {}))
    with pytest.raises(ContractError, match=r"it replays by itself|Unsloth's loss does not call"):
        trl_replay.attach(trainer)


def test_without_a_buffer_a_batch_that_loses_its_row_ids_before_the_loss_is_refused_in_the_first_loss(tmp_path):
    """It trained rows that are masked."""
    trainer = make_trainer(tmp_path, Rewards([LIVE, DEAD, DEAD]), trainer_class=CASES["rebuilt_around_the_loss"](Spy))
    check_refused(
        trainer, "has lost 'trl_replay_rows'.* take this key along", replay_buffer_size=0, replay_unfilled="mask"
    )
    assert trainer.state.global_step == 0


class CutsTokens(Spy):
    """A trainer whose loss trains on the first tokens alone, to save memory."""

    def _compute_loss(self, model, inputs):
        cut = ("completion_ids", "completion_mask", "old_per_token_logps")
        return super()._compute_loss(
            model, {key: value[:, :4] if key in cut else value for key, value in inputs.items()}
        )


def test_a_group_whose_tokens_the_loss_cuts_off_is_refused_and_told(tmp_path):
    """Their log-probs are unknown."""
    run = train(tmp_path, [LIVE, DEAD, DEAD], trainer_class=CutsTokens, replaced=0)
    assert run.trainer.state.global_step == 4
    assert len(run.table) == 0
    assert "a trainable token has no finite log-prob" in run.session.explain()


def test_146_a_trainer_whose_loss_is_another_than_its_args_is_refused(tmp_path):
    trainer = build(tmp_path, Rewards([DEAD]), loss_type="dapo")
    trainer.loss_type = "grpo"
    with pytest.raises(RefusedError, match="loss_type is 'grpo', and its args have 'dapo'"):
        trl_replay.attach(trainer)


class PerToken(Checked):
    """A trainer whose loss gives each token an advantage of its own."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, credited(inputs), *args, **kwargs)

    def complete(self, rows, inputs):
        for row in rows:
            if isinstance(row["advantage"], float):
                row["advantage"] = row["advantage"] * SHARES[: len(row["ids"])]


def test_a_loss_with_an_advantage_for_each_token_is_weighted_right(made):
    def halves(rows, context):
        assert rows.advantages.shape == rows.ages.shape, "the stored advantages, one a row"
        return trl_replay.Corrected(rows.behavior_logps, torch.full_like(rows.advantages, 0.5))

    trainer = made(PerToken, learning_rate=3e-2)
    trainer.gate = lambda new, behavior, old, weights: weights * 0.5
    replay(trainer, replay_correction=halves)


def test_an_error_in_a_correction_takes_the_rows_out_of_a_loss_with_an_advantage_for_each_token(made):
    """As on several processes, which stop together one batch later."""

    class Failing:
        def __call__(self, rows, context):
            raise ValueError("no")

    trainer = made(Credit)
    trainer.gate = lambda new, behavior, old, weights: weights * 0.0  # by hand
    session = trl_replay.attach(trainer, replay_correction=Failing())
    session.components.errors.alone = False
    watch = Watch(session, 4, trainer._tokenizer.pad_token_id)
    trainer.watch, trainer.compared = watch, []
    with pytest.raises(HookError, match="no"):
        trainer.train()
    assert [replayed for _, _, replayed in trainer.compared] == [0, 8]
    check_losses(trainer)


class Merging(Spy):
    """Dynamic sampling as a subclass does it: scores twice, and puts groups of the second in dead ones' places."""

    def _generate_and_score_completions(self, inputs):
        kept, other = (super(Merging, self)._generate_and_score_completions(inputs) for _ in range(2))
        width = min(kept["completion_ids"].size(1), other["completion_ids"].size(1))
        merged = {}
        for key, value in kept.items():
            second = other[key]
            if value.dim() > 1 and key.startswith("completion"):
                value, second = value[:, :width], second[:, :width]
            merged[key] = torch.cat([value[:8], second[8:]]) if value.dim() else value
        return merged


class ScoringOthersToo(Spy):
    """Computes rewards of something else, after those of its batch."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        texts = ["-"] * len(inputs)
        self._calculate_rewards(inputs, texts, texts, [[1]] * len(inputs))
        return batch


class Retrying(Spy):
    """Scores until a group is live, and returns what it scored last."""

    def _generate_and_score_completions(self, inputs):
        for _ in range(3):
            batch = super()._generate_and_score_completions(inputs)
            if bool(batch["advantages"].any()):
                break
        return batch


class ScoringItself(Spy):
    """Scores through its own wrapped method."""

    depth = 0

    def _generate_and_score_completions(self, inputs):
        self.depth += 1
        try:
            if self.depth == 1:
                return self._generate_and_score_completions(inputs)
            return super()._generate_and_score_completions(inputs)
        finally:
            self.depth -= 1


MANY = [3.0, 1.0, 0.0, 0.0]


def test_40_a_trainer_that_merges_what_it_scored_twice_is_refused_before_anything_is_stored(tmp_path):
    script = Rewards([LIVE, HALF, DEAD], [DEAD, DEAD, MANY])
    trainer = make_trainer(tmp_path, script, trainer_class=Merging, max_steps=3)
    session = check_refused(trainer, r"_calculate_rewards 2 times.*match 0 of the results.*detach")
    assert len(session.buffer) == 0
    assert session.totals.counters["stored"] == 0


@pytest.mark.parametrize("trainer_class", [Retrying, ScoringItself])
def test_40_of_several_rewards_those_of_the_batch_are_stored(tmp_path, trainer_class):
    """The batch is that of the second script for the one that tries again."""
    first = [MANY, HALF, LIVE]
    script = {Retrying: Rewards([DEAD, [1.0] * 4, DEAD], first), ScoringItself: Rewards(first)}[trainer_class]
    run = train(tmp_path, rewards=script, trainer_class=trainer_class, max_steps=1, replaced=0)
    assert run.table.reward_mean.tolist() == [1.0, 0.5, 0.25]


def test_40_rewards_that_explain_a_batch_alike_but_are_not_the_same_are_refused(tmp_path):
    """Of two all-dead batches nobody can tell which one was returned, and their pass rates differ."""
    script = Rewards([DEAD, DEAD, DEAD], [[1.0] * 4, DEAD, DEAD])
    trainer = make_trainer(tmp_path, script, trainer_class=ScoringOthersToo, max_steps=1)
    assert len(check_refused(trainer, "match 2 of the results").buffer) == 0


def with_live_tokens(batch):
    """Leaves the tokens of dead groups out of the batch's token count."""
    live = batch["advantages"].view(-1, 4).ne(0).any(1).repeat_interleave(4)
    counted = (batch["completion_mask"] * live[:, None]).sum()
    return {**batch, "num_items_in_batch": counted.to(batch["num_items_in_batch"])}


def test_188_a_token_count_by_another_rule_is_refused_where_the_loss_divides_by_it(made):
    """Replay would add a difference of tokens to what counts something else: 3 stood for 24."""
    trainer = made(scoring(with_live_tokens), loss_type="dapo")
    trl_replay.attach(trainer, replay_start=0)
    with pytest.raises(trl_replay.SeamError, match="num_items_in_batch of the scored batch is"):
        trainer.train()
    assert trainer.state.global_step == 1, "before an update with such a batch"


def test_188_a_token_count_by_another_rule_is_none_of_replays_where_the_loss_goes_by_rows(made):
    train(made(scoring(with_live_tokens), loss_type="grpo"))
