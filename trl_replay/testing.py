"""For tests of plugins and of trl_replay itself: contract suites, and a tiny trainer built in code, without a hub.

Subclass a suite and give it the strategy; pytest does the rest:

    class TestMySampler(SamplerContract):
        strategy = staticmethod(my_sampler)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .hooks import SessionHooks
from .protocols import Evictor, Mixer, Sampler, Scorer, Selector
from .rehearsal import made_up_groups, made_up_table
from .specs import Kind
from .table import COLUMNS, ROW_COLUMNS, Table
from .types import Context, Floats, Groups, Ints

CHARACTERS = "0123456789+-=* abcdefghijklmnopqrstuvwxyz"


def make_table(scores: Sequence[float], **columns: Sequence[float]) -> Table:
    """A table with one entry a score: serials 0, 1, …, ascending updates, distinct tags, groups of 4 rows of which the
    first has a reward of 1; `columns` override."""
    typed: dict[str, Any] = {
        name: np.asarray(column, (COLUMNS | ROW_COLUMNS).get(name)) for name, column in columns.items()
    }
    return made_up_table(scores, 4, **typed)


def make_groups(rewards: Sequence[Sequence[float]], update: int = 0) -> Groups:
    """Groups of one reward function with TRL's group-scaled advantages; `rewards` is `(n, G)`."""
    return made_up_groups(np.asarray(rewards, np.float64)[:, :, None], update)


def make_context(table: Table | None = None, update: int = 100, seed: int = 0, **overrides: Any) -> Context:
    """A context as strategies get it."""
    if table is None:
        table = make_table([])
    settings: dict[str, Any] = {"capacity": max(len(table), 1), "num_generations": 4, **overrides}
    return Context(update=update, rng=np.random.default_rng(seed), table=table, **settings)


SCORES: dict[str, Sequence[float]] = {
    "empty": [],
    "one": [1.0],
    "equal": [2.0] * 7,
    "zero": [0.0] * 5,
    "mixed": [0.5, 0.0, 3.0, 3.0, 1e-300, 1e300, -1.0, 7.0],
}
"""Score columns that every evictor and sampler must cope with."""


REWARDS: list[list[float]] = [[0, 1, 0, 0], [1, 1, 1, 0], [0.2, 0.4, 0.1, 0.9]]


def _called(kind: Kind, strategy: Any) -> SessionHooks:
    """The strategy as a session calls it, which refuses results of another shape or kind."""
    return SessionHooks([], {}, {kind: strategy})


class ScorerContract:
    """Every scorer: one finite number a group, the same for the same groups, inputs untouched."""

    strategy: Scorer

    def test_gives_one_finite_number_for_each_group(self) -> None:
        """The shape is `(n,)` for several groups and for one."""
        for rewards in (REWARDS, REWARDS[:1]):
            scores = self._score(make_groups(rewards, update=3))
            assert np.isfinite(scores).all(), f"scores {scores} are not finite"

    def test_does_not_depend_on_the_other_groups(self) -> None:
        """A group's score is the same alone and among others."""
        groups = make_groups(REWARDS, update=3)
        for row, expected in enumerate(self._score(groups)):
            np.testing.assert_allclose(self._score(groups.take([row])), [expected], rtol=1e-12)

    def test_leaves_its_input_alone(self) -> None:
        """Rewards and advantages are as before."""
        groups = make_groups(REWARDS)
        self._score(groups)
        before = make_groups(REWARDS)
        np.testing.assert_array_equal(groups.rewards, before.rewards)
        np.testing.assert_array_equal(groups.advantages, before.advantages)

    def _score(self, groups: Groups) -> Floats:
        return _called("scorer", self.strategy).score(groups, make_context())


class EvictorContract:
    """Every evictor: one comparable keep rank an entry, table untouched."""

    strategy: Evictor

    def test_ranks_every_entry_with_a_number_that_compares(self) -> None:
        """The shape is `(n,)`, NaN is not allowed; infinities are. Every column is as before."""
        for scores in SCORES.values():
            table = make_table(scores)
            _called("evictor", self.strategy).rank(table, make_context(table))
            _assert_same(table, make_table(scores))


class SamplerContract:
    """Every sampler: distinct rows, for no more slots than asked for, repeatable, table untouched."""

    strategy: Sampler

    def test_draws_distinct_rows_and_no_more_than_asked(self) -> None:
        """For every score column, for fewer slots and for more than there are entries; -1 leaves a slot."""
        for scores in SCORES.values():
            if not scores:
                continue  # the session does not sample from nothing
            table = make_table(scores)
            for count in (1, len(scores), len(scores) + 3):
                self._draw(table, count)

    def test_draws_the_same_from_the_same_generator(self) -> None:
        """All randomness is `context.rng`'s."""
        table = make_table(SCORES["mixed"])
        first = self._draw(table, 4, seed=7)
        second = self._draw(table, 4, seed=7)
        assert first.tolist() == second.tolist(), f"the same seed drew {first.tolist()} and {second.tolist()}"

    def test_leaves_the_table_and_the_global_generators_alone(self) -> None:
        """Every column and NumPy's global state are as before."""
        table = make_table(SCORES["mixed"])
        state = str(np.random.get_state(legacy=False))
        self._draw(table, 3)
        _assert_same(table, make_table(SCORES["mixed"]))
        assert str(np.random.get_state(legacy=False)) == state, "NumPy's global generator was used"

    def _draw(self, table: Table, count: int, seed: int = 0) -> Ints:
        slots = make_groups([[0, 0, 0, 0]] * count)
        context = make_context(table, seed=seed, slots=slots)
        return _called("sampler", self.strategy).sample(table, count, context)


class MixerContract:
    """Every mixer: of the entries that were drawn, every row at most once a slot; table untouched."""

    strategy: Mixer

    def test_takes_rows_that_were_drawn_and_none_twice(self) -> None:
        """For one entry a slot and for two, and for a slot with one entry only. Every column is as before."""
        scores = [1.0, 2.0, 3.0, 4.0]
        table = make_table(scores)
        slots = make_groups([[0, 0, 0, 0], [1, 0, 0, 1]])
        for drawn in ([[0], [1]], [[0, 2], [1, 3]], [[3, -1], [0, 1]]):
            context = make_context(table, slots=slots)
            _called("mixer", self.strategy).mix(table, np.array(drawn), slots, context)
        _assert_same(table, make_table(scores))


class SelectorContract:
    """Every selector: distinct indices of fresh groups."""

    strategy: Selector

    def test_selects_distinct_groups(self) -> None:
        """Indices lie in the batch and none comes twice."""
        for rewards in ([[0, 0, 0, 0], [1, 0, 0, 1], [1, 1, 1, 1]], [[0, 1, 0, 0]]):
            _called("selector", self.strategy).select(make_groups(rewards), make_context())


def _assert_same(table: Table, before: Table) -> None:
    for name in table.names:
        column, expected = getattr(table, name), getattr(before, name)
        np.testing.assert_array_equal(column, expected, err_msg=f"the column {name} was changed")


def make_tokenizer() -> Any:
    """A character tokenizer built in code: digits, `+-=* `, small letters; pad, eos and unk of its own."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "<eos>", "<unk>", *CHARACTERS]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def make_model(tokenizer: Any, hidden_size: int = 32, layers: int = 2, seed: int = 0, **overrides: Any) -> Any:
    """A random Qwen2 on the CPU, without dropout."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        **overrides,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(Qwen2Config(**settings))


def make_trainer(
    output_dir: str | Path,
    reward: Callable[..., list[float | None]] | list[Callable[..., list[float | None]]],
    prompts: Sequence[str] = ("1=", "12=", "123+4="),
    trainer_class: type | None = None,
    model: Any = None,
    eval_prompts: Sequence[str] | None = None,
    **settings: Any,
) -> Any:
    """A stock `trl.GRPOTrainer` of a tiny random model on the CPU: 3 groups of 4 rows, 6 completion tokens, 4 updates.

    Args:
        output_dir (`str` or `Path`): Where the trainer writes.
        reward (`Callable` or list of them): Reward functions in TRL's form.
        prompts (`Sequence[str]`): Prompts, repeated as often as the updates need.
        trainer_class (`type`, *optional*): A subclass of GRPOTrainer.
        model (`PreTrainedModel`, *optional*): Instead of the tiny one.
        eval_prompts (`Sequence[str]`, *optional*): Prompts of an eval dataset.
        **settings: Of `GRPOConfig`.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    groups = 3
    size = settings.get("num_generations", 4)
    defaults: dict[str, Any] = {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": groups * size,
        "num_generations": size,
        "max_completion_length": 6,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_steps": 4,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "shuffle_dataset": False,
        "bf16": False,
    }
    tokenizer = make_tokenizer()
    if model is None:
        model = make_model(tokenizer)
    if settings.get("beta") and not model.config._name_or_path:
        # TRL loads the reference model from where this one was
        path = Path(output_dir) / "initial_model"
        model.save_pretrained(path)
        model = type(model).from_pretrained(path)
    eval_dataset = None
    if eval_prompts:
        eval_dataset = Dataset.from_list([{"prompt": prompt} for prompt in eval_prompts])
    rows = [{"prompt": prompt} for prompt in list(prompts) * 64]
    make = trainer_class or GRPOTrainer
    return make(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(**{**defaults, **settings}),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
    )
