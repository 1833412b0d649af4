"""Limits and selectors beyond the first ones: what they let through, by hand and through the real trainer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import DEAD, HALF, LIVE, Rewards, Spy, record, weights_hash

import trl_replay
from trl_replay.loss.tap import ROWS
from trl_replay.registry import registry
from trl_replay.strategies.evictors import prompt_balanced
from trl_replay.testing import make_context, make_groups, make_table, make_trainer


def replayed(steps: list[Any]) -> list[int]:
    return [int((after[ROWS][:, 0] < 0).sum()) // 4 for _, after in steps]


def test_a_cooldown_keeps_an_entry_from_being_used_again_too_soon(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE, DEAD, DEAD], [DEAD, DEAD, DEAD]), max_steps=8)
    session = trl_replay.attach(trainer, replay_cooldown=3)
    steps = record(session)
    trainer.train()
    assert replayed(steps) == [0, 1, 0, 0, 1, 0, 0, 1]
    assert "replay_cooldown" in session.explain()


def test_a_half_life_lets_newer_groups_win_over_higher_scores(tmp_path: Any) -> None:
    script = Rewards(
        [[5.0, 0, 0, 0], DEAD, DEAD], [DEAD, DEAD, DEAD], [DEAD, DEAD, DEAD], [DEAD, DEAD, LIVE], [DEAD] * 3
    )
    kept = {}
    for half_life in (None, 1.0):
        script.calls = 0
        trainer = make_trainer(tmp_path, script, max_steps=6)
        session = trl_replay.attach(
            trainer, replay_half_life=half_life, replay_buffer_size=1, replay_scorer="reward_std"
        )
        trainer.train()
        kept[half_life] = session.buffer.table.serial.tolist()
        assert float(session.buffer.table.score[0]) == pytest.approx(2.5 if half_life is None else 0.5)
    assert kept == {None: [0], 1.0: [1]}, "after three half-lives 2.5 is worth less than 0.5"


def test_a_half_life_that_makes_negative_scores_overflow_still_ranks(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards([[-10.0, -20.0, -10.0, -10.0]] * 3), max_steps=4)
    session = trl_replay.attach(
        trainer, replay_half_life=1e-3, replay_scorer="mean_reward", replay_buffer_size=4, replay_start=0
    )
    trainer.train()
    assert sorted(session.buffer.table.serial.tolist()) == [8, 9, 10, 11]


def test_more_passes_than_a_group_has_rows_are_refused(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE] * 3))
    with pytest.raises(trl_replay.RefusedError, match=r"replay_retire_passes=5 .*num_generations=4"):
        trl_replay.attach(trainer, replay_retire_passes=5)


def test_a_dry_run_measures_and_changes_nothing(tmp_path: Any) -> None:
    script = ([LIVE, DEAD, HALF], [DEAD, DEAD, LIVE])
    stock = make_trainer(tmp_path / "stock", Rewards(*script), max_steps=5)
    stock.train()
    trainer = make_trainer(tmp_path / "dry", Rewards(*script), max_steps=5)
    session = trl_replay.attach(trainer, replay_dry_run=True)
    steps = record(session)
    trainer.train()
    assert weights_hash(trainer) == weights_hash(stock)
    assert all(after[key] is value for before, after in steps for key, value in before.items())
    assert session.metrics["replay/replaced_fraction"] == pytest.approx(2 / 3)
    assert session.metrics["replay/dead_fraction_after"] == 0.0
    assert "replay/ratio_mean" not in session.metrics, "nothing went through the loss"


def select(name: str, rewards: list[list[float]], **kwargs: Any) -> list[int]:
    selector = registry().resolve("selector", name, "replay_selector").make(**kwargs)
    return np.asarray(selector(make_groups(rewards), make_context())).tolist()


REWARDS = [[1, 0, 0, 0.0], [1, 1, 1, 1.0], [0.5, 0.5, 0.5, 0.52], [1, 1, 0, 0.0], [1, 1, 1, 0.0]]
# standard deviations 0.5, 0, 0.01, 0.577, 0.5; variances 0.25, 0, 0.0001, 0.333, 0.25

SELECTIONS: list[tuple[str, dict[str, Any], list[int]]] = [
    ("zero_std", {}, [1]),
    ("low_std", {}, [1, 2]),
    ("low_std", {"threshold": 0.5}, [1, 2, 0, 4]),
    ("low_std", {"quantile": 0.25}, [1, 2]),
    ("top_p_variance", {"p": 0.3}, [1, 2, 0, 4]),
    ("top_p_variance", {"p": 0.6}, [1, 2, 4]),
    ("top_p_variance", {"p": 1.0}, [1]),
    ("pass_rate", {"low": 0.25, "high": 0.75}, [1, 2, 0, 4]),
    ("pass_rate", {"low": 0.0, "high": 1.0}, [1, 2]),
    ("always", {"share": 0.4}, [1, 2]),
    ("always", {"share": 0.1}, []),
    ("always", {"share": 1.0}, [1, 2, 0, 4, 3]),
]


@pytest.mark.parametrize(("name", "kwargs", "slots"), SELECTIONS)
def test_each_selector_chooses_by_hand(name: str, kwargs: dict[str, Any], slots: list[int]) -> None:
    assert select(name, REWARDS, **kwargs) == slots


BAD = [
    ("low_std", {"threshold": -1}, "threshold=-1"),
    ("low_std", {"quantile": 2}, "quantile=2"),
    ("top_p_variance", {"p": 0}, "p=0"),
    ("pass_rate", {"low": 0.9, "high": 0.1}, "low=0.9"),
    ("always", {"share": 0}, "share=0"),
]


@pytest.mark.parametrize(("name", "kwargs", "words"), BAD)
def test_a_bad_argument_of_a_selector_is_refused_by_name(name: str, kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(trl_replay.ConfigurationError, match=words):
        select(name, REWARDS, **kwargs)


@pytest.mark.parametrize(("layout", "stored"), [({}, 0), ({"num_iterations": 2}, 1)])
def test_a_displaced_live_group_is_stored_only_where_stocks_log_probs_are_known(
    tmp_path: Any, layout: dict[str, Any], stored: int
) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE, DEAD, DEAD], [DEAD, HALF, DEAD]), max_steps=4, **layout)
    session = trl_replay.attach(trainer, replay_selector="always", replay_selector_kwargs={"share": 1.0})
    steps = record(session)
    trainer.train()
    assert replayed(steps)[1] == 1
    slot = int((steps[1][1][ROWS][:, 0] < 0).nonzero()[0]) // 4
    assert slot == 0, "dead groups are replaced before live ones"
    session.buffer.clear()
    trainer = make_trainer(
        tmp_path, Rewards([LIVE, LIVE, LIVE], [HALF, HALF, HALF]), max_steps=2 * (1 + stored), **layout
    )
    session = trl_replay.attach(trainer, replay_selector="always", replay_selector_kwargs={"share": 1.0})
    trainer.train()
    assert len(session.buffer) == 3 + 3 * stored


def test_nothing_is_replayed_before_the_start(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards([LIVE, HALF, LIVE], [DEAD] * 3), max_steps=6)
    session = trl_replay.attach(trainer, replay_start=3)
    steps = record(session)
    trainer.train()
    assert replayed(steps) == [0, 0, 0, 3, 3, 3]
    assert len(session.buffer) == 3, "the buffer fills from the beginning"
    assert "2 x replay_start allows 0 of 3 groups" in session.explain()


SPARSE = [LIVE, *[DEAD] * 15], [DEAD] * 16, [LIVE, *[DEAD] * 15], [DEAD] * 16
"""Batches of 16 groups, one of which is live in every second batch: of 64 groups, two."""


def sparse_run(tmp_path: Any, script: Any, **settings: Any) -> tuple[list[int], trl_replay.Session]:
    trainer = make_trainer(tmp_path, Rewards(*script), max_steps=len(script), per_device_train_batch_size=64)
    session = trl_replay.attach(trainer, **settings)
    steps = record(session)
    trainer.train()
    return replayed(steps), session


def test_with_sparse_rewards_replay_waits_for_a_quarter_of_the_buffer(tmp_path: Any) -> None:
    script = [*SPARSE, *SPARSE, [LIVE, LIVE, *[DEAD] * 14], [DEAD] * 16, [DEAD] * 16]
    counts, session = sparse_run(tmp_path, script, replay_buffer_size=20)
    # three batches are too few to judge by; then 5 entries are needed: the ninth batch's two are the fifth and sixth
    assert counts == [0, 1, 1, 0, 0, 0, 0, 0, 0, 6, 6]
    assert (
        "6 x replay_start='adaptive' (sparse rewards, too few entries yet) allows 0 of 16 groups" in session.explain()
    )
    for start in (0, None):
        assert sparse_run(tmp_path, script, replay_buffer_size=20, replay_start=start)[0][3:7] == [2, 2, 3, 3]


def test_it_does_not_wait_for_live_groups_that_have_ceased_to_come(tmp_path: Any) -> None:
    """One group of the first 16 was live, and then none: after 64 groups more there is nothing to wait for."""
    script = [[LIVE, *[DEAD] * 15], *[[DEAD] * 16] * 7]
    assert sparse_run(tmp_path, script)[0] == [0, 1, 1, 0, 0, 1, 1, 1]


def test_it_does_not_wait_for_entries_that_a_limit_lets_leave_meanwhile(tmp_path: Any) -> None:
    """Of a live group in every second batch no more than two are ever young enough, and five are to come first."""
    counts, _ = sparse_run(tmp_path, SPARSE * 3, replay_buffer_size=20, replay_max_age=4)
    assert counts == [0, 1, 1, 0, 0, 0, 0, 0, 0, 2, 2, 2]


def test_with_rewards_that_are_not_sparse_nothing_waits(tmp_path: Any) -> None:
    script = [[LIVE, HALF, *[DEAD] * 14], [LIVE, HALF, *[DEAD] * 14], *[[DEAD] * 16, [*[LIVE] * 4, *[DEAD] * 12]] * 3]
    counts, _ = sparse_run(tmp_path, script)
    assert counts == [0, 2, 4, 4, 8, 8, 12, 12]


def test_the_start_can_be_given_on_the_command_line_and_in_yaml(tmp_path: Any) -> None:
    from trl import TrlParser

    parser = TrlParser(trl_replay.ReplayConfig)
    assert parser.parse_args_and_config(["--replay_start", "40"])[0].replay_start == 40
    assert parser.parse_args_and_config(["--replay_start", "adaptive"])[0].replay_start == "adaptive"
    for written, start in (("adaptive", "adaptive"), ("10", 10), ("'10'", 10), ("null", None)):
        (tmp_path / "run.yaml").write_text(f"replay_start: {written}\n")
        assert parser.parse_args_and_config(["--config", str(tmp_path / "run.yaml")])[0].replay_start == start
    assert "--replay_start" in parser.format_help()


def test_replay_starts_once_the_running_pass_rate_is_reached(tmp_path: Any) -> None:
    """The rate begins at the first batch's 3/12 and moves by 1/32 of the difference: 8/32, then 31/32 of it ..."""
    passing = [[1.0, 1.0, 1.0, 1.0]] * 3
    trainer = make_trainer(tmp_path, Rewards([LIVE, LIVE, LIVE], [DEAD] * 3, passing), max_steps=6)
    session = trl_replay.attach(trainer, replay_start_pass_rate=0.28)
    steps = record(session)
    trainer.train()
    rate, expected = 0.25, [0]
    for passes in (0.0, 1.0, 1.0, 1.0, 1.0):
        rate += (passes - rate) / 32
        expected.append(3 if rate >= 0.28 else 0)
    assert replayed(steps) == expected == [0, 0, 0, 3, 3, 3]
    assert "replay_start_pass_rate allows 0 of 3 groups" in session.explain()


def test_what_passes_is_a_setting(tmp_path: Any) -> None:
    trainer = make_trainer(tmp_path, Rewards([[3.0, 1, 1, 1]] * 3, [DEAD] * 3), max_steps=3)
    session = trl_replay.attach(trainer, replay_start_pass_rate=0.2, replay_pass_reward=2.0)
    trainer.train()
    assert session.components.rate_limiter.state_dict()["pass_rate"] == pytest.approx(0.25 * (31 / 32) ** 2)


def test_no_more_is_replayed_than_the_samples_per_insert(tmp_path: Any) -> None:
    trainer = make_trainer(
        tmp_path, Rewards([LIVE, HALF, DEAD], [DEAD] * 3, [DEAD] * 3, [LIVE, DEAD, DEAD]), max_steps=7
    )
    session = trl_replay.attach(trainer, replay_samples_per_insert=1.5)
    steps = record(session)
    trainer.train()
    assert replayed(steps) == [0, 2, 1, 0, 1, 2, 1], "3, 4, 6 and 7 in all, with 2, 3, 4 and 5 groups stored"
    assert "replay_samples_per_insert allows" in session.explain()


def test_a_solved_prompts_entries_leave_and_it_is_not_stored_again(tmp_path: Any) -> None:
    """With one prompt in the data, a fresh group with three passes of four ends the replay of all its entries."""
    solved = [1.0, 1.0, 1.0, 0.0]
    script = Rewards([LIVE], [DEAD], [solved], [DEAD], [LIVE], [DEAD], [DEAD])
    trainer = make_trainer(tmp_path, script, prompts=["1+1="], max_steps=7, per_device_train_batch_size=4)
    session = trl_replay.attach(trainer, replay_retire_passes=3)
    steps = record(session)
    trainer.train()
    assert replayed(steps) == [0, 1, 0, 0, 0, 1, 1]
    assert session.totals.counters["retired"] == 1
    assert session.totals.counters["stored"] == 2
    told = session.explain()
    assert "1 x an entry left: its prompt was solved (replay_retire_passes)" in told
    assert "1 x a group was refused: its prompt is solved (replay_retire_passes)" in told


def test_a_candidate_of_a_prompt_that_is_solved_meanwhile_is_refused(tmp_path: Any) -> None:
    script = Rewards([LIVE], [[1.0, 1.0, 1.0, 1.0]], [DEAD])
    trainer = make_trainer(tmp_path, script, prompts=["1+1="], max_steps=3, per_device_train_batch_size=4)
    session = trl_replay.attach(trainer, replay_retire_passes=4)
    trainer.train()
    assert len(session.buffer) == 0
    assert session.totals.counters["refused"] == 1


@pytest.mark.parametrize("kind", ["ratio", "advantage"])
def test_a_replay_refreshes_its_entrys_score(tmp_path: Any, kind: str) -> None:
    trainer = make_trainer(
        tmp_path, Rewards([LIVE, DEAD, DEAD], [DEAD] * 3), trainer_class=Spy, max_steps=3, learning_rate=2e-2
    )
    session = trl_replay.attach(trainer, replay_refresh=kind)
    trainer.train()
    seen = trainer.losses[-1]
    rows = seen["inputs"].rows[:, 0] < 0
    mask = seen["inputs"]["completion_mask"][rows].bool()
    logs = (seen["logps"][rows] - seen["inputs"]["old_per_token_logps"][rows]).double()
    table = session.buffer.table
    if kind == "ratio":
        expected = float(table.first_score[0]) * float((-logs[mask].abs().mean()).exp())
    else:
        mass = logs.exp().clamp(max=1.0) * seen["inputs"]["advantages"][rows].double().abs().unsqueeze(1)
        expected = float(mass[mask].mean())
    assert table.score[0] == pytest.approx(expected, rel=1e-5)
    assert table.score[0] != table.first_score[0]


def test_prompt_balanced_keeps_the_newest_of_every_prompt() -> None:
    table = make_table([1.0] * 7, prompt=[5, 5, 5, 7, 5, 7, 9], serial=range(7))
    assert table.peers.tolist() == [4, 4, 4, 2, 4, 2, 1]
    assert table.newer.tolist() == [3, 2, 1, 1, 0, 0, 0]
    assert prompt_balanced(table, make_context()).tolist() == [-2, -1, 0, 0, 1, 1, 1]


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-1e6, 1e6)), min_size=1, max_size=30))
def test_prompt_balanced_ranks_by_what_is_newer_and_then_by_score(entries: list[tuple[int, float]]) -> None:
    prompts, scores = zip(*entries, strict=True)
    table = make_table(scores, prompt=prompts)
    ranks = registry().resolve("evictor", "prompt_balanced", "replay_evictor").make()(table, make_context())
    for one in range(len(entries)):
        assert table.peers[one] == prompts.count(prompts[one])
        assert table.newer[one] == prompts[one + 1 :].count(prompts[one])
        for other in range(len(entries)):
            if table.newer[one] < table.newer[other]:
                assert ranks[one] > ranks[other]
            elif table.newer[one] == table.newer[other] and scores[one] > scores[other]:
                assert ranks[one] >= ranks[other]


def test_with_one_group_a_prompt_the_balanced_strategies_are_heap_and_proportional(tmp_path: Any) -> None:
    columns = []
    for evictor, sampler in (("heap", "proportional"), ("prompt_balanced", "prompt_balanced")):
        script = Rewards([LIVE, DEAD, HALF], [DEAD, LIVE, DEAD])
        trainer = make_trainer(tmp_path / evictor, script, prompts=[f"{n}+1=" for n in range(60)], max_steps=12)
        session = trl_replay.attach(trainer, replay_evictor=evictor, replay_sampler=sampler, replay_buffer_size=4)
        trainer.train()
        columns.append({name: getattr(session.buffer.table, name).tolist() for name in session.buffer.table.names})
    assert columns[0] == columns[1]
    assert sum(columns[0]["uses"]) > 3


def test_a_full_buffer_keeps_every_prompt(tmp_path: Any) -> None:
    """One prompt's group is live in the first batch only, the other's in all: by score alone it is crowded out."""
    first, often = [1.0, 0, 0, 0], [1.0, 1.0, 0, 0]
    kept = {}
    for evictor in ("heap", "prompt_balanced"):
        trainer = make_trainer(
            tmp_path / evictor, by_prompt({"1+1=": [first, DEAD], "2+2=": [often]}), prompts=["1+1=", "2+2="],
            max_steps=8, per_device_train_batch_size=8,
        )  # fmt: skip
        session = trl_replay.attach(trainer, replay_evictor=evictor, replay_buffer_size=4)
        trainer.train()
        kept[evictor] = sorted(session.buffer.table.peers.tolist())
    assert kept == {"heap": [4, 4, 4, 4], "prompt_balanced": [1, 3, 3, 3]}


def test_every_prompt_has_the_same_chance_to_be_drawn() -> None:
    table = make_table([1.0] * 10, prompt=[1] * 9 + [2])
    sampler = registry().resolve("sampler", "prompt_balanced", "replay_sampler").make()
    context = make_context()
    drawn = [int(sampler(table, 1, context)[0]) == 9 for _ in range(2000)]
    assert 0.45 < np.mean(drawn) < 0.55


def by_prompt(scripts: dict[str, list[list[float]]]) -> Any:
    """A reward function with a script for each prompt, whose last rewards go on for ever."""
    calls = dict.fromkeys(scripts, 0)

    def scripted(prompts: list[str], **kwargs: Any) -> list[float]:
        rewards: list[float] = []
        for prompt in prompts[::4]:
            script = scripts[prompt]
            rewards += script[min(calls[prompt], len(script) - 1)]
            calls[prompt] += 1
        return rewards

    return scripted


BAD_SETTINGS = [
    {"replay_cooldown": 0},
    {"replay_half_life": 0.0},
    {"replay_half_life": float("inf")},
    {"replay_weight": -0.5},
    {"replay_weight": True},
    {"replay_dry_run": "yes"},
    {"replay_start": -1},
    {"replay_start": "soon"},
    {"replay_start": 0.5},
    {"replay_start_pass_rate": 1.5},
    {"replay_pass_reward": float("nan")},
    {"replay_retire_passes": 0},
    {"replay_samples_per_insert": 0},
    {"replay_min_ess": "0.5"},
    {"replay_max_log_ratio": 0.0},
    {"replay_max_weight": float("inf")},
    {"replay_refresh": "score"},
    {"replay_unfilled": "drop"},
    {"replay_unfilled": None},
]


@pytest.mark.parametrize("settings", BAD_SETTINGS)
def test_a_bad_limit_names_setting_and_value(settings: dict[str, Any]) -> None:
    ((name, value),) = settings.items()
    with pytest.raises(trl_replay.ConfigurationError, match=f"{name}={value!r} can't be used"):
        trl_replay.ReplayConfig(**settings)
