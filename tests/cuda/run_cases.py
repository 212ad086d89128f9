"""Runs every small case on an emulation library in a process of its own; exits with 1 at the first deviation.

The sanitized library needs its runtime loaded before Python's, which only a fresh process allows.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from cuda_cases import SMALL
from cuda_emulator import Emulator


def main(library: str) -> int:
    emulator = Emulator(Path(library))
    for case in SMALL:
        for check in case.run(emulator, np.random.default_rng(1)):
            if not check.error <= 1.0:
                print(f"{case.name}: {check.kernel} deviates by {check.error} of its bound")
                return 1
    print(f"{len(SMALL)} cases passed")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
