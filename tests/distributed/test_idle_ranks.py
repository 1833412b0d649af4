"""With nothing to replay: bit-identical weights and no forward more on several processes, as on one."""

from __future__ import annotations

from typing import Any

import pytest
from idle import OTHERS
from launches import Launches


@pytest.fixture(scope="module")
def launches(tmp_path_factory: Any) -> Launches:
    return Launches("idle_ranks.py", tmp_path_factory.mktemp("idle"))


@pytest.mark.parametrize("name", OTHERS)
def test_idle_is_bit_identical_to_stock_on_two_processes(launches: Launches, name: str) -> None:
    for rank in launches(2, name):
        assert rank["differences"] == []
        assert (rank["size"] > 0) == OTHERS[name].stores
