"""Compiles, lints and fingerprints the PTX of cuda_src/, and assembles it for a real Fermi card.

Owns the compiler command, the rules that the text must obey, and the manifest beside the committed PTX.

The PTX is made by one pinned compiler, since another version allots registers differently. What it may contain is
checked three times: by this module's lint, by a current ptxas (which refuses what ``.target sm_20`` does not allow),
and by the assembler of the last driver for Fermi cards, whose register and spill counts are the true ones.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cuda_emulator import CUDA_SOURCES, kernel_names

PTX = CUDA_SOURCES / "ptx"
MANIFEST = PTX / "manifest.json"
BLOCKS = CUDA_SOURCES.parent / "simd_src" / "blocks.h"

COMPILER = "clang++-19"
COMPILER_VERSION = "Debian clang version 19.1.7 (3~deb12u1)"
FLAGS = (
    "-x", "cuda", "--cuda-device-only", "-nocudainc", "-nocudalib",
    "--cuda-path=/nonexistent",  # or an installed toolkit would raise .version beyond what driver 390 takes
    "-std=c++17", "-O3", "-ffp-contract=off", "-Wall", "-Werror", "-S",
)  # fmt: skip
TARGETS = {"sm_20": "3.2", "sm_80": "7.0"}
"""PTX version of each target. sm_20 is every kernel; the others are folders of forms for newer cards."""

MAX_REGISTERS = 63
MAX_SHARED_BYTES = 48 * 1024
SPILL_BUDGET_BYTES = {
    "attention_causal_256": 328,  # of two forms, for both kinds of pages; 8 instructions of it in an inner loop
    "attention_full_12": 68,  # these all outside their inner loops
    "attention_full_72": 24,
    "gated_delta_scan_128": 128,
    "gated_delta_scan_32": 136,
    "gated_delta_scan_16": 112,
}
"""Spill stores plus loads that a kernel may have, in bytes of code per thread; 0 if it is not named."""


FORBIDDEN = {
    r"\.nc\b": "read-only loads need sm_32",
    r"\bshfl\b": "shuffles need sm_30",
    r"\bdp[24]a\b": "integer dot products need sm_61",
    r"\bvadd4\b": "refused by newer drivers below sm_30",
    r"\.f64\b": "double precision runs at half rate or less and nothing here needs it",
    r"\b(cp\.async|wmma|mma|redux|nanosleep)\b": "needs a much newer card",
    r"\bcall\b": "a call is a function that was not inlined",
}


class PtxError(Exception):
    """A source does not compile, or PTX breaks a rule; the message says which file and why."""


def sources() -> list[Path]:
    """The .cu files, one PTX module each: those for Fermi, then those for newer cards."""
    return [*sorted(CUDA_SOURCES.glob("*.cu")), *sorted(CUDA_SOURCES.glob("sm_*/*.cu"))]


def module_name(source: Path) -> str:
    """`rope` for cuda_src/rope.cu, `sm_80/rope` for cuda_src/sm_80/rope.cu."""
    return source.relative_to(CUDA_SOURCES).with_suffix("").as_posix()


def target(name: str) -> str:
    """The target of a module."""
    return name.rpartition("/")[0] or "sm_20"


def kernels_of(name: str) -> list[str]:
    """The kernels of a module; a form for newer cards has those of its namesake."""
    return sorted(kernel_names(CUDA_SOURCES / f"{name.rpartition('/')[2]}.cu"))


def compiler_version() -> str | None:
    """First line of the pinned compiler's --version, or None where it is not installed."""
    if shutil.which(COMPILER) is None:
        return None
    return subprocess.run([COMPILER, "--version"], check=True, capture_output=True, text=True).stdout.splitlines()[0]


def compile_source(source: Path) -> str:
    """The PTX text of one .cu file."""
    card = target(module_name(source))
    flags = (*FLAGS, f"--cuda-gpu-arch={card}", f"--cuda-feature=+ptx{TARGETS[card].replace('.', '')}")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.ptx"
        command = [COMPILER, *flags, source.name, "-o", str(out)]
        result = subprocess.run(command, cwd=source.parent, capture_output=True, text=True)
        if result.returncode:
            raise PtxError(f"{module_name(source)} does not compile:\n{result.stderr}")
        return out.read_text()


def source_hash() -> str:
    """SHA-256 over the names and contents of everything that the PTX is made from, and over the compiler command."""
    digest = hashlib.sha256()
    headers = [*CUDA_SOURCES.glob("*.h"), *CUDA_SOURCES.rglob("*.cuh"), BLOCKS]
    for path in sorted([*sources(), *headers], key=lambda path: path.relative_to(CUDA_SOURCES.parent).as_posix()):
        digest.update(f"{path.relative_to(CUDA_SOURCES.parent).as_posix()}\n".encode() + path.read_bytes())
    digest.update("\n".join([COMPILER_VERSION, *FLAGS, *(f"{card} {ptx}" for card, ptx in TARGETS.items())]).encode())
    return digest.hexdigest()


def manifest(modules: dict[str, str]) -> str:
    """The manifest text for PTX ``modules`` (name -> text)."""
    content = {
        "compiler": COMPILER_VERSION,
        "flags": list(FLAGS),
        "targets": TARGETS,
        "sources_sha256": source_hash(),
        "ptx_sha256": {name: hashlib.sha256(text.encode()).hexdigest() for name, text in sorted(modules.items())},
    }
    return json.dumps(content, indent=1) + "\n"


def committed() -> dict[str, str]:
    """The PTX modules in the repository, by name."""
    return {path.relative_to(PTX).with_suffix("").as_posix(): path.read_text() for path in sorted(PTX.rglob("*.ptx"))}


def for_fermi(modules: dict[str, str]) -> dict[str, str]:
    """Those that a Fermi card loads."""
    return {name: text for name, text in modules.items() if target(name) == "sm_20"}


def lint(name: str, text: str) -> list[str]:
    """Everything in a module that a Fermi card, its last driver or the emulation could not be trusted with."""
    faults = [
        f"{name}: no '{directive}'"
        for directive in (f".version {TARGETS[target(name)]}", f".target {target(name)}", ".address_size 64")
        if not re.search(rf"^{re.escape(directive)}\b", text, re.MULTILINE)
    ]
    for pattern, reason in FORBIDDEN.items():
        if target(name) == "sm_20" and (found := re.search(pattern, text)):
            faults.append(f"{name}: '{found[0]}': {reason}")
    entries = re.findall(r"\.entry (\w+)\((.*?)\)(.*?)\{", text, re.DOTALL)
    expected = kernels_of(name)
    if sorted(entry for entry, _, _ in entries) != expected:
        faults.append(f"{name}: kernels {sorted(entry for entry, _, _ in entries)}, expected {expected}")
    for entry, _, directives in entries:
        if not re.search(r"\.maxntid \d+", directives):
            faults.append(f"{name}: kernel {entry} has no launch bounds")
    return faults


@dataclass(frozen=True)
class Usage:
    """What the assembler gave a kernel: registers per thread, bytes of shared memory and of spill traffic."""

    registers: int
    shared_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


def parse_usage(log: str) -> dict[str, Usage]:
    """Kernel -> usage from the verbose log of any ptxas."""
    usage: dict[str, Usage] = {}
    kernel, spills = "", (0, 0)
    for line in log.splitlines():
        if found := re.search(r"entry function '(\w+)'", line):
            kernel, spills = found[1], (0, 0)
        elif found := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spills = int(found[1]), int(found[2])
        elif found := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            usage[kernel] = Usage(int(found[1]), int(shared[1]) if shared else 0, *spills)
    return usage


def check_usage(usage: dict[str, Usage]) -> list[str]:
    """Kernels beyond a Fermi card's registers or shared memory, or beyond their spill budget."""
    faults = []
    for kernel, used in usage.items():
        if used.registers > MAX_REGISTERS:
            faults.append(f"{kernel}: {used.registers} registers, at most {MAX_REGISTERS} exist")
        if used.shared_bytes > MAX_SHARED_BYTES:
            faults.append(f"{kernel}: {used.shared_bytes} B of shared memory, at most {MAX_SHARED_BYTES} exist")
        spills, budget = used.spill_store_bytes + used.spill_load_bytes, SPILL_BUDGET_BYTES.get(kernel, 0)
        if spills > budget:
            faults.append(f"{kernel}: spills {spills} B, the budget is {budget} B")
    return faults


def find_ptxas() -> Path | None:
    """A current ptxas: that of the pip package nvidia-cuda-nvcc in this environment, or one on PATH."""
    for folder in map(Path, sys.path):
        for found in sorted(folder.glob("nvidia/*/bin/ptxas")):
            return found
    on_path = shutil.which("ptxas")
    return Path(on_path) if on_path else None


def check_legality(ptxas: Path, name: str, text: str) -> list[str]:
    """What a current ptxas finds wrong with a module; it holds every instruction against the module's target."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in.ptx"
        source.write_text(text)
        card = "sm_75" if target(name) == "sm_20" else target(name)  # it assembles for nothing older
        command = [str(ptxas), f"-arch={card}", str(source), "-o", str(Path(folder) / "out.cubin")]
        result = subprocess.run(command, capture_output=True, text=True)
        return [f"{name}: {result.stderr.strip()}"] if result.returncode else []
