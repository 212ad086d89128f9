"""What every test can rely on: no setting of the caller leaks in, nothing is written outside temporary directories."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# The one setting that is meant to reach the tests: `make test` runs the suite a second time with it.
TIER_VARIABLE = "FERMION_SIMD_TIER"


@pytest.fixture(scope="session", autouse=True)
def _isolated_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Child processes inherit this environment, so it is set for the session, not per test."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("FERMION_") and name != TIER_VARIABLE:
                patch.delenv(name)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout's root."""
    return Path(__file__).parent.parent
