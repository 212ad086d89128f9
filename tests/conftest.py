"""What every test can rely on: no setting of the caller leaks in, nothing is written outside temporary directories."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.config import EngineConfig

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
        _force_tier(patch)
        yield


def _force_tier(patch: pytest.MonkeyPatch) -> None:
    """Servers read the variable; engines made by tests get their default changed, so that no test can forget it."""
    if tier := os.environ.get(TIER_VARIABLE):
        _, *others = EngineConfig.__init__.__defaults__ or ()
        patch.setattr(EngineConfig.__init__, "__defaults__", (tier, *others))
        assert EngineConfig().simd_tier == tier


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout's root."""
    return Path(__file__).parent.parent
