"""Any strategy goes with any: what is refused is what docs/reference/strategies.md says."""

from itertools import product
from pathlib import Path

import pytest
from corrected import TOKEN_WEIGHTS
from support import LIVE, Rewards

import trl_replay
from trl_replay import ConfigurationError
from trl_replay.errors import RefusedError
from trl_replay.registry import BUILTIN, registry
from trl_replay.testing import make_trainer

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "strategies.md"
WITHOUT_CHANCES = {"newest", "top", "least_used", "same_prompt"}


def built_in(kind):
    return [spec.name for plugin, spec in registry().strategies(kind) if plugin.name == BUILTIN]


def refused(trainer, *kinds):
    """The combinations that can't be attached."""
    for names in product(*(built_in(kind) for kind in kinds)):
        settings = {f"replay_{kind}": name for kind, name in zip(kinds, names, strict=True)}
        if "selector" in kinds:
            settings["replay_record"] = "forward"
            if "always" in names:
                settings["replay_selector"] = "always(share=0.5)"
        try:
            trl_replay.attach(trainer, **settings)
        except (ConfigurationError, RefusedError):
            yield names
        else:
            trl_replay.detach(trainer)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return make_trainer(tmp_path_factory.mktemp("trainer"), Rewards([LIVE] * 3))


def test_what_is_refused_is_in_the_documentation(trainer, tmp_path):
    samplers = set(built_in("sampler"))
    named = PAGE.read_text().partition("## Incompatible combinations")[2].partition("\n## ")[0]
    assert set(refused(trainer, "sampler", "mixer")) == {(name, "inject") for name in samplers - {"same_prompt"}}
    assert set(refused(trainer, "sampler", "correction")) == {(name, "per") for name in WITHOUT_CHANCES}
    for kind in ("scorer", "evictor", "selector"):
        assert set(refused(trainer, kind)) == set()
    of_sequences = make_trainer(tmp_path, Rewards([LIVE] * 3), importance_sampling_level="sequence", loss_type="grpo")
    assert {name for (name,) in refused(of_sequences, "correction")} == TOKEN_WEIGHTS
    for name in ("inject", "per", *WITHOUT_CHANCES, *TOKEN_WEIGHTS):
        assert f"`{name}`" in named, f"{name} is not named as an exception"
