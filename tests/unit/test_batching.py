"""How envs are dealt out to workers."""

from __future__ import annotations

import pytest

from multienv.errors import UsageError
from multienv.vector.batching import deal


def test_one_worker_a_core_with_the_envs_dealt_out_evenly():
    assert deal(7, "auto", cores=3) == [3, 2, 2]
    assert deal(2, "auto", cores=4) == [1, 1]
    assert deal(7, "auto", cores=4, max_concurrency=2) == [4, 3]
    assert deal(7, 3, cores=1) == [3, 3, 1]
    assert deal(7, 4, cores=1, max_concurrency=2) == [4, 3]
    with pytest.raises(UsageError, match="makes 3 workers.*max_concurrency is 2"):
        deal(7, 3, cores=1, max_concurrency=2)
