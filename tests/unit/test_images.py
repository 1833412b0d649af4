"""Every layout of images that TRL has, cut, joined, sent and composed; rows are told apart by TRL's own helpers."""

from typing import Any

import numpy as np
import pytest
import torch
from batches import KEYS, PAD, SIZE, make_batch, place, rows_of
from image_rows import assert_same_images, by_row, real_types
from releases import since

from trl_replay import BatchError
from trl_replay.batch.compose import check, compose, cut, join
from trl_replay.data.types import FieldTable
from trl_replay.serialization.groups import from_bytes, pack, to_bytes, unpack

FIELDS = FieldTable(PAD)


LAYOUTS = [
    "image_grid_thw", "image_position_ids", "spatial_shapes", "num_tiles", "flat", "flat with image_sizes",
    "one entry a row",
]  # fmt: skip


def add_images(batch, layout, counts, seed):
    """The batch with `counts` images a row; the rows of a group have the same ones."""
    draw = np.random.default_rng(seed)

    def some(*shape):
        return torch.from_numpy(draw.normal(size=shape)).float()

    groups, keys = [], dict[str, list[Any]]()
    for begin in range(0, len(counts), SIZE):
        held, images = dict[str, Any](), counts[begin]
        tiles = [int(number) for number in draw.integers(1, 4, images)]
        if layout == "image_grid_thw":
            held["image_grid_thw"] = torch.tensor([[1, 2, 2 * tile] for tile in tiles], dtype=torch.int64).view(
                images, 3
            )
            held["pixel_values"] = some(sum(4 * tile for tile in tiles), 6)
        elif layout == "image_position_ids":
            held |= {"image_position_ids": some(images, 5, 2).long(), "pixel_values": some(images, 5, 6)}
        elif layout == "spatial_shapes":
            held |= {"spatial_shapes": some(sum(tiles), 2).long(), "pixel_values": some(sum(tiles), 5, 6)}
            held["pixel_attention_mask"] = some(sum(tiles), 5).gt(0).long()
        elif layout == "num_tiles":
            held["pixel_values"] = some(sum(tiles), 3, 4, 4)
        elif layout == "one entry a row":
            held |= {
                "pixel_values": some(1, images, 3, 2 + seed % 2, 4),
                "pixel_attention_mask": torch.ones(1, images, 2, 4),
            }
        else:
            held["pixel_values"] = some(images, 3, 4, 4)
            if "sizes" in layout:
                held["image_sizes"] = some(images, 2).long()
        groups.append((held, images, sum(tiles)))
    if layout == "one entry a row":
        most = max(images for _, images, _ in groups)
        for held, images, _ in groups:
            for key in held:
                pad = [0, 0] * (held[key].dim() - 2) + [0, most - images]
                held[key] = torch.nn.functional.pad(held[key], pad)
    for held, _, _ in groups:
        for key, value in held.items():
            keys.setdefault(key, []).extend([value] * SIZE)
    added = {key: torch.cat(parts) for key, parts in keys.items()}
    added["num_images"] = [images for _, images, _ in groups for _ in range(SIZE)]
    if layout in ("spatial_shapes", "num_tiles"):
        added["num_tiles"] = [tiles for _, _, tiles in groups for _ in range(SIZE)]
        if layout == "num_tiles" and added["num_tiles"] == added["num_images"]:
            del added["num_tiles"]  # as TRL does
    types = torch.cat([batch["prompt_mask"], batch["completion_mask"] * 0], dim=1).long()
    pictured = torch.tensor(added["num_images"]).gt(0).unsqueeze(1)
    return {**batch, **added, "mm_token_type_ids": types * pictured}


def make(layout, counts, seed):
    draw = np.random.default_rng(seed)
    lengths = [[(int(draw.integers(1, 7)), int(draw.integers(1, 8))) for _ in range(SIZE)] for _ in counts]
    batch = make_batch(lengths, KEYS[:3], seed, [True] * len(counts))
    return add_images(batch, layout, [count for count in counts for _ in range(SIZE)], seed)


def assert_rows(after, before, pairs):
    found, stored = by_row(after), by_row(before)
    for row, source in pairs:
        shapes = {key: value.shape for key, value in stored[source].items() if torch.is_tensor(value)}
        cut_back = {
            key: value[tuple(slice(size) for size in shapes[key])] if key in shapes and value.dim() > 1 else value
            for key, value in found[row].items()
        }
        assert_same_images(cut_back, stored[source])
        assert torch.equal(
            real_types(after, "mm_token_type_ids", row), real_types(before, "mm_token_type_ids", source)
        )


COUNTS = [((1, 1, 1), (1, 1, 1)), ((2, 1, 3), (1, 3, 2)), ((0, 2, 2), (1, 3, 2)), ((2, 2, 1), (3, 0, 2))]


SPLIT = {
    "spatial_shapes": since("1.7.0", "a split of this layout"),
    **dict.fromkeys(["num_tiles", "flat", "flat with image_sizes"], since("1.11.0", "a split of this layout")),
}


SPLIT_LAYOUTS = [pytest.param(layout, marks=SPLIT.get(layout, ())) for layout in LAYOUTS]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("layout", SPLIT_LAYOUTS[:-1])
def test_9_every_layout_comes_back_with_its_rows(layout, counts):
    comes_back(layout, counts)


@pytest.mark.parametrize("counts", COUNTS[:2], ids=str)
def test_9_one_padded_entry_a_row_comes_back_where_each_row_has_images(counts):
    comes_back("one entry a row", counts)


def comes_back(layout, counts):
    from trl.trainer.utils import (
        shuffle_sequence_dict,
        split_pixel_values_by_grid,
        split_tensor_dict,
        unsplit_pixel_values_by_grid,
    )

    source, target = make(layout, counts[0], 1), make(layout, counts[1], 2)
    check(source, FIELDS)
    groups = cut(source, FIELDS, [rows_of(slot) for slot in range(3)])
    sent = [unpack(packed) for packed in from_bytes(to_bytes([pack(group) for group in groups]))]
    out = compose(target, FIELDS, [place(2, sent[0]), place(0, sent[1])])
    check(out, FIELDS)
    pairs = [(2 * SIZE + row, row) for row in range(SIZE)] + [(row, SIZE + row) for row in range(SIZE)]
    assert_rows(out, source, pairs)
    assert_rows(out, target, [(SIZE + row, SIZE + row) for row in range(SIZE)])
    out["number"] = torch.arange(3 * SIZE)
    parts = split_tensor_dict(shuffle_sequence_dict(split_pixel_values_by_grid(out)), 3)
    for part in map(unsplit_pixel_values_by_grid, parts):
        if layout == "one entry a row":  # TRL's helper can't tell it in a part that happens to have an image a row
            assert torch.equal(part["pixel_values"], out["pixel_values"][part["number"]])
        else:
            assert_rows(part, out, list(enumerate(part["number"].tolist())))


@pytest.mark.parametrize("layout", SPLIT_LAYOUTS)
def test_parts_of_a_group_join_to_the_whole(layout):
    batch = make(layout, (2, 1, 3), 3)
    (whole,) = cut(batch, FIELDS, [rows_of(0)])
    joined = join(cut(batch, FIELDS, [slice(0, 1), slice(1, SIZE)]), FIELDS)
    assert joined.keys == whole.keys
    for key, value in whole.tensors.items():
        assert torch.equal(joined.tensors[key], value), key


@pytest.mark.parametrize("layout", SPLIT_LAYOUTS[:-1])
def test_a_part_without_images_joins_one_with_images(layout):
    """An environment may show an image in one rollout and none in another."""
    with_some, without = make(layout, (2, 1, 1), 4), make(layout, (0, 1, 1), 5)
    parts = [*cut(with_some, FIELDS, [slice(0, 1)]), *cut(without, FIELDS, [slice(1, SIZE)])]
    group = join(parts, FIELDS)
    target = make(layout, (1, 3, 2), 6)
    out = compose(target, FIELDS, [place(1, group)])
    assert out["num_images"][SIZE : 2 * SIZE] == [2] + [0] * (SIZE - 1)
    assert_rows(out, with_some, [(SIZE, 0)])
    assert_rows(out, without, [(SIZE + row, row) for row in range(1, SIZE)])


@since("1.11.0", "a split of this layout")
def test_a_part_that_counts_no_tiles_joins_one_that_does():
    """TRL leaves `num_tiles` out of a batch in which every image has one tile."""
    plain = next(batch for seed in range(99) if "num_tiles" not in (batch := make("num_tiles", (1, 0, 0), seed)))
    tiled = next(batch for seed in range(99) if batch_tiles(batch := make("num_tiles", (1, 0, 0), seed)) == 2)
    group = join([*cut(plain, FIELDS, [slice(0, 1)]), *cut(tiled, FIELDS, [slice(1, SIZE)])], FIELDS)
    assert group.tensors["num_tiles"].tolist() == [1] + [2] * (SIZE - 1)
    out = compose(make("num_tiles", (1, 3, 2), 6), FIELDS, [place(1, group)])
    assert_rows(out, plain, [(SIZE, 0)])
    assert_rows(out, tiled, [(SIZE + row, row) for row in range(1, SIZE)])


def batch_tiles(batch):
    """Tiles of the first row."""
    return batch.get("num_tiles", [1])[0]


def test_parts_join_by_what_any_of_them_tells_of_the_layout():
    """One image a row in the first part may be one entry a row or one an image; the second part tells."""
    first, second = make("one entry a row", (1, 3, 3), 1), make("one entry a row", (3, 3, 3), 1)
    group = join([part for batch in (first, second) for part in cut(batch, FIELDS, [slice(0, 1)])], FIELDS)
    assert group.tensors["num_images"].tolist() == [1, 3]
    assert group.tensors["pixel_values"].size(0) == 2, "one entry a row"


def test_an_image_batch_that_lost_its_images_is_still_composed():
    """TRL drops all images where one was cut off, and leaves `num_images` None."""
    batch = make("image_grid_thw", (0, 0, 0), 1)
    batch |= {"num_images": None, "mm_token_type_ids": batch["mm_token_type_ids"] * 0}
    for key in ("pixel_values", "image_grid_thw"):
        del batch[key]
    (group,) = cut(make("image_grid_thw", (0, 1, 1), 2), FIELDS, [rows_of(0)])
    out = compose(batch, FIELDS, [place(1, group)])
    assert out["num_images"] is None
    assert list(out) == list(batch)


def test_a_layout_that_can_not_be_told_is_named():
    batch = make("image_grid_thw", (2, 1, 1), 1)
    with pytest.raises(BatchError, match=r"have {'image_grid_thw': .*'pixel_values': .*}, which TRL does not"):
        check({**batch, "pixel_values": batch["pixel_values"][:-1]}, FIELDS)
    with pytest.raises(BatchError, match=r"holds .*'pixel_values' but lacks 'num_images'"):
        check({key: value for key, value in batch.items() if key != "num_images"}, FIELDS)
    with pytest.raises(BatchError, match="'num_images' has 3 entries for 9 rows"):
        check({**batch, "num_images": [1, 2, 1]}, FIELDS)
    (pictured,) = cut(batch, FIELDS, [rows_of(0)])
    text = make_batch([[(2, 2)] * SIZE] * 3, KEYS[:3], 1, [True] * 3)
    with pytest.raises(BatchError, match="A stored group has images and the batch has none"):
        compose(text, FIELDS, [place(0, pictured)])


@pytest.mark.parametrize("counts", [(0, 2, 2), (2, 0, 1)], ids=str)
def test_a_row_without_images_is_refused_where_each_has_one_padded_entry(counts):
    """With as many images as rows, TRL gives it those of another row."""
    with pytest.raises(BatchError, match="Leave rows without images out of the dataset"):
        check(make("one entry a row", counts, 1), FIELDS)
    text = make_batch([[(2, 2)] * SIZE] * 3, KEYS[:3], 1, [True] * 3)
    (without,) = cut(text, FIELDS, [rows_of(0)])
    with pytest.raises(BatchError, match="Leave rows without images out of the dataset"):
        compose(make("one entry a row", (2, 1, 3), 1), FIELDS, [place(0, without)])
