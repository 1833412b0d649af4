"""The command line, as a user sees it: what is listed and what is checked."""

import dataclasses
import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

import trl_replay
from trl_replay import EvictorSpec, run
from trl_replay.cli.commands import COMMANDS, main
from trl_replay.cli.listing import offers
from trl_replay.registry import Failure, registry
from trl_replay.specs import SPECS


def listed():
    return list(offers(registry()))


def shown(capsys, name):
    assert main(["list", name]) == 0
    return capsys.readouterr().out


def test_list_names_every_strategy_on_offer_with_its_kind_summary_and_distribution():
    rows = {(offer.kind, offer.name): offer for offer in listed() if offer.kind in SPECS}
    for kind in SPECS:
        for plugin, spec in registry().strategies(kind):
            name = spec.name if plugin.name == "builtin" else f"{plugin.name}/{spec.name}"
            row = rows.pop((kind, name))
            assert row.summary == spec.summary
            assert row.distribution == plugin.distribution
    assert not rows, f"listed but not on offer: {list(rows)}"


def test_list_fits_one_screen_and_marks_the_one_default_of_each_kind(capsys):
    defaults = [(offer.kind, offer.name) for offer in listed() if offer.default]
    assert defaults == [(kind, getattr(trl_replay.ReplayConfig(), f"replay_{kind}")) for kind in SPECS]
    main(["list"])
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 40
    assert max(map(len, out.splitlines())) <= 120
    assert out.count(" (default)") == len(SPECS)
    assert out.startswith("preset      sample_efficient, ")
    for offer in listed():
        assert offer.short in out


def test_list_is_as_wide_as_the_terminal(capsys, monkeypatch):
    monkeypatch.setattr("trl_replay.cli.listing.make_console", lambda: Console(width=60))
    main(["list"])
    assert 50 < max(map(len, capsys.readouterr().out.splitlines()[:-1])) <= 60


def test_list_of_a_kind_tells_what_each_of_its_names_does(capsys):
    out = shown(capsys, "scorer")
    for offer in listed():
        assert (offer.summary in out) == (offer.kind == "scorer"), offer


SHOWN = {
    "topr": ['replay_correction="topr"', "trl-replay", "cap=1.0", "2503.14286"],
    "advantage_std": ["the default scorer"],
    "uniform": ["every eligible entry"],
    "pass_rate": ["replay_scorer=", "replay_selector="],  # two share the name
    "decayed": ["trl-replay-freshness"],
    "freshness": ["freshness/half_life", "freshness/decayed", "freshness/abs_reward", "freshness/reward_half_life"],
    "freshness/reward_half_life": ['replay_preset="freshness/reward_half_life"', "replay_evictor='fifo'"],
}


@pytest.mark.parametrize("name", SHOWN)
def test_list_shows_all_of_a_name_with_their_documentation(capsys, name):
    out = shown(capsys, name)
    assert [text for text in SHOWN[name] if text not in out] == []
    assert "the default correction" not in out


def test_list_shows_plugins_that_take_part_in_training(capsys, plug):
    class Plugin:
        """Prints nothing.

        At any time.
        """

        @trl_replay.hookimpl
        def trl_replay_detached(self, session):
            pass

    plug(Plugin(), "quiet")
    rows = {offer.name: offer for offer in listed() if offer.kind == "plugin"}
    assert rows["quiet"].summary == "Prints nothing."
    assert not {"builtin", "freshness"} & set(rows), "plugins without such a hook are not for replay_plugins"
    out = shown(capsys, "quiet")
    for text in ('replay_plugins=["quiet"]', "registered in this process", "At any time."):
        assert text in out


def test_list_answers_an_unknown_name_with_the_nearest_ones(capsys):
    assert main(["list", "prompt_balance"]) == 1
    err = capsys.readouterr().err
    assert "There is no strategy, preset or plugin 'prompt_balance'. Did you mean 'prompt_balanced'?" in err
    assert main(["list", "xyzzy"]) == 1
    assert "'xyzzy'. `trl-replay list` shows all." in capsys.readouterr().err


def test_list_shows_strategies_whose_defaults_json_does_not_know_or_that_do_not_tell(capsys, plug):
    def far(reach=math.inf, *, folder, **others):
        """Far away.[31m"""

    class Plugin:
        @trl_replay.hookimpl
        def trl_replay_strategies(self):
            yield EvictorSpec("far", partial(far, folder=Path("out")), "")
            yield EvictorSpec("needy", far, "")
            yield EvictorSpec("compiled", dict, "")

    plug(Plugin(), "odd")
    rows = {offer.name: offer.arguments for offer in listed()}
    assert rows["odd/far"] == f"reach=inf, folder={Path('out')!r}, …"
    assert rows["odd/needy"] == "reach=inf, folder, …"
    assert rows["odd/compiled"] == "…"
    assert "Far away.\\x1b[31m" in shown(capsys, "odd/far"), "a terminal acts on nothing that a plugin says"


def test_list_tells_which_plugins_were_not_loaded_and_why(capsys, monkeypatch):
    failure = Failure("broken", "broken-plugin 1.2", "ImportError: no [module] named gone")
    monkeypatch.setitem(registry().failures, "broken", failure)
    main(["list"])
    out = capsys.readouterr().out
    assert "broken-plugin 1.2" in out
    assert "no [module] named gone" in out


def test_list_imports_neither_torch_nor_trl():
    code = (
        "import sys; from trl_replay.cli.commands import main\n"
        "for arguments in (['list'], ['list', 'topr'], ['list', 'topp']):\n"
        "    main(arguments)\n"
        "    found = {'torch', 'trl', 'transformers'} & set(sys.modules)\n"
        "    assert not found, (arguments, found)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "prompt_balanced" in done.stdout


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_has_help(capsys, command):
    with pytest.raises(SystemExit) as stopped:
        main([command.name, "--help"])
    assert stopped.value.code == 0
    assert command.summary in " ".join(capsys.readouterr().out.split())


def test_without_a_command_the_commands_are_shown(capsys):
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    assert "command" in capsys.readouterr().err
    assert [command.name for command in COMMANDS] == ["list", "report", "export", "demo"], "and run"


def test_the_help_of_run_shows_every_setting_once_in_groups_with_its_default():
    text = run.parser().format_help()
    for field in dataclasses.fields(trl_replay.ReplayConfig):
        assert text.count(f"\n  --{field.name} ") == 1
    found = " ".join(text.split())
    for title in run.GROUPS:
        assert f" {title}: --replay_" in found
    assert "(default: 64)" in found
    assert "(default: prompt_balanced)" in found


def test_the_package_is_the_command_and_tells_its_version():
    command = [sys.executable, "-m", "trl_replay", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"trl-replay {trl_replay.__version__}\n"
