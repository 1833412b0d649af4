"""What enters a buffer, is drawn from it, and leaves: without a trainer."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from trl_replay import ReplayConfig
from trl_replay.buffer import Newcomer, Policy, ReplayBuffer
from trl_replay.data.counters import Tally
from trl_replay.data.types import FROM_FILE, PIXELS
from trl_replay.errors import ReplayError
from trl_replay.testing import make_groups

LIVE, DEAD = [1.0, 0.0, 0.0, 0.0], [0.0] * 4
TEXT = frozenset({"prompt_ids", "completion_ids"})
UNKNOWN = np.full((1, 4), np.nan)


def newest(table, count, context):
    return np.argsort(-table.serial)[:count]


def buffer_of(capacity=8, **rules):
    return ReplayBuffer(capacity, Policy.of(**{"evictor": "fifo", "sampler": newest, **rules}), size=4)


def live(**fields):
    return replace(make_groups([LIVE]), **fields)


def drawn(buffer, slots=4, tally=None, **asked):
    found = buffer.sample(make_groups([DEAD] * slots), tally, **asked)
    return [] if found is None else found.table.serial[found.rows.ravel()].tolist()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"trainable": np.zeros((1, 4), np.int64)}, "it has no trainable token"),
        (
            {"behavior_logps": np.array([[-1.0, np.nan, -1.0, -1.0]])},
            "a trainable token has no finite log-prob: its file or the loss gave none",
        ),
        ({"behavior_logps": None}, "a trainable token has no finite log-prob: its file or the loss gave none"),
        (
            {"behavior_logps": UNKNOWN, "origin": np.array([FROM_FILE])},
            "a trainable token has no finite log-prob: its file or the loss gave none",
        ),
        ({"prompt": np.array([7])}, "its prompt is solved (replay_retire_passes)"),
    ],
)
def test_what_is_refused_before_it_is_scored(fields, reason):
    buffer, tally = buffer_of(scorer=lambda groups, context: pytest.fail("it was scored")), Tally()
    assert buffer.extend(live(**fields), tally=tally, solved=np.array([7])) == set()
    assert tally.reasons == {f"a group was refused: {reason}": 1}
    assert (tally.refused, len(buffer)) == (1, 0)


@pytest.mark.parametrize("score", [np.nan, np.inf, -np.inf])
def test_a_score_that_is_no_number_refuses(score):
    buffer, tally = buffer_of(scorer=lambda groups, context: np.array([score, 1.0])), Tally()
    assert buffer.extend(make_groups([LIVE, LIVE]), tally=tally) == {1}
    assert (tally.refused, tally.stored) == (1, 1)


@pytest.mark.parametrize("serials", [(3, 3), (0, 4)])
def test_188_a_serial_that_comes_twice_is_refused(serials):
    buffer = buffer_of()
    buffer.extend(live())
    with pytest.raises(ReplayError, match=r"comes twice or belongs to an entry: take new ones from take_serials\(\)"):
        buffer.extend(make_groups([LIVE, LIVE]), [Newcomer(serial) for serial in serials])
    assert len(buffer) == 1


def test_188_a_buffer_whose_evictor_fails_holds_what_it_held_before():
    def failing(table, context):
        raise ValueError("no rank")

    buffer = buffer_of(2, evictor=failing)
    buffer.extend(make_groups([LIVE, LIVE]))
    with pytest.raises(Exception, match="no rank"):
        buffer.extend(live())
    assert buffer.table.serial.tolist() == [0, 1]


def test_188_a_reward_that_no_gradient_bears_is_refused():
    buffer, tally = buffer_of(), Tally()
    assert buffer.extend(make_groups([[1e30, 0.0, 0.0, 0.0], LIVE]), tally=tally) == {1}
    assert next(iter(tally.reasons)).startswith("a group was refused: its reward is larger than 1e+09")


def test_an_entry_must_restore_every_key_and_brings_images_only_where_they_fit():
    buffer = buffer_of()
    keysets = [TEXT, TEXT | {"ref_per_token_logps"}, TEXT | {PIXELS}, TEXT]
    buffer.extend(make_groups([LIVE] * 4), [Newcomer(serial, keys=keys) for serial, keys in enumerate(keysets)])
    buffer.clock.update = 9
    assert drawn(buffer, keys=TEXT) == [3, 1, 0]
    assert drawn(buffer, keys=TEXT | {PIXELS}) == [3, 2, 1, 0], "those without images fit in any batch"
    tally = Tally()
    assert drawn(buffer, keys=keysets[1], tally=tally) == [1]
    assert "has images, the batch none, lacks a tensor" in next(iter(tally.reasons))


def test_rules_without_a_trainer_have_the_strategies_of_the_defaults():
    config, labels = ReplayConfig(), Policy.of().hooks.label
    kinds = ("scorer", "evictor", "sampler")
    assert [labels(kind) for kind in kinds] == [getattr(config, f"replay_{kind}") for kind in kinds]


def test_a_buffer_knows_no_trainer_batch_or_other_process():
    above = "batch loss setup.components step distributed generation session checkpoint.session_state offline"
    program = (
        "import sys, trl_replay.buffer; found = [name for name in sys.modules if name.split('.')[0] in "
        "('trl', 'transformers', 'accelerate')]; "
        f"found += [name for name in sys.modules if name.startswith(tuple('trl_replay.' + one for one in "
        f"{above.split()!r} + ['compat', 'trainer', 'asynchronous']))]; print(sorted(found))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
