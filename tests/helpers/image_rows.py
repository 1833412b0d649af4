"""Matches images and token types with the rows of a batch."""

from __future__ import annotations

from typing import Any

import torch

from trl_replay.data.types import FIELDS, IMAGE_LAYOUTS


def by_row(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """The images and token types of each row, told apart by TRL's own helper."""
    from trl.trainer.utils import split_pixel_values_by_grid

    split = split_pixel_values_by_grid({key: value for key, value in batch.items() if value is not None})
    image_keys = {spec.name for spec in FIELDS if spec.layout in IMAGE_LAYOUTS}
    keys = [key for key in split if key in image_keys]
    return [{key: split[key][row] for key in keys} for row in range(len(batch["advantages"]))]


def assert_same_images(found: dict[str, Any], stored: dict[str, Any]) -> None:
    """Equal, but that a row without images may lack keys, and rows may have one tile an image."""
    for key in found.keys() | stored.keys():
        one, other = found.get(key), stored.get(key)
        if key == "num_tiles":
            one = found.get("num_images") if one is None else one
            other = stored.get("num_images") if other is None else other
        if torch.is_tensor(one) and torch.is_tensor(other):
            torch.testing.assert_close(one, other, rtol=0, atol=0, msg=f"{key} of a row changed")
        elif torch.is_tensor(one) or torch.is_tensor(other):
            assert (one if torch.is_tensor(one) else other).numel() == 0, f"{key} of a row came or went"
        else:
            assert (one or 0) == (other or 0), f"{key} of a row changed"


def real_types(batch: dict[str, Any], key: str, row: int) -> torch.Tensor:
    """The token types of a row's real tokens; 0 where the batch has none."""
    real = torch.cat([batch["prompt_mask"][row], batch["completion_mask"][row]]).bool()
    return batch[key][row][real] if key in batch else torch.zeros(int(real.sum()), dtype=torch.int64)
