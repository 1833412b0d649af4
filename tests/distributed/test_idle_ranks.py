"""With nothing to replay: bit-identical weights and no forward more on several processes, as on one."""

import pytest
from idle import OTHERS


@pytest.mark.parametrize("name", OTHERS)
def test_idle_is_bit_identical_to_stock_on_two_processes(launches, name):
    for rank in launches(2, name):
        assert rank["differences"] == []
        assert (rank["size"] > 0) == OTHERS[name].stores
