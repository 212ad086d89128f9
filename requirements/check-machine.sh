#!/bin/sh
# check-machine.sh PYTHON CC: can this machine build fermion? Says all that is missing at once, with the line that
# installs it on Debian and Ubuntu. PYTHON may be empty: none was found.
set -eu

python=$1
compiler=$2
missing=''

if [ -z "$python" ]; then
    echo 'error: no Python 3.11 or newer found (Debian 12 and Ubuntu 24.04 have one; or: make PYTHON=/path/to/python3)' >&2
    missing='python3 python3-venv python3-dev'
elif ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "error: $python is not Python 3.11 or newer" >&2
    exit 1
else
    "$python" -c 'import ensurepip, venv' 2>/dev/null || {
        echo "error: $python cannot make virtual environments" >&2
        missing='python3-venv'
    }
    headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    [ -f "$headers/Python.h" ] || {
        echo "error: the headers of $python (Python.h) are missing" >&2
        missing="$missing python3-dev"
    }
fi

if ! command -v "$compiler" >/dev/null; then
    echo "error: no C compiler ($compiler); or name one: make CC=clang" >&2
    missing="$missing gcc libc6-dev"
elif ! echo '#include <stdio.h>' | "$compiler" -E - >/dev/null 2>&1; then
    echo 'error: the headers of the C library are missing' >&2
    missing="$missing libc6-dev"
fi

if [ -n "$missing" ]; then
    echo "On Debian and Ubuntu: apt-get install --no-install-recommends $missing" | tr -s ' ' >&2
    exit 1
fi
