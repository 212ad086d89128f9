#!/bin/sh
# What the CPU image is made of, as a script: `docker build` runs it, and so can you on a machine without Docker.
#   docker/cpu-install.sh PREFIX
# installs fermion with its locked packages into PREFIX (made, must not exist) from this checkout, which it leaves as
# it was. Needs python3 (3.11 or newer) with venv and headers, and a C compiler. PYTHON names another interpreter.
set -eu

prefix=${1:?usage: cpu-install.sh PREFIX}
source=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
[ ! -e "$prefix" ] || { echo "cpu-install.sh: $prefix exists already" >&2; exit 2; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m venv "$prefix"
"$prefix/bin/python" -m pip --disable-pip-version-check install --quiet --no-cache-dir --no-compile \
    --require-hashes --only-binary :all: -r "$source/requirements/base.txt"

# A build leaves files beside the sources, so it gets its own copy of what the package needs.
mkdir "$work/source"
for part in pyproject.toml setup.py README.md LICENSE server engine prefix_cache simd_src cuda_src; do
    cp -R "$source/$part" "$work/source/"
done
find "$work/source" \( -name '__pycache__' -o -name '_simd*.so' \) -prune -exec rm -rf {} +
"$prefix/bin/python" -m pip --disable-pip-version-check install --quiet --no-cache-dir --no-compile \
    --no-deps --no-build-isolation --no-index "$work/source"

# Nothing is installed into the image later: pip, and what only builds need, are dead weight.
"$prefix/bin/python" -m pip --disable-pip-version-check uninstall --quiet --yes setuptools pip
find "$prefix" -name 'tests' -path '*/numpy/*' -prune -exec rm -rf {} +
