"""Shared by the tests of the managers."""

from __future__ import annotations

from typing import Any

import pytest

from multienv import AsyncSubprocessEnvManager, SyncSubprocessEnvManager


# They differ in what step() waits for; the tests of that name their class.
@pytest.fixture(params=[AsyncSubprocessEnvManager, pytest.param(SyncSubprocessEnvManager, marks=pytest.mark.soak)])
def manager_of(request: pytest.FixtureRequest) -> Any:
    return request.param
