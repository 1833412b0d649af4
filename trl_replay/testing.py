"""Helpers for tests of plugins and of trl_replay: contract suites, and a tiny trainer built in code.

Subclass a suite and give it the strategy; pytest does the rest:

    class TestMySampler(SamplerContract):
        strategy = staticmethod(my_sampler)
        columns = {"difficulty": [0.5, 0.9]}  # of your plugin, if it reads some

What plugins do in hooks has suites, too (`AdvantagesContract`, `InputsContract`, `PlanContract`, `PluginContract`):

    class TestMyCurriculum(InputsContract, PluginContract):
        plugin = MyCurriculum  # a class or function that makes one; a module with hooks, itself
"""

from __future__ import annotations

import copy
import functools
import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar

import numpy as np

from .checkpoint.discovery import FOLDER
from .checkpoint.format import PLUGINS, rank_folder
from .data.plan import EDITABLE, FRESH, Plan
from .data.prompt_table import PromptTable
from .data.table import COLUMNS, ROW_COLUMNS, Table
from .data.types import Context, Floats, Groups, InputsContext, ReplayedRows, Row
from .generation.prompts import LEAST_TRIES, TRIES
from .hooks import KIND_OF_HOOK, CheckedHooks
from .registry import Plugin, register, registry, unregister
from .setup.assembly import made_up_groups, made_up_rows, made_up_table
from .specs import Kind

CHARACTERS = "0123456789+-=* abcdefghijklmnopqrstuvwxyz"
PLAIN: Mapping[str, Any] = {
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
}
"""Settings of tiny trainers on the CPU: each update is logged, and nothing is written."""


def make_table(scores: Sequence[float], **columns: Any) -> Table:
    """Return a table with one entry per score: serials 0, 1, …, ascending updates, distinct tags, groups of 4 rows of
    which the first has a reward of 1; `columns` override, or are a plugin's. `peers` and `newer` follow from
    `prompt`."""
    ours = COLUMNS | ROW_COLUMNS
    typed: dict[str, Any] = {name: np.asarray(columns[name], ours[name]) for name in columns.keys() & ours}
    table = made_up_table(scores, 4, **typed)
    for name in columns.keys() - ours:
        values = np.asarray(columns[name])
        table.add_column(name, values.dtype)
        table.writable(name)[:] = values
    return table


def make_groups(rewards: Sequence[Sequence[float]], update: int = 0) -> Groups:
    """Return groups of one reward function with TRL's group-scaled advantages; `rewards` is `(n, G)`."""
    return made_up_groups(np.asarray(rewards, np.float64)[:, :, None], update)


def make_context(table: Table | None = None, update: int = 100, seed: int = 0, **overrides: Any) -> Context:
    """Return a context like those that strategies get."""
    if table is None:
        table = make_table([])
    settings: dict[str, Any] = {"capacity": max(len(table), 1), "num_generations": 4, **overrides}
    return Context(update=update, rng=np.random.default_rng(seed), table=table, **settings)


def make_plan(groups: Groups, table: Table | None = None, entries: Sequence[int] = ()) -> Plan:
    """Return a plan like those that `trl_replay_plan` gets.

    Args:
        groups ([`Groups`]): The fresh ones.
        table ([`Table`], *optional*): The stored ones.
        entries (`Sequence[int]`): The row of `table` that fills each of the first slots; -1 leaves it fresh.
    """
    plan = Plan.of(groups)
    for slot, entry in enumerate(entries):
        if entry != FRESH and table is not None:
            plan.entry[slot] = entry
            plan.advantages[slot] = table.row_advantage[entry]
            plan.masked[slot] = table.row_masked[entry]
    return plan


def make_prompts(*groups: tuple[int, int, int], size: int = 4) -> PromptTable:
    """Return the prompts of a run that generated these groups.

    Args:
        *groups (`tuple[int, int, int]`): `(key, passes, update)` of each; without or with all passes it is dead.
        size (`int`): Rows of a group.
    """
    prompts = PromptTable()
    for key, passes, update in groups:
        passed = np.arange(size)[None] < passes
        prompts.note(np.array([key]), np.array([key]), passed, np.array([passes in (0, size)]), update)
    return prompts


def make_inputs_context(
    new: Sequence[Row] = (),
    prompts: PromptTable | None = None,
    key: Callable[[Row], int] | None = None,
    update: int = 100,
    seed: int = 0,
    round: int = 0,
    **overrides: Any,
) -> InputsContext:
    """Return a context like those that `trl_replay_inputs` gets.

    Args:
        new (`Sequence[dict]`): The dataset's other rows: `new_prompts` gives them in this order, again and again.
        prompts ([`PromptTable`], *optional*): Those generated for so far, as `make_prompts` makes them.
        key (`Callable`, *optional*): Tells rows apart; by their prompt if not given.
        update, seed, round (`int`): Of the context.
        **overrides: Of the other fields of `InputsContext`.
    """
    key = key or _key
    others = itertools.cycle(new)

    def new_prompts(count: int, skip: Callable[[Row], bool] | None = None) -> list[Row]:
        given: list[Row] = []
        passed_over: list[Row] = []
        for row in itertools.islice(others, count * TRIES + LEAST_TRIES):
            (passed_over if skip is not None and skip(row) else given).append(row)
            if len(given) == count:
                break
        return [*given, *passed_over][:count]

    settings: dict[str, Any] = {
        "capacity": 0,
        "num_generations": 4,
        "table": make_table([]),
        "new_prompts": new_prompts,
        "prompt_rows": lambda keys: [row for wanted in keys for row in new if key(row) == wanted],
        **overrides,
    }
    prompts = PromptTable() if prompts is None else prompts
    rng = np.random.default_rng(seed)
    return InputsContext(update=update, rng=rng, prompts=prompts, round=round, key=key, **settings)


def make_replayed_rows(ages: Sequence[int] = (1, 2, 3), drift: float = 0.1) -> ReplayedRows:
    """Return replayed rows like those that a correction gets, one per age: five tokens each, the last row four; the
    first row's advantage is positive. `drift` is the log ratio of every token."""
    return made_up_rows(ages, drift)


def _key(row: Row) -> int:
    return zlib.crc32(str(row["prompt"]).encode())


SCORES: dict[str, Sequence[float]] = {
    "empty": [],
    "one": [1.0],
    "equal": [2.0] * 7,
    "zero": [0.0] * 5,
    "mixed": [0.5, 0.0, 3.0, 3.0, 1e-300, 1e300, -1.0, 7.0],
}
"""Score columns that every evictor and sampler must cope with."""


REWARDS: list[list[float]] = [[0, 1, 0, 0], [1, 1, 1, 0], [0.2, 0.4, 0.1, 0.9]]


class _StrategyContract:
    """What a strategy of every kind owes: what its kind must return, the same from the same generator, and arguments
    and NumPy's global generator as they were.

    Attributes:
        columns (`Mapping[str, Any]`): Plugins' columns that it reads, with their values: one, or several in turn.
    """

    kind: ClassVar[Kind]
    strategy: Callable[..., Any]
    columns: Mapping[str, Any] = MappingProxyType({})

    def test_gives_what_its_kind_must(self) -> None:
        """As a session checks it."""
        for case in self._cases():
            self._call(*case)

    def test_gives_the_same_from_the_same_generator(self) -> None:
        """All randomness is `context.rng`'s."""
        for once, again in zip(self._cases(), self._cases(), strict=True):
            first, second = (list(_values(self._call(*case)).values()) for case in (once, again))
            assert first == second, (
                f"gave {first}, then {second}, from the same arguments and generator: processes would differ. Draw "
                "from context.rng alone."
            )

    def test_leaves_its_arguments_and_the_global_generator_alone(self) -> None:
        """Every column, array, and tensor is as before."""
        state = str(np.random.get_state(legacy=False))
        for case, untouched in zip(self._cases(), self._cases(), strict=True):
            self.strategy(*case)
            for name, value in _values(untouched[:-1]).items():
                assert _values(case[:-1])[name] == value, f"changed {name}"
        assert str(np.random.get_state(legacy=False)) == state, "NumPy's global generator was used"

    def _cases(self) -> Iterator[tuple[Any, ...]]:
        """Arguments of calls, the context last: new ones at each call."""
        raise NotImplementedError

    def _call(self, *arguments: Any) -> Any:
        """Call it as a session does."""
        hook = next(hook for hook, kind in KIND_OF_HOOK.items() if kind == self.kind)
        return getattr(CheckedHooks([], {}, {self.kind: self.strategy}), hook)(*arguments)

    def _table(self, scores: Sequence[float]) -> Table:
        return make_table(scores, **{name: np.resize(given, len(scores)) for name, given in self.columns.items()})


def _values(given: Any) -> dict[str, Any]:
    """The numbers in arguments or in a result, as texts by name, so that NaN equals NaN."""
    if isinstance(given, tuple):
        return {key: value for part in given for key, value in _values(part).items()}
    if isinstance(given, Table):
        return {f"the column {name}": str(getattr(given, name).tolist()) for name in given.names}
    if is_dataclass(given):
        held = {field.name: getattr(given, field.name) for field in fields(given)}
        return {name: str(value.tolist()) for name, value in held.items() if hasattr(value, "tolist")}
    return {"an array": str(np.asarray(given).tolist())}


class ScorerContract(_StrategyContract):
    """A scorer returns one finite number per group, whatever the other groups are."""

    kind = "scorer"

    def _cases(self) -> Iterator[tuple[Any, ...]]:
        for rewards in (REWARDS, REWARDS[:1]):
            yield make_groups(rewards, update=3), make_context(self._table([]))

    def test_gives_finite_numbers_whatever_the_other_groups_are(self) -> None:
        """A group's score is the same alone and among others."""
        groups, context = next(self._cases())
        scores = self._call(groups, context)
        assert np.isfinite(scores).all(), f"scores {scores} are not finite"
        alone = [self._call(groups.take([row]), context)[0] for row in range(len(groups))]
        np.testing.assert_allclose(alone, scores, rtol=1e-12)


class EvictorContract(_StrategyContract):
    """An evictor returns one keep rank per entry, `(n,)`: NaN is not allowed, infinities are."""

    kind = "evictor"

    def _cases(self) -> Iterator[tuple[Any, ...]]:
        for scores in SCORES.values():
            table = self._table(scores)
            yield table, make_context(table)


class SamplerContract(_StrategyContract):
    """A sampler draws distinct rows for at most as many slots as requested; -1 leaves a slot."""

    kind = "sampler"

    def _cases(self) -> Iterator[tuple[Any, ...]]:
        for scores in filter(None, SCORES.values()):  # the session does not sample from nothing
            for count in (1, len(scores), len(scores) + 3):
                table = self._table(scores)
                yield table, count, make_context(table, slots=make_groups([[0, 0, 0, 0]] * count))


class MixerContract(_StrategyContract):
    """A mixer uses only entries that were drawn, and every row at most once per slot."""

    kind = "mixer"

    def _cases(self) -> Iterator[tuple[Any, ...]]:
        for drawn in ([[0], [1]], [[0, 2], [1, 3]], [[3, -1], [0, 1]]):  # one entry a slot, two, one or two
            table, slots = self._table([1.0, 2.0, 3.0, 4.0]), make_groups([[0, 0, 0, 0], [1, 0, 0, 1]])
            yield table, np.array(drawn), slots, make_context(table, slots=slots)


class SelectorContract(_StrategyContract):
    """A selector returns distinct indices of fresh groups."""

    kind = "selector"

    def _cases(self) -> Iterator[tuple[Any, ...]]:
        for rewards in ([[0, 0, 0, 0], [1, 0, 0, 1], [1, 1, 1, 1]], [[0, 1, 0, 0]], REWARDS * 4):
            yield make_groups(rewards), make_context(self._table([]))


class CorrectionContract(_StrategyContract):
    """A correction returns finite old log-probs, finite weights of at least 0, and shifts."""

    kind = "correction"

    def _cases(self) -> Iterator[tuple[Any, ...]]:
        for rows in (make_replayed_rows(), make_replayed_rows(drift=0.0), make_replayed_rows([7], drift=4.0)):
            yield rows, make_context(self._table([]))


class AdvantagesContract:
    """A plugin that shapes advantages returns a number or NaN for each row, from the groups alone. `plugin` makes
    one."""

    plugin: Callable[[], Any] | ModuleType

    def test_gives_a_number_for_each_row(self) -> None:
        """The shape is `(n, G)` for several groups and for one."""
        for rewards in (REWARDS, REWARDS[:1]):
            self._shape(rewards)

    def test_goes_by_the_groups_alone(self) -> None:
        """Mixed groups pass through it too, later: neither the update nor the generator matters."""
        first = self._shape(REWARDS)
        for context in (make_context(), make_context(update=7, seed=1)):
            np.testing.assert_array_equal(self._shape(REWARDS, context), first, "the same groups got other advantages")

    def _shape(self, rewards: Sequence[Sequence[float]], context: Context | None = None) -> Floats:
        groups = make_groups(rewards)
        shaped = _hooks_of(type(self)).advantages(groups, context or make_context())
        return groups.advantages if shaped is None else shaped


class InputsContract:
    """A curriculum returns a row of the dataset for each group, drawn only with `context.rng`. `plugin` makes one."""

    plugin: Callable[[], Any] | ModuleType

    def test_gives_a_row_for_each_group(self) -> None:
        """Contexts where nothing was generated yet, and where no or every completion of each prompt passed."""
        for passes in (None, 0, 4):
            self._choose(passes)

    def test_chooses_the_same_from_the_same_generator(self) -> None:
        """So that two processes with rows of one group generate for one prompt."""
        assert self._choose(4) == self._choose(4), "the same generator chose other rows"

    def _choose(self, passes: int | None) -> list[Row]:
        rows = [{"prompt": f"{number}="} for number in range(4)]
        seen = [] if passes is None else [(key, passes, 99) for key in map(_key, rows)]
        context = make_inputs_context([{"prompt": "9="}], prompts=make_prompts(*seen))
        return _hooks_of(type(self)).inputs(rows, context) or rows


class PlanContract:
    """A plugin edits plans by the rules of [`Plan`], and alike wherever it is asked the same. `plugin` makes one;
    `columns` are the plugin's, as of strategies."""

    plugin: Callable[[], Any] | ModuleType
    columns: Mapping[str, Any] = MappingProxyType({})

    def test_makes_edits_that_a_plan_allows(self) -> None:
        """A batch with nothing replayed, one with a dead slot that is filled, and a further iteration."""
        for case in PLANS:
            self._edit(*case)

    def test_edits_alike_what_is_alike(self) -> None:
        """Processes that share a buffer plan alike: by the arguments, and `context.rng` alone."""
        state = str(np.random.get_state(legacy=False))
        for case in PLANS:
            first, second = self._edit(*case), self._edit(*case)
            for name in ("entry", "source", *EDITABLE):
                equal = np.array_equal(getattr(first, name), getattr(second, name))
                assert equal, f"the same arguments gave another plan.{name}"
        assert str(np.random.get_state(legacy=False)) == state, "NumPy's global generator was used"

    def _edit(self, entries: Sequence[int], iteration: int) -> Plan:
        table = make_table([1.0, 2.0], **{name: np.resize(given, 2) for name, given in self.columns.items()})
        groups = make_groups([*REWARDS, [0, 0, 0, 0]])
        plan = make_plan(groups, table, entries)
        if iteration:
            plan.leave_empty(plan.unfilled)
        context = make_context(table, iteration=iteration)
        _hooks_of(type(self)).plan(plan, groups, table, context, of_tokens=False)
        return plan


PLANS: Sequence[tuple[Sequence[int], int]] = (((), 0), ((-1, -1, -1, 1), 0), ((0, -1, -1, 1), 1))
"""Entries that fill slots, and the iteration."""


class PluginContract:
    """A plugin trains on a tiny trainer, and its state belongs to one session, is saved, and is resumed.

        class TestMyPlugin(PluginContract):
            plugin = MyPlugin
            settings = {"replay_refill": "new(rounds=1)"}

    `plugin` makes one, or is a module with hooks. `settings` is what a run needs besides `replay_plugins`; there it is
    called `under_test`, and a module that is installed by its name.
    """

    plugin: Callable[[], Any] | ModuleType
    settings: Mapping[str, Any] = MappingProxyType({})

    def test_what_it_saved_comes_back(self, tmp_path: Path) -> None:
        """A new plugin that has loaded a checkpoint saves the files that the checkpoint holds."""
        self._train(tmp_path, _made(type(self)))
        checkpoint = tmp_path / "checkpoint-2"
        saved = _files(rank_folder(checkpoint / FOLDER, 0) / PLUGINS)
        assert self._train(tmp_path, _made(type(self)), checkpoint) == saved, "it saves other files than it has loaded"

    def test_loads_a_checkpoint_that_is_older_than_it(self, tmp_path: Path) -> None:
        """There its folder is missing."""
        self._train(tmp_path, None)
        self._train(tmp_path, _made(type(self)), tmp_path / "checkpoint-2")

    def test_keeps_nothing_of_another_session(self, tmp_path: Path) -> None:
        """One object serves all sessions of a process: a second run begins as the first did."""
        plugin = _made(type(self))
        first, second = (self._train(tmp_path / name, plugin) for name in ("first", "second"))
        assert first == second, "the second session began with what the first had left"

    def _train(self, folder: Path, plugin: Any, checkpoint: Path | None = None) -> Mapping[str, bytes]:
        """Train two updates, or none from their checkpoint on; return what the plugin saves when it begins."""
        from .trainer.attachment import attach

        trainer = make_trainer(folder, _every_third_is_dead, max_steps=2, save_strategy="steps", save_steps=2)
        with _registered(plugin) as names:
            settings = {"replay_plugins": names, **self.settings} if names else {}
            session = attach(trainer, **settings)
        with TemporaryDirectory() as scratch:
            trainer.add_callback(_saving(session, Path(scratch) / "plugins"))
            trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
            return _files(Path(scratch) / "plugins")


UNDER_TEST = "under_test"


def _every_third_is_dead(completions: Sequence[str], **columns: Any) -> list[float | None]:
    return [float(row % 4 == 0 and row // 4 % 3 != 1) for row in range(len(completions))]


def _saving(session: Any, directory: Path) -> Any:
    """A callback that saves the plugins when training begins, once a checkpoint is loaded."""
    from transformers import TrainerCallback

    def on_train_begin(self: Any, *given: Any, **named: Any) -> None:
        session.components.hooks.save(session, directory)

    return type("Saving", (TrainerCallback,), {"on_train_begin": on_train_begin})()


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _hooks_of(contract: Any) -> CheckedHooks:
    """Return the hooks of a new plugin as a session calls them."""
    return CheckedHooks([Plugin(UNDER_TEST, _made(contract), "a test", frozenset())], {}, {})


def _made(contract: Any) -> Any:
    """Make the plugin anew; return a module as it is."""
    return contract.plugin if isinstance(contract.plugin, ModuleType) else contract.plugin()


@contextmanager
def _registered(plugin: Any) -> Iterator[list[str]]:
    """Give the name of a plugin, which an installed one has already; none of none."""
    known = [name for name, found in registry().plugins.items() if plugin is not None and found.object is plugin]
    if known or plugin is None:
        yield known
        return
    register(plugin, UNDER_TEST)
    try:
        yield [UNDER_TEST]
    finally:
        unregister(UNDER_TEST)


def make_tokenizer() -> Any:
    """Return a character tokenizer built in code: digits, `+-=* `, lowercase letters; its own pad, eos and unk
    tokens."""
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
    """Return a random Qwen2 on the CPU, without dropout."""
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
    return copy.deepcopy(_model(seed, **settings))


@functools.cache
def _model(seed: int, **settings: Any) -> Any:
    """Return the same model at each call: to initialize it takes ten times as long as to copy it."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(Qwen2Config(**settings))


@functools.cache
def _dataset(prompts: tuple[Any, ...]) -> Any:
    from datasets import Dataset

    return Dataset.from_list([{"prompt": prompt} for prompt in prompts])


def make_trainer(
    output_dir: str | Path,
    reward: Callable[..., list[float | None]] | list[Callable[..., list[float | None]]],
    prompts: Sequence[str] = ("1=", "12=", "123+4="),
    trainer_class: type | None = None,
    model: Any = None,
    eval_prompts: Sequence[str] | None = None,
    **settings: Any,
) -> Any:
    """Return a stock `trl.GRPOTrainer` with a tiny random model on the CPU: 3 groups of 4 rows, 6 completion tokens, 4
    updates.

    Args:
        output_dir (`str` or `Path`): Where the trainer writes.
        reward (`Callable` or list of them): Reward functions in TRL's form.
        prompts (`Sequence[str]`): Prompts, repeated as often as the updates need.
        trainer_class (`type`, *optional*): A subclass of GRPOTrainer.
        model (`PreTrainedModel`, *optional*): Instead of the tiny one.
        eval_prompts (`Sequence[str]`, *optional*): Prompts of an eval dataset.
        **settings: Of `GRPOConfig`.
    """
    from trl import GRPOConfig, GRPOTrainer

    groups = 3
    size = settings.get("num_generations", 4)
    defaults: dict[str, Any] = {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": groups * size,
        "num_generations": size,
        "max_completion_length": 6,
        "learning_rate": 1e-2,
        "max_steps": 4,
        "shuffle_dataset": False,
        **PLAIN,
    }
    tokenizer = make_tokenizer()
    if model is None:
        model = make_model(tokenizer)
    if settings.get("beta") and not model.config._name_or_path:
        # TRL loads the reference model from where this one was
        path = Path(output_dir) / "initial_model"
        model.save_pretrained(path)
        model = type(model).from_pretrained(path)
    make = trainer_class or GRPOTrainer
    return make(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(**{**defaults, **settings}),
        train_dataset=_dataset(tuple(prompts) * 64),
        eval_dataset=_dataset(tuple(eval_prompts)) if eval_prompts else None,
        processing_class=tokenizer,
    )
