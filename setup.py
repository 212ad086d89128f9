"""Packaging entry: all metadata is in pyproject.toml; this adds the native extension (simd_src/build.py)."""

import importlib.util
from pathlib import Path

from setuptools import setup

# Loaded by path: a plain `import build` could find the output directory or the PyPI package of that name.
_spec = importlib.util.spec_from_file_location("simd_build", Path(__file__).parent / "simd_src" / "build.py")
simd_build = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(simd_build)

setup(ext_modules=[simd_build.extension()], cmdclass={"build_ext": simd_build.BuildNative})
