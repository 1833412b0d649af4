"""The hook `trl_replay_inputs`: plugins that choose what is generated for, through the trainer."""

import pytest
from datasets import Dataset
from generating import DEAD, LIVE, PROMPTS, SIZE, Coins
from releases import since
from replaying import build
from support import plugin

import trl_replay
from trl_replay.errors import HookError, ResultError
from trl_replay.testing import make_trainer


def choosing(choose):
    return lambda groups_of_rows, context: choose(groups_of_rows, context)


def train(folder, choose, coins=None, **settings):
    """Trains with the chooser and nothing else."""
    coins = coins or Coins(0.5)
    replay = {name: settings.pop(name) for name in list(settings) if name.startswith("replay_")}
    trainer = make_trainer(folder, coins, PROMPTS, **settings)
    with plugin("chooser", inputs=choosing(choose)):
        session = trl_replay.attach(trainer, **{"replay_plugins": "chooser", "replay_buffer_size": 0, **replay})
        trainer.train()
    return coins, session, trainer


def test_a_plugin_says_what_is_generated_for_in_every_round(tmp_path):
    seen = []

    def numbered(rows, context):
        seen.append((context.round, len(rows)))
        return [{"prompt": f"{context.round}*{number}="} for number in range(len(rows))]

    coins, session, _ = train(tmp_path, numbered, Coins(0.0), replay_refill="new(rounds=1)", max_steps=2)
    assert seen == [(0, 3), (1, 3)] * 2
    assert coins.prompts == [["0*0=", "0*1=", "0*2="], ["1*0=", "1*1=", "1*2="]] * 2
    assert session.step.rounds.table.tries.tolist() == [2 * SIZE] * 6


def test_what_is_known_of_a_prompt_is_what_its_groups_showed(tmp_path):
    """The first prompt stays and the second is dead at first, then live; each batch sees what came before."""
    script = [[LIVE[0], DEAD[0], DEAD[1]], [LIVE[1], LIVE[0], DEAD[1]], [DEAD[0], DEAD[0], DEAD[0]]]
    told = []

    def same(rows, context):
        fixed = [{"prompt": prompt} for prompt in PROMPTS[:3]]
        keys = [context.key(row) for row in fixed]
        prompts = context.prompts
        names = ("tries", "passes", "dead_streak", "update", "pass_rate")
        told.append({name: prompts.get(name, keys, default=-1).tolist() for name in names})
        assert context.prompt_rows([*keys, 17]) == fixed
        return fixed

    class Script(Coins):
        def __call__(self, completions, prompts, **_):
            return [reward for group in script[len(told) - 1] for reward in group]

    _, session, _ = train(tmp_path, same, Script(0.0), max_steps=3)
    assert told[0] == dict.fromkeys(told[0], [-1] * 3)
    assert told[1] == {
        "tries": [4, 4, 4], "passes": [1, 0, 4], "dead_streak": [0, 1, 1], "update": [0, 0, 0],
        "pass_rate": [0.25, 0.0, 1.0],
    }  # fmt: skip
    assert told[2] == {
        "tries": [8, 8, 8], "passes": [3, 1, 8], "dead_streak": [0, 0, 2], "update": [1, 1, 1],
        "pass_rate": [0.5, 0.25, 1.0],
    }  # fmt: skip
    assert session.step.rounds.table.dead_streak.tolist() == [1, 1, 3]


@since("1.9.0", "streams as datasets")
def test_a_stream_in_which_no_row_can_be_found_raises(tmp_path):
    stream = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]).to_iterable_dataset()
    trainer = build(tmp_path, Coins(0.5), arguments={"train_dataset": stream}, max_steps=1)
    told = r"chooser.*stream.*no row can be found by its key\. Use a dataset with a length"
    with plugin("chooser", inputs=choosing(lambda rows, context: context.prompt_rows([0]))):
        trl_replay.attach(trainer, replay_plugins="chooser")
        with pytest.raises(HookError, match=told):
            trainer.train()


def test_the_generator_is_one_of_the_batch_and_draws_alike_every_time(tmp_path):
    def drawn(folder, **settings):
        numbers = []
        train(folder, lambda rows, context: numbers.append(context.rng.random()), **settings)
        return numbers

    first = drawn(tmp_path / "one")
    assert len(set(first)) == 4
    assert first == drawn(tmp_path / "two")
    assert first != drawn(tmp_path / "three", seed=5)


@pytest.mark.filterwarnings("ignore:Rows of the dataset with the same prompt differ in 'notes'")
def test_what_the_trainer_writes_into_its_inputs_does_not_reach_the_next_batch(tmp_path):
    kept = [{"prompt": prompt, "notes": []} for prompt in PROMPTS[:3]]

    def reward(completions, prompts, notes, **_):
        for note in notes:
            assert note == []
            note.append("seen")
        return [0.0] * len(completions)

    trainer = make_trainer(tmp_path, reward, PROMPTS, max_steps=3)
    with plugin("chooser", inputs=choosing(lambda rows, context: kept)):
        trl_replay.attach(trainer, replay_plugins="chooser", replay_buffer_size=0, replay_refill="new(rounds=1)")
        trainer.train()
    assert trainer.state.global_step == 3


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([], r"returned 0 rows at update 0; it must return a list of 3 rows of the dataset"),
        ("1=", r"returned a str .* a list of 3 rows of the dataset"),
        (["1=", "2=", "3="], r"returned a list .* a list of 3 rows of the dataset"),
        ([{"question": "1+1="}] * 3, r"in trl_replay_inputs.*without a 'prompt'"),
    ],
)
def test_71_what_is_no_row_a_group_is_refused_by_name(tmp_path, answer, words):
    with pytest.raises(ResultError, match=rf"^Plugin 'chooser' .*{words}"):
        train(tmp_path, lambda rows, context: answer)


def test_it_is_not_asked_in_eval_or_in_a_dry_run(tmp_path):
    asked = []
    settings = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4, "eval_prompts": ["7="]}
    train(tmp_path, lambda rows, context: asked.append(len(rows)), **settings)
    assert asked == [3] * 4
    train(tmp_path, lambda rows, context: asked.append(0), replay_dry_run=True, replay_buffer_size=8)
    assert asked == [3] * 4


def test_rows_of_one_group_with_different_prompts_are_refused(tmp_path):
    class Shuffled:
        def __call__(self, rows):
            return rows[1:] + rows[:1]

    trainer = make_trainer(tmp_path, Coins(0.5), PROMPTS)
    trainer.data_collator = Shuffled()
    trl_replay.attach(trainer, replay_refill="new(rounds=1)")
    with pytest.raises(trl_replay.SeamError, match=r"rows 0 to 3 on rank 0 belong to one group .* different prompts"):
        trainer.train()


def test_what_a_plugin_writes_into_the_rows_that_it_is_shown_changes_nothing(tmp_path):
    def scribble(groups_of_rows, context):
        for row in groups_of_rows:
            row["prompt"] = f"9{row['prompt']}"

    coins = Coins(0.0)
    train(tmp_path, scribble, coins, replay_refill="same(rounds=1)", max_steps=1)
    assert coins.prompts[0] == coins.prompts[1]
