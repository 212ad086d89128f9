"""The compile half of the proof that the CUDA kernels run on Fermi cards (``make check-ptx``).

    python tests/cuda/check_ptx.py            check
    python tests/cuda/check_ptx.py --write    compile all of cuda_src and rewrite cuda_src/ptx first

1. The manifest's hash matches sources, compiler and flags; every module matches its own hash.
2. With the pinned clang at hand, compiling again gives the committed bytes.
3. Lint: target, version, forbidden instructions, launch bounds.
4. With a current ptxas (pip install nvidia-cuda-nvcc, or --ptxas FILE): every instruction is legal for its target.
5. With the compiler library of driver 390.157 (Debian non-free, package libnvidia-legacy-390xx-ptxjitcompiler1, or
   FERMI_JIT=FILE): real sm_20 code, at most 63 registers and 48 KB shared memory, spills within each kernel's budget.

Steps whose tool is missing say so. The last line gives the number of kernels, the highest register count and the
spills.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import cuda_ptx
import fermi_assembler


def write() -> None:
    """Compiles every source with the pinned compiler and replaces the committed PTX and its manifest."""
    version = cuda_ptx.compiler_version()
    if version != cuda_ptx.COMPILER_VERSION:
        raise cuda_ptx.PtxError(
            f"{cuda_ptx.COMPILER} is {version}; the committed PTX is made by {cuda_ptx.COMPILER_VERSION}"
        )
    modules = {cuda_ptx.module_name(source): cuda_ptx.compile_source(source) for source in cuda_ptx.sources()}
    for stale in cuda_ptx.PTX.rglob("*.ptx"):
        stale.unlink()
    for name, text in modules.items():
        (cuda_ptx.PTX / name).parent.mkdir(parents=True, exist_ok=True)
        (cuda_ptx.PTX / f"{name}.ptx").write_text(text)
    cuda_ptx.MANIFEST.write_text(cuda_ptx.manifest(modules))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="compile and rewrite cuda_src/ptx first")
    parser.add_argument(
        "--ptxas", type=Path, help="a current ptxas (default: the one of pip's nvidia-cuda-nvcc, or PATH)"
    )
    options = parser.parse_args()
    if options.write:
        write()
    modules = cuda_ptx.committed()
    faults = []
    if cuda_ptx.MANIFEST.read_text() != cuda_ptx.manifest(modules):
        faults.append("cuda_src/ptx is older than its sources or was edited: run check_ptx.py --write")
    version = cuda_ptx.compiler_version()
    if version == cuda_ptx.COMPILER_VERSION:
        faults += [
            f"{cuda_ptx.module_name(source)}: compiling again gives other PTX"
            for source in cuda_ptx.sources()
            if cuda_ptx.compile_source(source) != modules.get(cuda_ptx.module_name(source))
        ]
    else:
        print(f"not recompiled: {cuda_ptx.COMPILER} is {version or 'not installed'}")
    for name, text in modules.items():
        faults += cuda_ptx.lint(name, text)

    ptxas = options.ptxas or cuda_ptx.find_ptxas()
    if ptxas is None:
        print("legality not checked by a current ptxas: none found (pip install nvidia-cuda-nvcc)")
    else:
        for name, text in modules.items():
            faults += cuda_ptx.check_legality(ptxas, name, text)

    summary = "registers and spills unknown (no assembler of driver 390)"
    library = fermi_assembler.find_library(os.environ)
    if library is not None:
        usage: dict[str, cuda_ptx.Usage] = {}
        for name, text in cuda_ptx.for_fermi(modules).items():
            try:
                usage |= cuda_ptx.parse_usage(fermi_assembler.assemble(library, text).log)
            except fermi_assembler.AssemblerError as error:
                faults.append(f"{name}: {error}")
        faults += cuda_ptx.check_usage(usage)
        for kernel, used in sorted(usage.items()):
            print(
                f"{kernel:24s} {used.registers:3d} registers {used.shared_bytes:6d} B shared "
                f"{used.spill_store_bytes:4d} B spill stores {used.spill_load_bytes:4d} B spill loads"
            )
        spilling = {kernel: used for kernel, used in usage.items() if used.spill_store_bytes + used.spill_load_bytes}
        total = sum(used.spill_store_bytes + used.spill_load_bytes for used in spilling.values())
        summary = f"highest register count {max(used.registers for used in usage.values())}, spills {total} B"
        summary += f" in {len(spilling)} kernels ({', '.join(sorted(spilling))})" if spilling else ""
    for fault in faults:
        print(f"FAULT {fault}")
    fermi = cuda_ptx.for_fermi(modules)
    kernels, newer = (sum(text.count(".entry ") for text in group) for group in (
        fermi.values(), (text for name, text in modules.items() if name not in fermi)
    ))  # fmt: skip
    print(f"{'FAILED' if faults else 'ok'}: {kernels} kernels (and {newer} for newer cards), {summary}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
