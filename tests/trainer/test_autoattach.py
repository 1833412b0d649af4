"""Unmodified scripts: `trl_replay.autoattach` in this process, and `trl-replay run` with the commands of the docs."""

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from forked import check, launch
from support import DEAD, LIVE, Rewards
from transformers import Trainer
from trl import GRPOTrainer

import trl_replay
from trl_replay import ConfigurationError, RefusedError
from trl_replay.cli.commands import main
from trl_replay.extras.run.bootstrap.sitecustomize import WhenImported
from trl_replay.extras.run.receipts import NOT_ATTACHED, REFUSED, Report, judge
from trl_replay.testing import make_model, make_tokenizer, make_trainer
from trl_replay.trainer.attachment import is_attached

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "running.md").read_text()
README = (ROOT / "README.md").read_text()


def session_of(trainer):
    from trl_replay.trainer import attachment

    return attachment._sessions[trainer]


# in this process


@pytest.fixture
def make(tmp_path):
    """Makes tiny trainers; afterwards, TRL's class is as it was."""
    before = dict(vars(GRPOTrainer)), Trainer.train

    def make(trainer_class=None):
        return make_trainer(tmp_path, Rewards([LIVE, DEAD, LIVE]), trainer_class=trainer_class, max_steps=2)

    yield make
    assert (dict(vars(GRPOTrainer)), Trainer.train) == before


def test_every_trainer_attaches_when_it_first_trains_and_not_before(make):
    undo = trl_replay.autoattach(replay_evictor="fifo")
    first, second = make(), make()
    assert not is_attached(first)
    first.train()
    assert session_of(first).config.replay_evictor == "fifo"
    assert session_of(first).metrics["replay/size"] > 0
    assert not is_attached(second)
    second.train()
    assert is_attached(second)
    undo()
    undo()
    third = make()
    third.train()
    assert not is_attached(third)


def test_subclasses_attach_whatever_they_do_to_train(make):
    class GoesAround(GRPOTrainer):
        def train(self):
            return Trainer.train(self)

    undo = trl_replay.autoattach()

    class Mixin:
        def train(self):
            return Trainer.train(self)

    class MixedIn(Mixin, GRPOTrainer):
        pass

    class Calls(GRPOTrainer):
        def train(self, *args, **kwargs):
            return super().train(*args, **kwargs)

    for trainer_class in (GoesAround, MixedIn, Calls):
        trainer = make(trainer_class)
        trainer.train()
        assert is_attached(trainer), trainer_class.__name__
    undo()


def test_training_again_keeps_the_session_and_detach_is_not_undone(make):
    undo = trl_replay.autoattach()
    trainer = make()
    trainer.train()
    session = session_of(trainer)
    trainer.train()
    assert session_of(trainer) is session
    assert session.update == 4
    trl_replay.detach(trainer)
    trainer.train()
    assert not is_attached(trainer)
    undo()


@pytest.mark.parametrize("own", [{"replay_evictor": "heap"}, {"use_replay": False}])
def test_a_script_that_attaches_by_itself_keeps_its_settings(make, own):
    undo = trl_replay.autoattach(replay_evictor="fifo")
    trainer = make()
    session = trl_replay.attach(trainer, **own)
    trainer.train()
    assert session_of(trainer) is session
    undo()


def test_the_last_call_holds_until_it_is_undone(make):
    undo_first = trl_replay.autoattach(replay_evictor="fifo")
    undo_last = trl_replay.autoattach(replay_evictor="heap")
    found = []
    for undo in (undo_last, undo_first):
        trainer = make()
        trainer.train()
        found.append(session_of(trainer).config.replay_evictor)
        undo()
    assert found == ["heap", "fifo"]


def test_somebody_elses_patch_of_train_outlives_ours(make):
    undo = trl_replay.autoattach()
    ours = GRPOTrainer.train
    GRPOTrainer.train = lambda self: ours(self)
    undo()
    trainer = make()
    trainer.train()
    assert not is_attached(trainer)
    del GRPOTrainer.train


def test_88_a_trainer_that_is_a_copy_of_trls_is_told_by_name(tmp_path):
    """As Unsloth does it: its class has TRL's source, and is no subclass."""
    from transformers import Trainer, TrainingArguments

    class CopiedGRPOTrainer(Trainer):
        def _inner_training_loop(self, *args, **kwargs):
            return "trained"

    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    trainer = CopiedGRPOTrainer(model=make_model(make_tokenizer()), args=arguments)
    undo = trl_replay.autoattach()
    try:
        with pytest.warns(UserWarning, match="a CopiedGRPOTrainer trained, which is no subclass of TRL's GRPOTrainer"):
            assert trainer.train() == "trained"
    finally:
        undo()


def test_a_refusal_is_raised_by_train_and_a_wrong_setting_at_once(make):
    with pytest.raises(ConfigurationError, match=r"autoattach\(\) has no setting 'replay_evctor'.*'replay_evictor'"):
        trl_replay.autoattach(replay_evctor="fifo")
    undo = trl_replay.autoattach(replay_retire_passes=9)
    trainer = make()
    with pytest.raises(RefusedError, match="replay_retire_passes=9"):
        trainer.train()
    assert not is_attached(trainer)
    undo()


def test_it_waits_for_trl_without_importing_it():
    code = (
        "import sys, trl_replay; undo = trl_replay.autoattach(replay_buffer_size=8); "
        "assert not {'torch', 'trl', 'transformers'} & set(sys.modules); "
        "assert any(type(finder).__name__ == 'WhenImported' for finder in sys.meta_path); "
        "undo(); "
        "assert not any(type(finder).__name__ == 'WhenImported' for finder in sys.meta_path)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_two_that_wait_for_one_module_are_both_told_each_time_and_its_loader_is_as_it_was(tmp_path, monkeypatch):
    (tmp_path / "awaited.py").write_text("value = 1")
    monkeypatch.syspath_prepend(tmp_path)
    told = []

    def tell(name):
        return lambda module: told.append((name, module.value))

    finders = [WhenImported("awaited", tell("first")), WhenImported("awaited", tell("second"))]
    monkeypatch.setattr(sys, "meta_path", [*finders, *sys.meta_path])
    for _ in range(2):
        module = importlib.import_module("awaited")
        assert "exec_module" not in vars(module.__loader__)
        assert importlib.util.find_spec("unheard_of") is None
        del sys.modules["awaited"]
    assert told == [("second", 1), ("first", 1)] * 2


# other processes

TRAIN = """
    import json, os, sys
    import torch
    from trl import GRPOTrainer
    from trl_replay.testing import make_trainer
    from trl_replay.trainer import attachment

    torch.set_num_threads(1)

    def every_other(completions, **kwargs):
        return [float(row % 2 and row < 8) for row in range(len(completions))]

    class Own(GRPOTrainer):
        def train(self):
            return super().train()

    def train(trainer):
        trainer.train()
        config = attachment._sessions[trainer].config
        accelerator = trainer.accelerator
        print("TRAINED" + json.dumps({
            "rank": accelerator.process_index,
            "ranks": accelerator.num_processes,
            "evictor": config.replay_evictor,
            "max_age": config.replay_max_age,
            "scope": config.replay_scope,
            "hook": "bootstrap" in os.environ.get("PYTHONPATH", "") or "TRL_REPLAY_AUTOATTACH" in os.environ,
            "site": "earlier_site" in sys.modules,
        }), flush=True)

    trainer = make_trainer("out", every_other)
    train(trainer)
    if trainer.accelerator.num_processes == 1:
        train(make_trainer("out", every_other, trainer_class=Own))
        train(trainer)
    else:
        torch.distributed.destroy_process_group()
        sys.stdout.flush()
        os._exit(0)  # gloo's threads can abort a process whose interpreter is being torn down
"""

ASYNCHRONOUS = """
    from pathlib import Path

    import pytest
    from trl_replay.trainer import attachment
    from queued import DEAD, LIVE, Script, make_async_trainer, make_policy, samples_of, stand_in

    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        worker = Script(lambda number, version: samples_of(number, DEAD if number % 2 else LIVE, version))
        trainer = make_async_trainer(Path("out"), make_policy(Path("model")), worker)
        trainer.train()
        session = attachment._sessions[trainer]
        print(f"max_age {session.config.replay_max_age}, a queue")
"""

GRPO = """
    model_name_or_path: model
    dtype: float32
    dataset_name: data
    reward_funcs: [my_rewards.every_other]
    output_dir: out
    max_steps: 2
    per_device_train_batch_size: 8
    num_generations: 4
    max_completion_length: 4
    logging_steps: 1
    report_to: none
    save_strategy: "no"
    use_cpu: true
    bf16: false
    disable_tqdm: true
"""

ACCELERATE = """
    compute_environment: LOCAL_MACHINE
    distributed_type: MULTI_GPU
    use_cpu: true
    num_machines: 1
    num_processes: 2
    machine_rank: 0
    main_process_port: 0
    mixed_precision: "no"
    rdzv_backend: static
    same_network: true
"""

SITE = """import atexit, gc, sys
gc.disable()  # importing torch and TRL leaves little garbage, and looking for it takes more than a second
atexit.register(gc.freeze)  # and another one when the process ends
sys.modules['earlier_site'] = sys
"""

WEIGHTED = GRPO.replace("max_steps: 2", "max_steps: 6").replace(
    "[my_rewards.every_other]",
    "[my_rewards.formatted, my_rewards.correct, my_rewards.brief]\n    reward_weights: [0.2, 1.0, 0.3]",
)

WEIGHTED_SCRIPT = """
    import runpy
    import trl_replay

    trl_replay.autoattach(replay_reward="correct", replay_start=0)
    runpy.run_module("trl.scripts.grpo", run_name="__main__")
"""

REWARD = """
    import itertools

    batches = itertools.count()

    def every_other(completions, **_):
        return [float(row % 2) for row in range(len(completions))]

    def formatted(completions, **_):
        return [1.0] * len(completions)

    def correct(completions, **_):
        live = next(batches) < 2
        return [float(live and row % 4 == 0) for row in range(len(completions))]

    def brief(completions, **_):
        return [row / 100 for row in range(len(completions))]
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with what the commands of docs/running.md start: nothing in it attaches."""
    folder = tmp_path_factory.mktemp("project")
    files = {
        "train.py": textwrap.dedent(TRAIN),
        "project/__init__.py": "",
        "project/train.py": textwrap.dedent(TRAIN),
        "replay.yaml": re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0],
        "grpo.yaml": textwrap.dedent(GRPO),
        "weighted.yaml": textwrap.dedent(WEIGHTED),
        "my_rewards.py": textwrap.dedent(REWARD),
        "data/train.jsonl": "\n".join(json.dumps({"prompt": f"{number}+{number}="}) for number in range(8)),
        "accelerate/default_config.yaml": textwrap.dedent(ACCELERATE),
        "site/sitecustomize.py": SITE,
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    make_model(tokenizer).save_pretrained(folder / "model")
    return folder


def trl_replay_run(*arguments, cwd, **variables):
    """`trl-replay run …` by this Python, whose programs come first."""
    environment = {**os.environ, **variables}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = [sys.executable, "-m", "trl_replay", "run", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=300)


def trained(done):
    found = [json.loads(line) for line in re.findall(r"TRAINED(\{.*?\})", done.stdout)]
    return sorted(found, key=lambda facts: int(facts["rank"]))


KINDS_OF_COMMANDS = PAGE.split("```")[1]
DOCUMENTED = re.findall(r"^trl-replay run (.*)$", KINDS_OF_COMMANDS, re.MULTILINE)
ONE = {"rank": 0, "ranks": 1, "evictor": "prompt_balanced", "max_age": None, "scope": "process", "hook": False}
TWO = {**ONE, "ranks": 2}
EXPECTED = {
    "python train.py": [ONE, ONE, ONE],
    "python -m": [{**ONE, "evictor": "fifo"}] * 3,
    "torchrun": [{**TWO, "rank": rank, "scope": "gathered"} for rank in range(2)],
    "accelerate": [{**TWO, "rank": rank, "evictor": "fifo", "scope": "sharded"} for rank in range(2)],  # by itself
    "trl grpo": [],
}


@pytest.mark.parametrize("line", DOCUMENTED)
def test_every_documented_command_attaches_on_every_rank_with_its_settings(line, project):
    (expected,) = [facts for words, facts in EXPECTED.items() if f"-- {words}" in line]
    before = os.pathsep.join([str(project / "site"), os.environ.get("PYTHONPATH", str(ROOT))])
    home = {"HF_HOME": str(project)} if "accelerate" in line else {}
    done = trl_replay_run(*shlex.split(line), cwd=project, PYTHONPATH=before, **home)
    assert done.returncode == 0, done.stderr[-3000:]
    assert trained(done) == [{**facts, "site": True} for facts in expected]
    assert "trl-replay run:" not in done.stderr
    if "trl grpo" in line:
        assert "2 generation batches" in done.stdout, "the session's closing words are missing"
        assert "'replay/size': '2'" in done.stdout


def test_of_three_weighted_rewards_in_a_yaml_the_one_that_counts_is_named(project):
    """The script that `trl grpo` runs, in a process that has imported TRL."""
    (project / "weighted.py").write_text(textwrap.dedent(WEIGHTED_SCRIPT))
    launched = launch(project / "weighted.py", "--config", "weighted.yaml", limit=300, cwd=project)
    check(launched)
    for told in ("dead_fraction/correct': '1'", "dead_fraction/brief': '0'", "replaced_fraction': '1'"):
        assert f"'replay/{told}" in launched[0].stdout


REPORTS = """
import json, os, sys
told = json.loads(os.environ["TRL_REPLAY_AUTOATTACH"])
print(told["settings"])
path = os.path.join(told["reports"], "z.json")
content = sys.argv[1].replace("DEEP", "[" * 200_000)
os.mkfifo(path) if content == "a pipe" else open(path, "w").write(content)
raise SystemExit(int(sys.argv[2]))
"""
"""A command that trains nothing, and reports this."""


def test_settings_after_the_dashes_are_told_where_they_belong(project, capsys):
    (project / "swallowed.yaml").write_text("replay_max_age: 3\nmax_steps: 2\n")
    path = project / "swallowed.yaml"
    for given in (["--replay_max_age", "3"], ["--config", str(path)], [f"--config={path}"]):
        command = ["grpo", *given]
        assert main(["run", "--", "trl", *command]) != 0
        assert "replay_max_age: trl has no such settings. Put them before --" in " ".join(
            capsys.readouterr().err.split()
        )
    script = [sys.executable, "-c", REPORTS, json.dumps({"event": "attached", "python": "p"}), "0"]
    assert main(["run", "--", *script, "--replay_max_age=3"]) == 0
    assert "replay_max_age after -- went to the script, which does not attach" in capsys.readouterr().err


def test_every_kind_of_command_is_documented():
    assert len(DOCUMENTED) == len(EXPECTED)
    for words in EXPECTED:
        assert any(f"-- {words}" in line for line in DOCUMENTED), words
    short = "trl-replay run --replay_preset sample_efficient -- accelerate launch train.py"
    assert short in README.replace("\\\n    ", "")


def test_a_command_that_trains_asynchronously_is_attached_to(tmp_path):
    """Its trainer's module imports nothing of the synchronous one's."""
    pytest.importorskip("trl.experimental.async_grpo", reason="this release does not ship the trainer")
    (tmp_path / "train.py").write_text(textwrap.dedent(ASYNCHRONOUS))
    helpers = os.pathsep.join([str(ROOT / "tests" / "helpers"), os.environ.get("PYTHONPATH", "")])
    command = ["--replay_max_age", "7", "--", "python", "train.py"]
    done = trl_replay_run(*command, cwd=tmp_path, PYTHONPATH=helpers)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "max_age 7, a queue" in done.stdout


def test_a_refusal_is_told_once_with_a_status_of_its_own(project):
    done = trl_replay_run("--replay_retire_passes", "9", "--", "python", "train.py", cwd=project)
    assert done.returncode == REFUSED
    message = done.stderr.rpartition("trl-replay run: ")[2]
    assert "replay_retire_passes=9 is more than a group has completions" in message
    assert "Traceback" not in message
    assert trained(done) == []


SAYS = "print('goes on')"


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        (["-c", SAYS], NOT_ATTACHED, "replay was not attached: no GRPOTrainer trained in it."),
        (["-I", "-c", SAYS], NOT_ATTACHED, "python -I, -E and -S skip it"),
        (["-E", "-c", SAYS], NOT_ATTACHED, "python -I, -E and -S skip it"),
        (["-S", "-c", SAYS], NOT_ATTACHED, "python -I, -E and -S skip it"),
        (["-c", f"{SAYS}; raise SystemExit(7)"], 7, "ended with status 7 before a GRPOTrainer trained"),
    ],
)
def test_a_command_that_trains_nothing_is_told_why_by_its_status(tmp_path, command, status, words):
    done = trl_replay_run("--", "python", *command, cwd=tmp_path)
    assert done.returncode == status
    assert done.stdout == "goes on\n"
    assert done.stderr.startswith("trl-replay run: ")
    assert words in done.stderr


def test_71_a_run_within_a_run_is_seen_by_both(tmp_path):
    script = ("python", "-c", REPORTS, json.dumps({"event": "attached", "python": "p"}), "0")
    done = trl_replay_run("--", "trl-replay", "run", "--replay_evictor", "fifo", "--", *script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "was not attached" not in done.stderr
    assert done.stdout == "{'replay_evictor': 'fifo'}\n", "the inner one's settings"


def test_a_python_without_trl_replay_goes_on_and_is_named(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "other"], check=True)
    other = str(tmp_path / "other" / "bin" / "python")
    done = trl_replay_run("--", other, "-c", "print('goes on')", cwd=ROOT, PYTHONPATH="")
    assert done.returncode == NOT_ATTACHED
    assert done.stdout == "goes on\n"
    assert done.stderr == (
        f"trl-replay run: replay was not attached: it ran in a Python that has no trl_replay: {other}. "
        "Install trl-replay there.\n"
    )


def test_a_hook_that_can_not_attach_leaves_the_process_alone_and_says_why(tmp_path):
    """An environment in which TRL is imported beside a trl_replay that can't be."""
    files = {
        "trl/__init__.py": "",
        "trl/trainer/__init__.py": "",
        "trl/trainer/grpo_trainer.py": "print('imported')",
        "trl_replay/__init__.py": "raise ImportError('broken')",
        "train.py": "import trl.trainer.grpo_trainer; print('goes on')",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    hook_alone = 'PYTHONPATH="${PYTHONPATH%%:*}"'
    done = trl_replay_run("--", "sh", "-c", f"{hook_alone} python {tmp_path}/train.py", cwd=ROOT)
    assert done.stdout == "imported\ngoes on\n"
    assert done.returncode == NOT_ATTACHED
    assert "its processes could not set it up: ImportError: broken" in done.stderr


def test_an_earlier_sitecustomize_fails_as_it_would_have(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("raise RuntimeError('broken before')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", str(ROOT))])
    done = trl_replay_run("--", "python", "-c", "print('goes on')", cwd=tmp_path, PYTHONPATH=path)
    assert done.stdout == "goes on\n"
    assert done.stderr.count("RuntimeError: broken before") == 2, "in the parent and in the command"
    assert "no GRPOTrainer trained" in done.stderr


def test_the_hook_without_its_variable_changes_nothing(tmp_path):
    hook = ROOT / "trl_replay" / "extras" / "run" / "bootstrap"
    code = "import sys; print(len(sys.meta_path), any('bootstrap' in entry for entry in sys.path))"
    results = []
    for path in (str(tmp_path), str(hook)):
        command = [sys.executable, "-c", code]
        variables = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
        results.append((done.stdout, done.stderr))
    assert results[0] == results[1]


def test_signals_reach_the_command(tmp_path):
    code = "import time; print('ready', flush=True); time.sleep(60)"
    command = [sys.executable, "-m", "trl_replay", "run", "--", sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        assert process.returncode == 128 + signal.SIGTERM


# the parent


def attached(**facts):
    return Report("attached", "python", **facts)


@pytest.mark.parametrize(
    ("reports", "status", "expected"),
    [
        ([attached()], 0, 0),
        ([attached()], 3, 3),
        ([attached(), attached()], 0, 0),
        ([attached(), Report("refused", "python", reason="no")], 0, REFUSED),
        ([attached(), Report("unseen", "python", reason="a copy trained")], 0, NOT_ATTACHED),
        ([Report("unseen", "python", reason="a copy trained")], 5, 5),
        ([], 0, NOT_ATTACHED),
        ([], 5, 5),
    ],
)
def test_the_verdict(reports, status, expected):
    verdict = judge(reports, status)
    assert verdict.status == expected
    assert bool(verdict.message) == (expected != status or not any(report.event == "attached" for report in reports))


def test_what_several_ranks_say_is_said_once():
    reports = [Report("refused", "python", reason="too few rows") for _ in range(4)]
    verdict = judge(reports, 1)
    assert verdict.message is not None
    assert verdict.message.count("too few rows") == 1


def test_settings_that_the_script_overruled_are_told():
    verdict = judge([attached(own=True)], 0)
    assert verdict == (0, "the script attaches replay by itself; its own settings were used, not the given ones.")


@pytest.mark.parametrize(
    "content",
    ["[]", "{}", '{"event": 5', "null", '{"event": "refused", "python": "p", "reason": 5}', "DEEP", "a pipe"],
)
@pytest.mark.parametrize(("status", "expected"), [(0, NOT_ATTACHED), (7, 7)])
def test_169_a_spoilt_report_hides_no_status(content, status, expected, capsys):
    assert main(["run", "--", sys.executable, "-c", REPORTS, content, str(status)]) == expected
    assert ("a report of its processes can't be read (z.json)" in capsys.readouterr().err) == (status == 0)


def test_169_where_replay_is_attached_a_spoilt_report_is_told():
    verdict = judge([attached(), Report("spoilt", "", reason="z.json")], 0)
    assert verdict.status == 0
    assert verdict.message is not None
    assert verdict.message.endswith("can't be read (z.json): whether one was without replay is unknown.")


def test_flags_and_the_file_arrive_with_their_types_and_flags_win(tmp_path, monkeypatch):
    (tmp_path / "replay.yaml").write_text(
        "replay_evictor: fifo\nreplay_max_age: 20\nreplay_weight: 1e-1\nreplay_max_uses: null\n"
        "replay_sampler_kwargs: {alpha: 0.5}\nreplay_buffer_size: 4\nreplay_refill_rounds: 4\n"
    )
    flags = "--replay-max-age 30 --replay_max_fraction 0.5 --replay_dry_run --replay_max_bytes 2MB --replay_seed none"
    more = ["--replay_sampler", "proportional", "--replay_start=5", "--replay_refill_rounds", "2"]
    plugins = ["--replay_plugins", "one", "two"]
    code = "import os; open('given', 'w').write(os.environ['TRL_REPLAY_AUTOATTACH'])"
    monkeypatch.chdir(tmp_path)
    arguments = ["run", "--config", "replay.yaml", *flags.split(), *more, *plugins, "--", sys.executable, "-c", code]
    assert main(arguments) == NOT_ATTACHED
    given = json.loads((tmp_path / "given").read_text())
    assert given["settings"] == {
        "replay_evictor": "fifo",
        "replay_max_age": 30,
        "replay_weight": 0.1,
        "replay_max_uses": None,
        "replay_sampler_kwargs": {"alpha": 0.5},
        "replay_buffer_size": 4,
        "replay_refill_rounds": 2,
        "replay_max_fraction": 0.5,
        "replay_dry_run": True,
        "replay_max_bytes": "2MB",
        "replay_seed": None,
        "replay_sampler": "proportional",
        "replay_start": 5,
        "replay_plugins": ["one", "two"],
    }
    assert not Path(given["reports"]).exists()


def test_the_parent_imports_neither_torch_nor_trl():
    code = (
        "import sys; from trl_replay.cli.commands import main; "
        "main(['run', '--replay_evictor', 'fifo', '--', 'true']); "
        "sys.exit(' '.join({'torch', 'trl', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
