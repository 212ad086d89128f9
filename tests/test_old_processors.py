"""No instruction newer than SSE4.2 is needed anywhere, binary packages included: the server answers on an emulated
Westmere of 2010. Run once per suite, not again when another tier is forced."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from served import chat, served

QEMU = shutil.which("qemu-x86_64")
WESTMERE = [QEMU or "qemu-x86_64", "-cpu", "Westmere"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(QEMU is None, reason="needs qemu-x86_64 (apt-get install qemu-user)"),
    pytest.mark.skipif("FERMION_SIMD_TIER" in os.environ, reason="the emulated processor decides the tier"),
]


def test_the_emulation_refuses_avx(tmp_path: Path) -> None:
    """The control: without it, an emulator that runs everything would prove nothing."""
    source = tmp_path / "avx.c"
    source.write_text('int main(void) { __asm__ volatile("vxorps %ymm0, %ymm0, %ymm0"); return 0; }\n')
    program = tmp_path / "avx"
    subprocess.run(["cc", "-o", program, source], check=True)
    result = subprocess.run([*WESTMERE, program], capture_output=True, timeout=60, check=False)
    assert result.returncode != 0


def test_the_server_answers_on_a_westmere() -> None:
    command = [*WESTMERE, sys.executable, "-m", "server", "serve", "--threads", "1", "--context-length", "512"]
    with served(command, timeout_s=300) as url:
        answer = chat(url, "Hello!", timeout_s=300, max_tokens=8)
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] > 0
