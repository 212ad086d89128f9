"""Speed that cannot rot unnoticed: instructions of one decode step and of one prefill of the SSSE3 tier, counted by
Callgrind on a small random model and compared with what they were when they were recorded here.

Counts depend on the compiler, so there is a row for each that was recorded; with another one the test is skipped and
says so. When a change makes the engine do more (or less) on purpose, record the new counts and say why in the commit:

    python tests/kernels/test_instruction_counts.py
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]  # tests/prefix_cache is no package

from tiny_models import packed_checkpoint  # noqa: E402

from engine import _simd  # noqa: E402

PROMPT, GUARD = 70, 0.03  # tokens: a whole chunk of the delta rule and some; share that a count may move
# Function whose calls are counted -> instructions in it and below it.
RECORDED: dict[str, dict[str, int]] = {
    "GCC: (Debian 12.2.0-14+deb12u1) 12.2.0": {"fm_decode": 1_007_848, "fm_pass_layers": 37_250_525},
}
PROGRAM = """
import sys
import numpy as np
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from tiny_models import load_model
model = load_model(Path(sys.argv[1]), simd_tier="ssse3")
state = model.new_state()
model.prefill(state, np.arange({prompt}, dtype=np.int32) * 37 % 258)
if sys.argv[3] == "fm_decode":
    model.decode(state, 5)
"""


def compiler() -> str:
    """What the extension was compiled with, as the compiler wrote it there."""
    found = re.search(rb"(?:GCC|clang)[: ][^\0]*", Path(_simd.__file__).read_bytes())
    return found[0].decode(errors="replace") if found else "an unknown compiler"


def count(function: str, checkpoint: Path, directory: Path) -> int:
    """Instructions between entry and exit of all calls of a function."""
    command = [
        *("valgrind", "--tool=callgrind", f"--toggle-collect={function}"),
        *(f"--callgrind-out-file={directory / function}", sys.executable),
        *("-c", PROGRAM.format(prompt=PROMPT), str(checkpoint), str(Path(__file__).parents[1]), function),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    total = re.search(r"Collected : (\d+)", done.stderr)
    assert total is not None, done.stderr[-2000:]
    return int(total[1])


@pytest.mark.parametrize("function", ["fm_decode", "fm_pass_layers"])
def test_no_more_instructions_than_were_recorded(function: str, tmp_path: Path) -> None:
    if shutil.which("valgrind") is None:
        pytest.skip("valgrind is not installed")
    if b"__asan_init" in Path(_simd.__file__).read_bytes():
        pytest.skip("a build with sanitizers executes more")
    recorded = RECORDED.get(compiler())
    if recorded is None:
        pytest.skip(f"no counts were recorded for {compiler()}")
    counted = count(function, packed_checkpoint(tmp_path / "model"), tmp_path)
    assert counted == pytest.approx(recorded[function], rel=GUARD), "see the module's first lines"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = packed_checkpoint(Path(folder) / "model")
        print(compiler(), {name: count(name, checkpoint, Path(folder)) for name in ("fm_decode", "fm_pass_layers")})
