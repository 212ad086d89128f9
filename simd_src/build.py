"""Builds the extension module engine._simd from every simd_src/*.c; used by setup.py.

Owns which compiler flags a file gets, and the Python binding. Conventions, so that a new file needs no change here:

* `<name>_<tier>.c` is compiled with that tier's instruction set (TIER_FLAGS); everything else with the x86-64 baseline
  (SSE2), so it runs on any CPU. Tier files are reached through run-time dispatch only.
* `<name>_api.h` holds plain C declarations and no preprocessor lines but an include guard: C includes it, cffi parses
  it. They are read in alphabetical order, so a header may use types of an earlier one.

Objects are compiled in parallel and again only when their source, a header they include, or their command changed.
The environment's CC, CFLAGS and LDFLAGS are honoured (sanitizers, debug builds); no flag depends on the build machine.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from cffi import FFI
from setuptools import Extension
from setuptools.command.build_ext import build_ext

SOURCE = Path(__file__).resolve().parent
MODULE = "engine._simd"

# -ffp-contract=off: the compiler must not fuse a*b+c on its own, or tiers would differ where they should not.
# Never -ffast-math (it changes the whole process's float mode on load) and never -march=native.
BASE_FLAGS = ["-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-fPIC", "-pthread"]
WARNINGS = ["-Wall", "-Wextra", "-Werror"]
_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
TIER_FLAGS: dict[str, list[str]] = {
    "scalar": [],
    "ssse3": ["-mssse3"],
    "avx2": [*_AVX2],
    "avxvnni": [*_AVX2, "-mavxvnni"],
    "avx512": [
        *_AVX2,
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"),
        "-mprefer-vector-width=512",
    ],
}
# Newer than our oldest compiler (GCC 9): left out where unknown; such a file then defines its entry as absent.
OPTIONAL_FLAGS = ("-mavxvnni",)


def extension() -> Extension:
    """The extension as setuptools knows it: its name and sources (BuildNative compiles them)."""
    return Extension(MODULE, sources=[str(path.relative_to(SOURCE.parent)) for path in sorted(SOURCE.glob("*.c"))])


class BuildNative(build_ext):
    """build_ext that compiles each file with its own flags, in parallel and incrementally."""

    def build_extension(self, ext: Extension) -> None:
        """Compile and link engine._simd; stops with the compiler's messages on the first error."""
        if platform.machine() not in ("x86_64", "AMD64"):
            raise SystemExit(f"fermion's kernels need an x86-64 CPU, this machine is {platform.machine()}")
        target = Path(self.get_ext_fullpath(ext.name))
        objects = Path(self.build_temp).resolve() / "simd"
        objects.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)

        binding = _write_binding(objects)
        compiler = _compiler()
        includes = [f"-I{SOURCE}"]
        python_include = [f"-I{sysconfig.get_path('include')}"]
        jobs = [(path, [*WARNINGS, *includes, *_tier_flags(path, compiler)]) for path in sorted(SOURCE.glob("*.c"))]
        jobs.append((binding, [*includes, *python_include]))  # generated: warnings are not ours

        def compile_one(job: tuple[Path, Sequence[str]]) -> Path:
            source, flags = job
            return _compile(source, objects, [*compiler, *BASE_FLAGS, *flags, *_environment_flags("CFLAGS")])

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            built = list(pool.map(compile_one, jobs))
        link = [*compiler, "-shared", "-pthread", "-Wl,-z,noexecstack", "-Wl,-z,relro,-z,now"]
        link += [*_environment_flags("CFLAGS"), *_environment_flags("LDFLAGS")]
        if not target.exists() or any(path.stat().st_mtime >= target.stat().st_mtime for path in built):
            # Linked beside the target and renamed: a process that has the old module mapped keeps it intact.
            partial = target.with_suffix(".tmp")
            _run([*link, *map(str, built), "-lm", "-o", str(partial)])
            partial.replace(target)
        target.touch()  # newer than every source: `make` asks by date whether to come here at all


def _write_binding(directory: Path) -> Path:
    """The C source of the Python binding, made by cffi from the *_api.h headers; unchanged text is not rewritten."""
    headers = sorted(SOURCE.glob("*_api.h"))
    ffi = FFI()
    for header in headers:
        ffi.cdef(_declarations(header))
    includes = ["<stddef.h>", "<stdint.h>", *(f'"{header.name}"' for header in headers)]
    ffi.set_source(MODULE, "\n".join(f"#include {name}" for name in includes))
    path = directory / "binding.c"
    ffi.emit_c_code(str(path))
    return path


def _declarations(header: Path) -> str:
    """A header as cffi wants it: without an include guard."""
    lines = header.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.startswith("#"))


def _compile(source: Path, directory: Path, command: Sequence[str]) -> Path:
    """Compile one source unless its object is newer than everything it was made from; returns the object."""
    target = directory / f"{source.stem}.o"
    record = directory / f"{source.stem}.command"
    dependencies = directory / f"{source.stem}.d"
    full = [*command, "-MMD", "-MF", str(dependencies), "-c", str(source), "-o", str(target)]
    line = shlex.join(full)
    if _is_current(target, record, dependencies, line):
        return target
    record.unlink(missing_ok=True)
    _run(full)
    record.write_text(line, encoding="utf-8")  # last: an interrupted compile is repeated
    return target


def _is_current(target: Path, record: Path, dependencies: Path, line: str) -> bool:
    if not (target.exists() and record.exists() and dependencies.exists()):
        return False
    if record.read_text(encoding="utf-8") != line:
        return False
    inputs = shlex.split(dependencies.read_text(encoding="utf-8").replace("\\\n", " "))[1:]
    made = target.stat().st_mtime
    return all(Path(name).exists() and Path(name).stat().st_mtime <= made for name in inputs)


def _tier_flags(source: Path, compiler: Sequence[str]) -> list[str]:
    flags = TIER_FLAGS.get(source.stem.rpartition("_")[2], [])
    return [flag for flag in flags if flag not in OPTIONAL_FLAGS or _accepts(tuple(compiler), flag)]


@cache
def _accepts(compiler: tuple[str, ...], flag: str) -> bool:
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "probe.c"
        source.write_text("int probe;\n", encoding="utf-8")
        command = [*compiler, flag, "-c", str(source), "-o", str(source.with_suffix(".o"))]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _compiler() -> list[str]:
    """CC of the environment, else Python's own compiler without its flags, which may not suit old CPUs."""
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    name = shlex.split(sysconfig.get_config_var("CC") or "cc")[0]
    return [name if _exists(name) else "cc"]


def _exists(program: str) -> bool:
    return any(os.access(Path(directory) / program, os.X_OK) for directory in os.get_exec_path())


def _environment_flags(variable: str) -> list[str]:
    return shlex.split(os.environ.get(variable, ""))


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")
    if done.stderr:
        print(done.stderr, end="")
