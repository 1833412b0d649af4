"""`trl-replay run`: scripts in this process, and behind the launchers of docs/running.md."""

import json
import re
import runpy
import shlex
import sys
import textwrap
from pathlib import Path

import pytest
from started import quickly, started
from support import DEAD, LIVE, Rewards
from transformers import Trainer, TrainingArguments
from trl import GRPOTrainer

import trl_replay
from trl_replay import ReplayConfig
from trl_replay.cli.commands import main as command
from trl_replay.errors import ContractError, RefusedError
from trl_replay.run import NAME, Attaching, _parse, main
from trl_replay.testing import make_model, make_tokenizer, make_trainer
from trl_replay.trainer import attachment

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "running.md").read_text()

# in this process


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Puts a `train` that attaches on transformers' trainer, and takes it off again."""
    monkeypatch.setattr(Trainer, "train", Trainer.train)

    def run(**settings):
        attaching = Attaching(trl_replay.ReplayConfig(**settings))
        attaching.wrap(Trainer)
        return attaching, lambda kind=None: make_trainer(
            tmp_path, Rewards([LIVE, DEAD, LIVE]), trainer_class=kind, max_steps=2
        )

    return run


class GoesAround(GRPOTrainer):
    def train(self):
        return Trainer.train(self)


class Calls(GRPOTrainer):
    def train(self, *args, **kwargs):
        return super().train(*args, **kwargs)


@pytest.mark.parametrize("kind", [None, GoesAround, Calls])
def test_every_trainer_attaches_once_when_it_first_trains(run, kind):
    attaching, make = run(replay_evictor="fifo")
    trainer = make(kind)
    assert not attachment.is_attached(trainer)
    trainer.train()
    session = attachment._sessions[trainer]
    assert session.config.replay_evictor == "fifo"
    trainer.train()
    assert attachment._sessions[trainer] is session
    trl_replay.detach(trainer)
    trainer.train()
    assert not attachment.is_attached(trainer)
    assert list(attaching.trained[:2]) == [1, 0]


@pytest.mark.parametrize("own", [{"replay_evictor": "heap"}, {"use_replay": False}])
def test_a_script_that_attaches_by_itself_keeps_its_settings(run, own):
    _, make = run(replay_evictor="fifo")
    trainer = make()
    session = trl_replay.attach(trainer, **own)
    with pytest.warns(UserWarning, match="attaches by itself: its settings hold"):
        trainer.train()
    assert attachment._sessions[trainer] is session


def test_a_refusal_is_raised_by_train(run):
    attaching, make = run(replay_retire_passes=9)
    with pytest.raises(RefusedError, match="replay_retire_passes=9"):
        make().train()
    assert not any(attaching.trained[:2])


def test_88_a_trainer_that_is_a_copy_of_trls_is_refused(run, tmp_path):
    class CopiedGRPOTrainer(Trainer):
        pass

    run()
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(ContractError):
        CopiedGRPOTrainer(model=make_model(make_tokenizer()), args=arguments).train()


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

GRPO = """
    model_name_or_path: model
    dtype: float32
    dataset_name: data
    reward_funcs: [yaml_rewards.every_other]
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

WEIGHTED = GRPO.replace("max_steps: 2", "max_steps: 6").replace(
    "[yaml_rewards.every_other]",
    "[yaml_rewards.formatted, yaml_rewards.correct, yaml_rewards.brief]\n    reward_weights: [0.2, 1.0, 0.3]",
)

SCRIPT = """
import os, sys, beside
assert not {"torch", "transformers"} & set(sys.modules)
print(sys.path[0], sys.argv, __name__, __file__, __spec__)
exec(sys.argv[1])
"""


FORKED = """
    import multiprocessing
    import sys

    def train():
        from pathlib import Path

        import pytest
        from queued import make_async_trainer, make_policy, nothing, Script, all_live, stand_in
        from trl_replay.trainer import attachment

        with pytest.MonkeyPatch.context() as patch:
            stand_in(patch)
            trainer = make_async_trainer(Path("forked"), make_policy(Path("policy")), Script(all_live))
            trainer.train()
            print(f"max_age {attachment._sessions[trainer].config.replay_max_age}, a queue", flush=True)

    process = multiprocessing.get_context("fork").Process(target=train)
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder with what the commands of docs/running.md start: nothing in it attaches."""
    folder = tmp_path_factory.mktemp("project")
    files = {
        "train.py": textwrap.dedent(TRAIN),
        "project/sibling.py": "",
        "project/train.py": "from . import sibling\n" + textwrap.dedent(TRAIN),
        "deep/beside.py": "",
        "deep/script.py": SCRIPT,
        "forked.py": textwrap.dedent(FORKED),
        "replay.yaml": re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0],
        "grpo.yaml": textwrap.dedent(GRPO),
        "weighted.yaml": textwrap.dedent(WEIGHTED),
        "yaml_rewards.py": textwrap.dedent(REWARD),
        "data/train.jsonl": "\n".join(json.dumps({"prompt": f"{number}+{number}="}) for number in range(8)),
        "accelerate/default_config.yaml": textwrap.dedent(ACCELERATE),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    make_model(tokenizer).save_pretrained(folder / "model")
    return folder


def trained(done):
    found = [json.loads(line) for line in re.findall(r"TRAINED(\{.*?\})", done.stdout)]
    return sorted(found, key=lambda facts: int(facts["rank"]))


DOCUMENTED = PAGE.split("```")[1].removeprefix("bash\n").strip().splitlines()
ONE = {"rank": 0, "ranks": 1, "evictor": "prompt_balanced", "max_age": None, "scope": "process"}
TWO = {**ONE, "ranks": 2}
EXPECTED = {
    "run train.py": [ONE, ONE, ONE],
    "-m project.train": [{**ONE, "evictor": "fifo"}] * 3,
    "torchrun": [{**TWO, "rank": rank, "scope": "gathered"} for rank in range(2)],
    "accelerate": [{**TWO, "rank": rank, "evictor": "fifo", "scope": "gathered"} for rank in range(2)],  # by itself
    "trl.scripts.grpo": [],
}


@pytest.mark.parametrize("line", DOCUMENTED)
def test_every_documented_command_attaches_on_every_rank_with_its_settings(line, project):
    (expected,) = [facts for words, facts in EXPECTED.items() if words in line]
    home = {"HF_HOME": str(project)} if "accelerate" in line else {}
    command = shlex.split(line.replace("trl-replay run", f"{sys.executable} -m trl_replay run"))
    done = started(*command, cwd=project, **home)
    assert done.returncode == 0, done.stderr[-3000:]
    assert trained(done) == expected
    assert f"{NAME}:" not in done.stderr
    if "trl.scripts" in line:
        assert "session.explain() tells more" in done.stdout, "the session's closing words are missing"


def test_the_pages_command_with_a_preset_is_of_the_kind_that_is_tested():
    short = "accelerate launch -m trl_replay.run --replay_preset sample_efficient train.py"
    assert short in " ".join(PAGE.split())


def test_of_three_weighted_rewards_in_a_yaml_the_one_that_counts_is_named(run, project, monkeypatch, capsys):
    run(replay_reward="correct", replay_start=0)
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(project)
    monkeypatch.setattr(sys, "argv", ["grpo", "--config", "weighted.yaml"])
    runpy.run_module("trl.scripts.grpo", run_name="__main__")
    printed = capsys.readouterr().out
    for told in ("dead_fraction/correct': '1'", "dead_fraction/brief': '0'", "replaced_fraction': '1'"):
        assert f"'replay/{told}" in printed


@pytest.mark.parametrize(("ends", "status"), [("sys.exit(3)", 3), ("os._exit(4)", 4), ("1/0", 1), ("os.abort()", -6)])
def test_a_script_runs_and_ends_as_without_us(project, ends, status):
    plain = started(sys.executable, "deep/script.py", ends, cwd=project)
    done = started(sys.executable, "-m", "trl_replay", "run", "deep/script.py", ends, cwd=project)
    assert done.returncode == plain.returncode == status
    assert done.stdout == plain.stdout
    assert done.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]


@pytest.mark.parametrize("ends", ["", "sys.exit(0)"])
def test_a_script_that_trains_nothing_is_an_error_that_says_so(project, ends):
    done = started(sys.executable, "-m", "trl_replay", "run", "deep/script.py", ends, cwd=project)
    assert done.returncode == 1
    assert "script.py ended without replay: no GRPOTrainer of TRL's trained in this process" in done.stderr


def test_a_trainer_in_a_forked_process_is_attached_to_and_ends_with_a_warning(project):
    """An asynchronous one, whose module imports nothing of the synchronous one's."""
    pytest.importorskip("trl.experimental.async_grpo", reason="this release does not ship the trainer")
    words = "-m trl_replay.run --replay_max_age 7 forked.py"
    done = started(sys.executable, *words.split(), cwd=project, PYTHONPATH=quickly(ROOT / "tests" / "helpers"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "max_age 7, a queue" in done.stdout
    assert "forked.py trained with replay in a forked process, which may have failed" in done.stderr
    assert "ended without replay" not in done.stderr


def test_a_fork_that_trains_nothing_ends_as_the_script_says(project):
    code = "child = os.fork(); child or sys.exit(0); print('of the fork:', os.waitpid(child, 0)[1])"
    done = started(sys.executable, "-m", "trl_replay.run", "deep/script.py", code, cwd=project)
    assert "of the fork: 0" in done.stdout
    assert done.stderr.count("ended without replay") == 1


def test_settings_are_parsed_without_torch_and_transformers():
    code = (
        "import sys; from trl_replay.run import parser; parser().parse_args(['--replay_max_age', '3', 'train.py']); "
        "sys.exit(' '.join({'torch', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = started(sys.executable, "-c", code, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_file_and_the_flags_arrive_with_their_types_and_flags_win(tmp_path, monkeypatch):
    (tmp_path / "replay.yaml").write_text(
        "replay_evictor: fifo\nreplay_weight: 1e-1\nreplay_max_uses: null\nreplay_max_age: 20\n"
        "replay_plugins: [one, two]\n"
    )
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    words = "--config replay.yaml --replay-max-age 30 --replay_dry_run -- train.py --config its.yaml -- -m"
    config, options = _parse(words.split())
    assert (options.script, options.arguments) == ("train.py", ["--config", "its.yaml", "--", "-m"])
    changed = {name: value for name, value in config.to_dict().items() if value != ReplayConfig().to_dict()[name]}
    assert changed == {
        "replay_evictor": "fifo",
        "replay_weight": 0.1,
        "replay_max_age": 30,
        "replay_plugins": ["one", "two"],
        "replay_dry_run": True,
    }


def test_the_help_has_the_settings_in_a_group_of_their_own_with_defaults(capsys):
    with pytest.raises(SystemExit) as ended:
        command(["run", "--help"])
    assert not ended.value.code
    told = " ".join(capsys.readouterr().out.split("settings of replay:")[1].split())
    assert "(default: prompt_balanced)" in told
    assert "--config" not in told


YAML = {
    "- a": "has no settings: write lines such as 'replay_buffer_size: 64'",
    "replay_plugins: [": "line 1",
    "learning_rate: 1": "has no setting 'learning_rate'. The settings are: use_replay",
    "replay_evictr: fifo": "Did you mean 'replay_evictor'",
    "replay_buffer_size: 64k": "invalid int value: '64k'",
    "replay_max_uses: 0": "replay_max_uses=0 can't be used",
}


@pytest.mark.parametrize("text", YAML)
def test_mistakes_in_the_file_are_told_before_the_script_starts(text, tmp_path, capsys):
    (tmp_path / "replay.yaml").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["--config", str(tmp_path / "replay.yaml"), __file__])
    assert ended.value.code == 2
    assert YAML[text] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("--config no.yaml train.py", "no.yaml"),
        ("accelerate launch train.py", f"no script 'accelerate': write {NAME} train.py, and put"),
        ("-- python train.py", f"no script 'python': write {NAME} train.py, and put what starts Python in front"),
        ("-- accelerate launch train.py", "as in accelerate launch -m trl_replay.run train.py"),
        ("trl grpo --config grpo.yaml", "for trl grpo: accelerate launch -m trl_replay.run -m trl.scripts.grpo"),
        ("--replay_plugins one train.py", "required: script. Put -- before the script"),
        ("--replay_dry_run train.py", "Truthy value expected: got train.py"),
        ("--replay_dry_run train.py", "Put -- before the script"),
        ("", "required: script"),
    ],
)
def test_mistakes_are_told_before_the_script_starts(given, told, capsys):
    with pytest.raises(SystemExit) as ended:
        main(given.split())
    assert ended.value.code == 2
    assert told in capsys.readouterr().err
