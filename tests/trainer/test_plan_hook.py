"""The hooks `trl_replay_plan` and `trl_replay_eligible`: what a plugin makes of rows is what the loss trains on."""

import re
from pathlib import Path

import numpy as np
import pytest
from credit import Credit
from scenarios import Scenario, follow, train
from support import DEAD, HALF, LIVE, plugin

from trl_replay import hookimpl
from trl_replay.errors import HookError, ResultError
from trl_replay.loss.supply import EXCLUDED, ROWS

pytestmark = pytest.mark.usefixtures("all_metrics")

PAGE = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text()
SCRIPT = ([LIVE, DEAD, HALF], [DEAD, LIVE, DEAD], [HALF, DEAD, DEAD])


def of_page(words):
    """The plugin of docs/hooks.md behind these words."""
    code = re.search(r"```pyt?h?o?n?\n(.*?)```", PAGE[PAGE.index(words) :], re.DOTALL)[1]
    assert len(code.strip().splitlines()) <= 15
    namespace = {"np": np, "hookimpl": hookimpl}
    exec(code, namespace)
    return namespace["trl_replay_plan"]


def flags_of(steps):
    """The second column of the row ids of each batch that was trained on."""
    return [out[ROWS][:, 1].tolist() for _, out in steps]


def by_hand(folder, plan, settings=None, **replay):
    """Trains with every batch, loss and gradient by hand; returns session and watch."""
    training = {"max_steps": 7, "max_completion_length": 6, "learning_rate": 1e-2, **(settings or {})}
    with plugin(plan=plan):
        trainer, session = follow(folder, Scenario(training, {"replay_plugins": "mine", **replay}, SCRIPT))
    return session, trainer.watch


@pytest.mark.generates
def test_the_plugin_of_the_page_that_leaves_long_rows_out(tmp_path):
    code = of_page("## `trl_replay_plan(")

    def shorter(plan, groups, table, context):
        class Stretched:
            row_length = table.row_length * 300

        stretched = type("Groups", (), {"lengths": groups.lengths * 300})()
        code(plan, stretched, Stretched, context)

    _, watch = by_hand(tmp_path, shorter)
    for (_, out), flags in zip(watch.steps, flags_of(watch.steps), strict=True):
        assert [bool(flag & EXCLUDED) for flag in flags] == (out["completion_mask"].sum(dim=1) > 3).tolist()


def edit(**columns):
    """A plugin's function that writes columns."""

    def plan(plan):
        for name, value in columns.items():
            setattr(plan, name, value(plan) if callable(value) else value)

    return plan


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (edit(masked=lambda plan: plan.masked.astype(int)), "plan.masked must stay an array of bool"),
        (edit(advantages=lambda plan: plan.advantages[:1]), "plan.advantages must stay an array of float64"),
        (edit(advantages=lambda plan: plan.advantages * np.nan), "give finite numbers"),
        (edit(advantages=lambda plan: plan.advantages + 1e12), "at most 1e\\+09"),
        (edit(source=lambda plan: plan.source[:, ::-1].copy()), "plan.entry and plan.source are read-only"),
        (lambda plan: plan.leave_empty(plan.unfilled), "plan.entry and plan.source are read-only"),
        (lambda plan: plan.entry.fill(0), "read-only"),
        (lambda plan: 3, "returned a value"),
    ],
)
def test_an_edit_that_a_plan_does_not_allow_names_the_plugin(tmp_path, change, words):
    with pytest.raises((ResultError, HookError), match=words) as raised:
        train(tmp_path, *SCRIPT, hooks={"plan": change}, max_steps=2)
    assert "mine" in str(raised.value)


def test_nothing_is_taken_back(tmp_path):
    masks = {
        "advantages": lambda groups: np.where(groups.lengths > 2, np.nan, groups.advantages),
        "plan": edit(masked=lambda plan: np.zeros_like(plan.masked)),
    }
    with pytest.raises(ResultError, match="a plugin may only mask rows"):
        train(tmp_path, *SCRIPT, hooks=masks, max_steps=2)


def test_142_a_setting_runs_after_a_plugin_that_asks_to_be_last(tmp_path):
    seen = []

    @hookimpl(trylast=True)
    def last(plan):
        seen.append(bool(plan.masked.any()))

    excluding = {"replay_unfilled": "exclude", "replay_buffer_size": 0, "max_steps": 3}
    run = train(tmp_path, *SCRIPT, hooks={"plan": last}, replaced=0, **excluding)
    assert run.counters["excluded"] > 0
    assert seen == [False] * 3


def test_in_a_dry_run_nothing_is_treated(tmp_path):
    def plan(plan):
        raise AssertionError("called in a dry run")

    run = train(tmp_path, *SCRIPT, hooks={"plan": plan}, replay_dry_run=True, replay_unfilled="exclude")
    assert run.counters["excluded"] == 0


def test_entries_that_a_plugin_holds_back_stay_stored_and_explain_says_why(tmp_path):
    held = {"eligible": lambda table, context: {"on Mondays": np.ones(len(table), bool)}}
    session = train(tmp_path, *SCRIPT, hooks=held, replaced=0).session
    assert len(session.buffer) > 0
    assert "(held back: on Mondays)" in session.explain()


@pytest.mark.parametrize("result", [[1], {"why": [1.0]}, {"why": np.ones(99, bool)}])
def test_a_wrong_mask_of_eligible_entries_names_the_plugin(tmp_path, result):
    with pytest.raises(ResultError, match=r"'mine'.*trl_replay_eligible.* bool of shape"):
        train(tmp_path, *SCRIPT, hooks={"eligible": lambda table, context: result})


def test_what_a_plugin_notes_stands_in_explain(tmp_path):
    noting = {"plan": lambda plan, context: context.note("it was Monday", int(plan.unfilled.sum()))}
    assert re.search(r"\d+ x it was Monday", train(tmp_path, *SCRIPT, hooks=noting).session.explain())


def test_with_an_advantage_for_each_token_a_plan_masks_rows_and_changes_none(tmp_path):
    settings = {"trainer_class": Credit, "max_steps": 2}
    run = train(tmp_path, *SCRIPT, hooks={"plan": edit(masked=lambda plan: plan.kl)}, **settings)
    assert run.session.metrics["replay/masked_rows_fraction"] == 1.0
    with pytest.raises(ResultError, match="has per-token advantages"):
        train(tmp_path, *SCRIPT, hooks={"plan": edit(advantages=lambda plan: plan.advantages * 2)}, **settings)
