"""The command line, as a user sees it: what is listed and what is checked."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version

import pytest
from packaging.specifiers import SpecifierSet

from trl_replay import compat
from trl_replay.cli.commands import COMMANDS, main
from trl_replay.registry import Failure, registry
from trl_replay.specs import SPECS


def listed(capsys):
    assert main(["list", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_list_names_every_strategy_on_offer_with_its_kind_summary_and_distribution(capsys):
    rows = {(row["kind"], row["name"]): row for row in listed(capsys)["strategies"]}
    for kind in SPECS:
        for plugin, spec in registry().strategies(kind):
            name = spec.name if plugin.name == "builtin" else f"{plugin.name}/{spec.name}"
            row = rows.pop((kind, name))
            assert row["summary"] == spec.summary
            assert row["distribution"] == plugin.distribution
    assert not rows, f"listed but not on offer: {list(rows)}"


def test_list_prints_a_table_that_keeps_names_whole(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    for name in ("weighted_reservoir", "advantage_std", "proportional", "zero_std"):
        assert name in out


def test_list_tells_which_plugins_were_not_loaded_and_why(capsys, monkeypatch):
    failure = Failure("broken", "broken-plugin 1.2", "ImportError: no [module] named gone")
    monkeypatch.setitem(registry().failures, "broken", failure)
    assert listed(capsys)["failures"] == [
        {"name": "broken", "distribution": "broken-plugin 1.2", "reason": "ImportError: no [module] named gone"}
    ]
    main(["list"])
    out = capsys.readouterr().out
    assert "broken-plugin 1.2" in out
    assert "no [module] named gone" in out


def test_list_imports_neither_torch_nor_trl():
    code = (
        "import sys; from trl_replay.cli.commands import main; main(['list', '--json']); "
        "sys.exit(' '.join({'torch', 'trl', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_check_says_that_this_environment_is_usable(capsys):
    assert main(["check"]) == 0
    out = capsys.readouterr().out
    assert version("trl") in out
    assert "usable" in out
    assert main(["check", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["usable"]
    assert found["problems"] == []
    assert set(found["versions"]) == {
        "python", "trl-replay", "trl", "torch", "transformers", "accelerate", "pluggy",
    }  # fmt: skip


def test_check_fails_in_words_on_an_untested_trl(capsys, monkeypatch):
    monkeypatch.setattr(compat, "TESTED", SpecifierSet("<1"))
    monkeypatch.delenv(compat.UNTESTED_VARIABLE, raising=False)
    assert main(["check"]) == 1
    assert compat.UNTESTED_VARIABLE in capsys.readouterr().out


def test_check_names_the_method_that_the_installed_trainer_lacks(capsys, monkeypatch):
    monkeypatch.setattr(compat, "SEAM", {**compat.SEAM, "_gone": ("inputs",)})
    assert main(["check", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["usable"]
    assert found["problems"] == ["GRPOTrainer._gone is not a method"]


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
