"""The committed PTX: current, obeying the rules of a Fermi card, and within its registers."""

from __future__ import annotations

import os
from pathlib import Path

import cuda_ptx
import fermi_assembler
import pytest

MODULES = cuda_ptx.committed()
NAMES = sorted(MODULES)


def test_manifest_matches_sources_compiler_and_modules() -> None:
    assert cuda_ptx.MANIFEST.read_text() == cuda_ptx.manifest(MODULES), "run tests/cuda/check_ptx.py --write"


def test_there_is_one_module_per_source() -> None:
    assert sorted(map(cuda_ptx.module_name, cuda_ptx.sources())) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_obeys_the_lint(name: str) -> None:
    assert cuda_ptx.lint(name, MODULES[name]) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ((".version 3.2", ".version 7.8"), "no '.version 3.2'"),
        ((".target sm_20", ".target sm_35"), "no '.target sm_20'"),
        (("ld.global.f32", "ld.global.nc.f32"), "read-only loads"),
        ((".maxntid", ".minntid"), "no launch bounds"),
        ((".entry swiglu", ".entry swiglu_2"), "expected ['swiglu']"),
    ],
)
def test_lint_finds(change: tuple[str, str], fault: str) -> None:
    assert change[0] in MODULES["swiglu"]
    assert any(fault in found for found in cuda_ptx.lint("swiglu", MODULES["swiglu"].replace(*change)))


@pytest.mark.parametrize("source", cuda_ptx.sources(), ids=cuda_ptx.module_name)
def test_compiling_again_gives_the_same_bytes(source: Path) -> None:
    version = cuda_ptx.compiler_version()
    if version != cuda_ptx.COMPILER_VERSION:
        pytest.skip(f"needs {cuda_ptx.COMPILER_VERSION}; {cuda_ptx.COMPILER} is {version or 'not installed'}")
    assert cuda_ptx.compile_source(source) == MODULES[cuda_ptx.module_name(source)]


@pytest.mark.parametrize("name", NAMES)
def test_a_current_ptxas_finds_every_instruction_legal(name: str) -> None:
    ptxas = cuda_ptx.find_ptxas()
    if ptxas is None:
        pytest.skip("no current ptxas: pip install nvidia-cuda-nvcc")
    assert cuda_ptx.check_legality(ptxas, name, MODULES[name]) == []


@pytest.mark.parametrize("name", cuda_ptx.for_fermi(MODULES))
def test_real_fermi_code_fits_the_card(name: str) -> None:
    library = fermi_assembler.find_library(os.environ)
    if library is None:
        pytest.skip("no assembler of driver 390: install libnvidia-legacy-390xx-ptxjitcompiler1 or set FERMI_JIT")
    usage = cuda_ptx.parse_usage(fermi_assembler.assemble(library, MODULES[name]).log)
    assert sorted(usage) == cuda_ptx.kernels_of(name)
    assert cuda_ptx.check_usage(usage) == []
