"""docs/hooks.md keeps up with the code: every hook has its section, and every example runs."""

import inspect
import re
from pathlib import Path

import pytest
from installed import install
from support import DEAD, HALF, LIVE, Rewards

import trl_replay
from trl_replay import Groups, hookspecs
from trl_replay.registry import new_manager
from trl_replay.testing import make_trainer

PAGE = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text()


HOOKS = {
    name: function
    for specs in (hookspecs.RegistryHooks, hookspecs.SessionHooks)
    for name, function in vars(specs).items()
    if name in hookspecs.hook_names(specs)
}


SECTIONS = dict(re.findall(r"^## `(trl_replay_\w+\([^)]*\))`\n(.*?)(?=^#|\Z)", PAGE, flags=re.MULTILINE | re.DOTALL))


EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


def heading(name):
    parameters = [parameter for parameter in inspect.signature(HOOKS[name]).parameters if parameter != "self"]
    return f"{name}({', '.join(parameters)})"


@pytest.mark.parametrize("name", HOOKS)
def test_every_section_says_what_to_return_and_has_an_example_that_implements_the_hook(name):
    section = SECTIONS[heading(name)]
    assert "**Returns**" in section
    (example,) = re.findall(r"^```python\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
    namespace = {public: getattr(trl_replay, public) for public in trl_replay.__all__}
    exec(example, namespace)
    manager = new_manager()
    manager.register(type("Plugin", (), {name: staticmethod(namespace[name])})(), "example")
    manager.check_pending()
    assert [caller.name for caller in manager.get_hookcallers(manager.get_plugin("example"))] == [name]


def test_there_is_a_section_for_every_hook_titled_with_its_signature_and_no_other():
    assert set(SECTIONS) == {heading(name) for name in HOOKS}


def test_the_page_runs_from_top_to_bottom():
    namespace = {public: getattr(trl_replay, public) for public in trl_replay.__all__}
    for example in EXAMPLES:
        exec(example, namespace)
    suite = namespace["TestRarelyUsed"]()
    for name in dir(suite):
        if name.startswith("test_"):
            getattr(suite, name)()


def test_the_plugin_in_ten_lines_works_as_it_stands(tmp_path, monkeypatch):
    """The very code of the page becomes an installed distribution's module, and trains."""
    module = re.search(r"```python\n# my_replay\.py\n(.*?)```", PAGE, re.DOTALL)[1]
    assert len([line for line in module.splitlines() if line.strip()]) <= 10
    entry_points = re.search(r"\[project\.entry-points\.trl_replay\]\n(.*?)\n```", PAGE, re.DOTALL)[1]
    (tmp_path / "my_replay.py").write_text(module)
    install(tmp_path, "my-replay", entry_points.replace('"', ""))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("trl_replay.registry._registry", None)  # as in a process that begins after the installation
    setting = re.search(r'Then `(replay_evictor)="([^"]+)"`', PAGE)
    trainer = make_trainer(tmp_path / "out", Rewards([LIVE, DEAD, HALF], [DEAD, DEAD, LIVE]))
    with trl_replay.attached(trainer, **{setting[1]: setting[2]}, replay_buffer_size=3) as session:
        trainer.train()
    assert session.plugins == ["mine"]
    assert session.totals.counters["evicted"] > 0


def test_176_the_page_lists_all_that_groups_hold():
    section = PAGE.partition("### What groups hold\n")[2].partition("\n### ")[0]
    told = set(re.findall(r"`(\w+)`", section))
    held = {name for name in (*vars(Groups), *Groups.__dataclass_fields__) if not name.startswith("_")}
    assert held - {"take", "concatenate"} <= told
