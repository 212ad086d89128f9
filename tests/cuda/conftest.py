"""One emulation build of the CUDA kernels for all tests of a run."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from cuda_emulator import build

from engine import cuda_driver


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels compiled for the CPU, without sanitizers."""
    return build(tmp_path_factory.mktemp("cuda_emu"), sanitize=False)


@pytest.fixture(scope="session")
def newer_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the kernels for tensor cores."""
    return build(tmp_path_factory.mktemp("cuda_emu_newer"), sanitize=False, newer="sm_80")


@pytest.fixture
def driver(library: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """The driver in small; `fake_fail` makes one of its calls fail."""
    monkeypatch.setattr(cuda_driver, "_LIBRARY", str(library))
    loaded = ctypes.CDLL(str(library))
    loaded.fake_read_only(False)
    return loaded
