"""Builds the native extension: one object per C source, each with the flags of its instruction set (simd_src/build.py)."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "simd_src"))

import build as simd  # noqa: E402

BINDING = ROOT / "build" / "_simd.c"


class BuildKernels(build_ext):
    """Compiles the kernels in parallel, skips what is up to date, and links them into the cffi binding."""

    def build_extension(self, ext: Extension) -> None:
        objects = self._compile_kernels()
        ext.extra_objects = [*ext.extra_objects, *objects]
        ext.depends = [*ext.depends, *objects]  # setuptools links again only for what is named here
        super().build_extension(ext)

    def _compile_kernels(self) -> list[str]:
        objects = Path(self.build_temp) / "kernels"
        objects.mkdir(parents=True, exist_ok=True)
        headers = [*simd.SOURCE_DIR.glob("*.h"), simd.SOURCE_DIR / "build.py", ROOT / "setup.py"]
        newest_header = max(path.stat().st_mtime for path in headers)

        def compile_one(source: Path) -> str:
            target = objects / f"{source.stem}.o"
            if not target.exists() or target.stat().st_mtime < max(source.stat().st_mtime, newest_header):
                made = self.compiler.compile(
                    [os.path.relpath(source)], output_dir=str(objects), extra_postargs=simd.flags(source)
                )
                Path(made[0]).replace(target)
            return str(target)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(compile_one, simd.sources()))


def extension() -> Extension:
    """The cffi binding, generated only when the declarations changed."""
    BINDING.parent.mkdir(exist_ok=True)
    simd.make_ffi().emit_c_code(str(BINDING))
    return Extension(
        simd.MODULE,
        sources=[os.path.relpath(BINDING, ROOT)],
        include_dirs=[str(simd.SOURCE_DIR)],
        depends=[str(path) for path in simd.api_headers()],
        libraries=["m", "pthread"],
    )


setup(ext_modules=[extension()], cmdclass={"build_ext": BuildKernels})
