"""Mistakes of users, tried in earnest: each is told before training starts, with setting, value and remedy.

A row is a mistake and what its message must say.
"""

import warnings

import numpy as np
import pytest
from support import DEAD, HALF, LIVE, Rewards, plugin_class
from transformers import Trainer, TrainingArguments

import trl_replay
from trl_replay import EvictorSpec, Preset, ReplayConfig, ReplayError
from trl_replay.cli.commands import main
from trl_replay.testing import make_model, make_tokenizer, make_trainer


class Desk:
    """A place to make mistakes: a folder, a tiny trainer, and the command line."""

    def __init__(self, folder, plug):
        self.folder = folder
        self.plug = plug
        self.trained = []

    def trainer(self, **settings):
        trainer = make_trainer(self.folder / "run", Rewards([LIVE, HALF, DEAD]), **settings)
        self.trained.append((trainer, state(trainer)))
        return trainer

    def several(self):
        return make_trainer(self.folder / "run", [Rewards([DEAD], name=name) for name in ("accuracy", "brevity")])

    def plain(self):
        arguments = TrainingArguments(str(self.folder), use_cpu=True, report_to="none")
        return Trainer(make_model(make_tokenizer()), arguments)

    def write(self, name, text):
        path = self.folder / name
        path.write_text(text)
        return str(path)


def state(trainer):
    return dict(vars(trainer)), list(trainer.callback_handler.callbacks)


def attach(**settings):
    return lambda desk: trl_replay.attach(desk.trainer(), **settings)


def on(beta=0.0, **settings):
    return lambda desk: trl_replay.attach(desk.trainer(beta=beta), **settings)


def command(*words):
    def act(desk):
        assert main([word.replace("FOLDER", str(desk.folder)) for word in words]) == 1

    return act


def warm_start(text):
    return lambda desk: trl_replay.attach(
        desk.trainer(), replay_warm_start=desk.write("warm.jsonl", text)
    ).trainer.train()


def plugin(**functions):
    return plugin_class(**functions)()


def trains_with(**functions):
    def act(desk):
        name = desk.plug(plugin(**functions), "mine")
        trl_replay.attach(desk.trainer(), replay_plugins=[name], replay_start=0).trainer.train()

    return act


def offers(factory):
    def act(desk):
        desk.plug(plugin(strategies=lambda: [EvictorSpec("own", factory, "")]), "mine")
        trl_replay.attach(desk.trainer(), replay_evictor="mine/own")

    return act


class OfNoInstance:
    def __call__(self, table, context):
        return table.score


def misspelled(desk):
    ReplayConfig().replay_max_agee = 3


def too_late(desk):
    trl_replay.attach(desk.trainer()).config.replay_max_age = 3


def whole_column(session):
    session.buffer.table.uses = np.zeros(0)


PYTHON = {
    "a size in quotes": (attach(replay_buffer_size="64"), ["replay_buffer_size='64'", "give a whole number"]),
    "bytes without a unit": (attach(replay_max_bytes=64), ["replay_max_bytes=64", "Raise it", "'512MB'"]),
    "a share in percent": (attach(replay_max_fraction=50), ["replay_max_fraction=50", "between 0 and 1"]),
    "a start in percent": (attach(replay_start="10%"), ["replay_start='10%'", "'adaptive', a number of updates"]),
    "a start after the end": (attach(replay_start=1000), ["replay_start=1000", "max_steps=4", "Lower it"]),
    "a truth in quotes": (attach(use_replay="false"), ["use_replay='false'", "give true or false"]),
    "no correction": (attach(replay_correction=None), ["replay_correction=None", "give the name", "list"]),
    "a misspelled setting": (attach(buffer_size=64), ["attach()", "'buffer_size'", "mean 'replay_buffer_size'"]),
    "a misspelled field": (misspelled, ["ReplayConfig", "'replay_max_agee'", "mean 'replay_max_age'"]),
    "a setting that is changed too late": (too_late, ["replay_max_age=3", "detach", "attach again"]),
    "an unknown strategy": (attach(replay_evictor="lru"), ["replay_evictor='lru'", "There are: ", "fifo"]),
    "a strategy of an unknown module": (
        attach(replay_evictor="no_such:fifo"),
        ["replay_evictor='no_such:fifo'", "No module named", "package.module:attribute"],
    ),
    "a list as a strategy": (attach(replay_evictor=["fifo"]), ["replay_evictor=['fifo']", "give the name"]),
    "a class as a strategy": (attach(replay_evictor=OfNoInstance), ["replay_evictor='OfNo", "give an instance"]),
    "an argument out of range": (
        attach(replay_sampler="proportional(alpha=-1)"),
        ["replay_sampler='proportional(alpha=-1)'", "give a finite number of at least 0"],
    ),
    "an argument out of range of a plugin": (
        attach(replay_plugins=["bapo(high=7)"]),
        ["replay_plugins=['bapo(high=7)']", "give a number from 0 to 1"],
    ),
    "an argument without its name": (
        attach(replay_correction="truncated(3.0)"),
        ["replay_correction='truncated(3.0)'", "name(argument=value)", "each by its name"],
    ),
    "an argument given twice": (attach(replay_correction="truncated(cap=3, cap=2)"), ["(cap=3, cap=2)", "once"]),
    "a text without quotes": (attach(replay_correction="truncated(level=token)"), ["level=token", "a text in quotes"]),
    "an argument that would be executed": (
        attach(replay_correction="truncated(cap=float('inf'))"),
        ["truncated(cap=float", "a number, a text in quotes"],
    ),
    "short groups of no file": (
        attach(replay_warm_start_short="resample"),
        ["replay_warm_start_short='resample'", "set replay_warm_start"],
    ),
    "a share of less than a group": (
        attach(replay_max_fraction=0.3),
        ["replay_max_fraction=0.3", "none of the 3 groups of a batch", "Set it to 0.34 or more"],
    ),
    "an unknown plugin": (attach(replay_plugins=["bapoo"]), ["replay_plugins='bapoo'", "mean 'bapo'"]),
    "a plugin that does nothing in training": (
        attach(replay_plugins=["freshness"]),
        ["replay_plugins=['freshness']", "no hook for training", "trl-replay list freshness"],
    ),
    "a misspelled preset": (
        attach(replay_preset="sample_eficient"),
        ["replay_preset='sample_eficient'", "mean 'sample_efficient'"],
    ),
    "unknown prompts of rounds": (
        on(replay_refill="other(rounds=1)"),
        ["replay_refill='other(rounds=1)'", "'new(rounds=2)' for new prompts or 'same(rounds=2)'"],
    ),
    "a weight that float32 does not hold": (attach(replay_weight=1e39), ["can't be used", "give a number"]),
    "a cap that float32 does not hold": (
        attach(replay_correction="truncated(cap=1e300)"),
        ["can't be used", "give a number"],
    ),
    "a scope that is none": (attach(replay_scope="sharded"), ["replay_scope='sharded'", "give 'auto', 'process'"]),
    "a column that there is not": (attach(replay_task_columns=["label"]), ["['label']", "columns", "'prompt'"]),
    "a KL term that there is not": (attach(replay_kl="fresh"), ["replay_kl='fresh'", "beta=0", "set beta"]),
    "a reference that is synced": (
        lambda desk: trl_replay.attach(desk.trainer(beta=0.1, sync_ref_model=True)),
        ["sync_ref_model=True", "set replay_kl='fresh'"],
    ),
    "iterations that there are not": (
        attach(replay_iterations="replay"),
        ["replay_iterations='replay'", "num_iterations=1", "set num_iterations=2"],
    ),
    "a baseline over two prompts": (
        attach(replay_advantages="joint"),
        ["replay_advantages='joint'", "use replay_sampler='same_prompt'"],
    ),
    "more passes than rows": (attach(replay_retire_passes=9), ["replay_retire_passes=9", "=4", "lower it"]),
    "two settings that exclude each other": (
        on(beta=0.1, replay_kl="all_wrong", replay_unfilled="mask"),
        ["replay_kl='all_wrong'", "replay_unfilled='mask'", "use replay_unfilled='keep'"],
    ),
    "a plain trainer": (
        lambda desk: trl_replay.attach(desk.plain()),
        ["Attach to a trl.GRPOTrainer: Trainer has no _generate_and_score_completions", "no built-in attaches to it"],
    ),
    "a share of no group of a selector": (
        attach(replay_selector="always(share=0.3)"),
        ["replay_selector='always' (share=0.3)", "none of the 3 groups", "'always(share=0.34)'", "or more"],
    ),
    "a misspelled reward": (
        lambda desk: trl_replay.attach(desk.several(), replay_reward="acuracy"),
        ["replay_reward='acuracy'", "Did you mean 'accuracy'?"],
    ),
    "attached without with": (
        lambda desk: trl_replay.attached(desk.trainer()).buffer,
        ["attached(trainer) is for a with statement", "trl_replay.attach(trainer)"],
    ),
    "an entry that there is not": (
        lambda desk: trl_replay.attach(desk.trainer()).entry(999),
        ["no entry 999", "list(session.buffer)"],
    ),
    "taking back what was not registered": (lambda desk: trl_replay.unregister("mine"), ["no plugin 'mine'"]),
}

COMMANDS = {
    "export nowhere": (command("export", "nowhere", "out.parquet"), ["nowhere does not exist", "output_dir"]),
    "export a folder without a buffer": (
        command("export", "FOLDER", "out.parquet"),
        ["holds no replay buffer", "give a checkpoint of a run with replay"],
    ),
    "export to another format": (
        lambda desk: trl_replay.attach(desk.trainer()).export("out.csv"),
        ["out.csv can't be written", "ends in .parquet"],
    ),
    "a misspelled subcommand": (command("reprot", "here"), ["'reprot'", "report"]),
}

FILES = {
    "a warm start from nowhere": (
        attach(replay_warm_start="no.jsonl"),
        ["replay_warm_start='no.jsonl'", "a file that exists"],
    ),
    "a warm start in another format": (
        lambda desk: trl_replay.attach(desk.trainer(), replay_warm_start=desk.write("warm.txt", "")),
        ["replay_warm_start=", "warm.txt' can't be used", "give a .parquet, .jsonl, .json, or .csv file"],
    ),
    "a warm start of no buffer": (
        lambda desk: trl_replay.attach(
            desk.trainer(), replay_warm_start=desk.write("warm.jsonl", ""), replay_buffer_size=0
        ),
        ["replay_warm_start=", "replay_buffer_size=0 stores nothing", "give a size"],
    ),
    "a warm start with rewards in words": (
        warm_start('{"prompt": "1=", "completion": "1", "reward": "good"}\n'),
        ["Row 0 of", "'good' in reward", "takes a number from"],
    ),
}

PLUGINS = {
    "a strategy in the place of its factory": (
        offers(lambda table, context: table.score),
        ["replay_evictor='mine/own'", "takes (table, context), as the evictor itself", "lambda: f"],
    ),
    "a factory that asks for an argument": (
        offers(lambda power: lambda table, context: table.score**power),
        ["replay_evictor='mine/own'", "missing 1 required positional argument: 'power'"],
    ),
    "a strategy of an unknown column": (
        offers(lambda: lambda table, context: table.difficulty),
        ["replay_evictor='mine/own'", "no column 'difficulty'", "its columns are"],
    ),
    "a preset with a misspelled setting": (
        lambda desk: trl_replay.attach(
            desk.trainer(),
            replay_preset=desk.plug(plugin(presets=lambda: [Preset("mine", {"replay_max_agee": 3}, "")]), "mine"),
        ),
        ["preset 'mine'", "'replay_max_agee'", "mean 'replay_max_age'"],
    ),
    "a column that is set as a whole": (
        trains_with(attached=whole_column),
        ["'mine'", "table.uses can't be replaced", "table.add_column"],
    ),
}

IN_TRAINING = {
    "advantages of another shape": (
        trains_with(advantages=lambda groups: groups.reward_mean),
        ["'mine'", "trl_replay_advantages", "shape (3,)", "must return numbers of shape (3, 4)"],
    ),
    "a metric that is NaN": (
        trains_with(metrics=lambda context: {"mine/level": np.nan}),
        ["trl_replay_metrics", "mine/level=nan", "not logged", "omit undefined values"],
    ),
    "a metric of a taken name": (
        trains_with(metrics=lambda context: {"replay/size": 5.0}),
        ["trl_replay_metrics", "'replay/size'", "rename it"],
    ),
}
"""What only training shows: it is told at the first generation batch."""

AFTERWARDS = {"a setting that is changed too late", "an entry that there is not", "attached without with"}
"""Mistakes with a trainer that is attached to."""
MISTAKES = {**PYTHON, **COMMANDS, **FILES, **PLUGINS, **IN_TRAINING}


@pytest.fixture
def desk(tmp_path, plug):
    return Desk(tmp_path, plug)


def told(act, desk, capfd):
    """All that a user gets to read, and whether it was raised."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            act(desk)
            words = []
        except (ReplayError, SystemExit, KeyError) as error:
            words = [str(error), *getattr(error, "__notes__", [])]
    message = "\n".join([*words, *(str(warning.message) for warning in warned), capfd.readouterr().err])
    return message, bool(words)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_told_with_the_setting_the_value_and_the_remedy(desk, capfd, mistake):
    act, words = MISTAKES[mistake]
    message, is_raised = told(act, desk, capfd)
    assert [part for part in words if part not in message] == [], message
    if mistake not in IN_TRAINING:
        assert not any(trainer.state.global_step for trainer, _ in desk.trained), "it was told after training"
    if mistake in PYTHON and is_raised and mistake not in AFTERWARDS:
        assert all(state(trainer) == before for trainer, before in desk.trained), "the trainer was changed"
    assert not (desk.folder / "started").exists(), "the command was started"


def test_89_another_number_of_generations_than_at_attach_raises_at_the_next_batch(tmp_path):
    trainer = make_trainer(tmp_path, Rewards([LIVE, DEAD, HALF]), max_steps=2)
    trl_replay.attach(trainer)
    trainer.train()
    trainer.num_generations = trainer.args.num_generations = 6
    with pytest.raises(trl_replay.SeamError, match=r"num_generations was 4 at attach and is 6 now.*attach again"):
        trainer.train()
