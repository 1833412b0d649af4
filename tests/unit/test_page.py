"""The report's words, from a log alone."""

from __future__ import annotations

from trl_replay.report.page import page


def test_the_page_of_a_brief_log_says_nothing_of_what_was_not_logged() -> None:
    values = {
        "frac_reward_zero_std": 0.5,
        "reward": 0.0,
        "replay/dead_fraction": 0.5,
        "replay/replaced_fraction": 0.25,
    }
    log = [{"step": step, "replay/size": 1.0, **values} for step in range(3)]
    brief = page("run", log, None)
    assert "in the place of <b>25.0%</b> of all groups.<" in brief
    full = page("run", [{**entry, "replay/dead_fraction_after": 0.25} for entry in log], None)
    assert "in the place of <b>25.0%</b> of all groups, so that <b>25.0%</b> of those trained on were dead." in full


def test_the_page_tells_from_where_to_where_the_reward_went() -> None:
    log = [{"step": step, "frac_reward_zero_std": 0.5, "reward": step / 100} for step in range(100)]
    assert "went from <b>0.045</b> in the first tenth of the run to <b>0.945</b> in the last" in page("run", log, None)
