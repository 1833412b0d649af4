"""Images: groups with different numbers of them and with none, in every layout that TRL has."""

from types import MappingProxyType

import pictures
import pytest
import torch
from generating import Coins, by_hand, rounds_of
from image_rows import assert_same_images, by_row
from releases import since
from replaying import Checked, original, replay
from support import DEAD, HALF, LIVE, Rewards, Spy, record

import trl_replay

SCRIPT = ([LIVE, DEAD, HALF], [DEAD, LIVE, DEAD], [HALF, DEAD, DEAD])


MODELS = {"image_grid_thw": pictures.qwen2_vl, "num_tiles": pictures.internvl, "one entry an image": pictures.llava}


COUNTS = [(1, 1, 1), (2, 1, 3), (2, 1, 0), (0, 0, 0, 1, 2, 1)]


NEWER = since("1.11.0", "a split of tiles, and of several images a row that have neither grid nor positions")


ALWAYS = {"image_grid_thw": COUNTS, "num_tiles": [], "one entry an image": [(1, 1, 1)]}  # split by any release


CASES = [
    pytest.param(layout, counts, marks=() if counts in ALWAYS[layout] else NEWER)
    for layout in MODELS
    for counts in COUNTS
]


def train(tmp_path, make, counts, replays=MappingProxyType({}), **settings):
    settings = {"max_steps": 6, "learning_rate": 1e-2, **settings}
    trainer = pictures.make_trainer(tmp_path, make(), counts, Rewards(*SCRIPT), **settings)
    trainer.independent = False
    return replay(trainer, **replays)


@pytest.mark.parametrize(("layout", "counts"), CASES, ids=str)
def test_9_images_are_replayed_with_their_rows(tmp_path, layout, counts):
    session, watch = train(tmp_path, MODELS[layout], counts)
    batches = zip(watch.steps, watch.taken, strict=True)
    assert any("images" in original(after, row, watch.pad) for (_, after), taken in batches for row in taken)
    assert session.totals.counters["refused"] == 0
    pictured = {bool(batch.get("num_images")) for batch, _ in watch.steps}
    if counts[:3] == (0, 0, 0):
        assert pictured == {True, False}, "batches with and without images"
        assert "has images, the batch none" in session.explain() or len(session.buffer) > 0


class OneTooMany(Checked):
    """A trainer whose batches hold an image that belongs to no row."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        return {**batch, "pixel_values": torch.cat([batch["pixel_values"], batch["pixel_values"][:1]])}


def test_9_a_layout_that_is_not_known_is_refused_by_name_before_it_is_trained_on(tmp_path):
    rewards = Rewards(*SCRIPT)
    trainer = pictures.make_trainer(tmp_path, pictures.llava(), (1, 1, 1), rewards, trainer_class=OneTooMany)
    trl_replay.attach(trainer)
    with pytest.raises(trl_replay.BatchError, match=r"have {'pixel_values': \(13, 3, 28, 28\)}, which TRL"):
        trainer.train()
    assert trainer.losses == []


def test_a_groups_common_images_are_stored_once(tmp_path):
    session, watch = train(tmp_path, pictures.qwen2_vl, (2, 1, 3))
    for serial in session.buffer.table.serial.tolist():
        group = session.buffer.load(serial)
        step, slot = watch.origin[serial]
        first = by_row(watch.steps[step][0])[slot * 4]
        assert group.tensors["num_images"].tolist() == [first["num_images"]]
        assert torch.equal(group.tensors["pixel_values"], first["pixel_values"])


@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        pytest.param("image_grid_thw", (0, 0, 0, 1, 2, 1), marks=NEWER),  # batches of text alone, and of images
        pytest.param("num_tiles", (2, 1, 0), marks=NEWER),
    ],
)
def test_groups_that_are_generated_again_bring_their_images(tmp_path, layout, counts):
    coins = Coins(0.5)
    trainer = pictures.make_trainer(tmp_path, MODELS[layout](), counts, coins, trainer_class=Spy, max_steps=3)
    session = trl_replay.attach(trainer, replay_refill="new(rounds=2)", replay_buffer_size=0)
    steps = record(session)
    trainer.train()
    refilled = 0
    for numbers, (_, after) in zip(rounds_of(coins.calls, 2), steps, strict=True):
        rows = [by_row(trainer.scored[number]) for number in numbers]
        found = by_row(after)
        for slot, (number, place) in enumerate(by_hand([coins.calls[number] for number in numbers])):
            refilled += number > 0
            for row in range(4):
                assert_same_images(found[slot * 4 + row], rows[number][place * 4 + row])
        pictured = any(row.get("num_images") for row in found)
        assert ("pixel_values" in after) == pictured, "image fields are there where a row has images, and only there"
    assert refilled > 0
