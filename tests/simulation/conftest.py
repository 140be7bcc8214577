"""Keep thousands of warnings of lost workers out of the report, and let soak tests take their time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give soak tests of this directory hours: each runs one program tens of thousands of times."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.timeout(6 * 3600))


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level("CRITICAL", "multienv"):
        yield
