"""Every CUDA kernel, run on the CPU one fiber per thread, against float64 references."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cuda_cases import SMALL, Case
from cuda_emulator import CUDA_SOURCES, EMULATION, Emulator, build, kernel_names

ORDERS = {"forward": 0, "backward": 1, "shuffled": 7}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_matches_float64(library: Path, case: Case, order: int) -> None:
    for check in case.run(Emulator(library, order), np.random.default_rng(1)):
        assert check.error <= 1.0, f"{check.kernel}: {check.error:.3g} of its bound"


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_is_independent_of_thread_order(library: Path, case: Case) -> None:
    runs = [
        [check.got.tobytes() for check in case.run(Emulator(library, order), np.random.default_rng(2))]
        for order in ORDERS.values()
    ]
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.slow
def test_no_access_beyond_an_array_and_no_undefined_behaviour(tmp_path: Path) -> None:
    sanitized = build(tmp_path, sanitize=True)
    runtime = subprocess.run(["gcc", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True).stdout
    environment = os.environ | {
        "LD_PRELOAD": runtime.strip(),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",  # fibers switch stacks
    }
    command = [sys.executable, str(Path(__file__).with_name("run_cases.py")), str(sanitized)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]


def test_every_kernel_has_a_case(library: Path) -> None:
    emulator = Emulator(library)
    launched: set[str] = set()

    class Recorder:
        upload, download = staticmethod(emulator.upload), staticmethod(emulator.download)

        def launch(self, kernel: str, grid: tuple[int, int], threads: int, *arguments: object) -> None:
            launched.add(kernel)
            emulator.launch(kernel, grid, threads, *arguments)

    for case in SMALL:
        list(case.run(Recorder(), np.random.default_rng(1)))
    assert launched == {name for source in CUDA_SOURCES.glob("*.cu") for name in kernel_names(source)}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("if (threadIdx.x == 0) return; __syncthreads();", "was missed by 1 threads"),
        ("if (threadIdx.x == 0) __syncthreads();\nelse __syncthreads();", "wait at different barriers"),
    ],
    ids=["returned", "divergent"],
)
def test_emulation_reports_a_broken_barrier(tmp_path: Path, body: str, message: str) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text(
        f'#include "fermi.h"\nextern "C" __global__ void broken() {{\n{body}\n}}\nEMU_KERNEL(broken)\n'
        "int main() { unsigned grid[2] = {1, 1}; emu_broken(grid, 4, nullptr); }\n"
    )
    program = tmp_path / "broken"
    includes = [f"-I{EMULATION}", f"-I{CUDA_SOURCES}"]
    flags = ["-std=c++17", "-DFERMION_EMU", "-mf16c", "-w", *includes]
    subprocess.run(["g++", *flags, str(source), str(EMULATION / "cuda_emu.cpp"), "-o", str(program)], check=True)
    result = subprocess.run([str(program)], capture_output=True, text=True)
    assert result.returncode != 0
    assert re.search(message, result.stderr)


def test_emulation_shows_reads_of_unwritten_shared_memory_and_missing_barriers(tmp_path: Path) -> None:
    source = tmp_path / "racy.cpp"
    source.write_text(
        '#include "fermi.h"\n#include <cstdio>\nextern "C" void emu_set_order(unsigned);\n'
        'extern "C" __global__ void racy(float *y) {\n  __shared__ float s[4];\n'
        "  s[threadIdx.x] = threadIdx.x;\n  y[threadIdx.x] = s[3 - threadIdx.x];\n}\nEMU_KERNEL(racy)\n"
        "int main() {\n  unsigned grid[2] = {1, 1};\n  for (unsigned order = 0; order < 2; ++order) {\n"
        "    float y[4], *p = y;\n    void *arguments[1] = {&p};\n    emu_set_order(order);\n"
        '    emu_racy(grid, 4, arguments);\n    printf("%g %g %g %g\\n", y[0], y[1], y[2], y[3]);\n  }\n}\n'
    )
    program = tmp_path / "racy"
    flags = ["-std=c++17", "-DFERMION_EMU", "-mf16c", "-w", f"-I{EMULATION}", f"-I{CUDA_SOURCES}"]
    subprocess.run(["g++", *flags, str(source), str(EMULATION / "cuda_emu.cpp"), "-o", str(program)], check=True)
    lines = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.splitlines()
    assert "nan" in lines[0]
    assert "nan" in lines[1]
    assert lines[0] != lines[1]
