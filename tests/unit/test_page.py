"""The report's words, from a log alone."""

from trl_replay.extras.report.page import page


def test_the_page_of_a_brief_log_says_nothing_of_what_was_not_logged():
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
