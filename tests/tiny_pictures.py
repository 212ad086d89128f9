"""Pictures made by integer arithmetic alone: the same bytes in tests and in the generator of their vectors."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def picture(height: int, width: int, seed: int) -> npt.NDArray[np.uint8]:
    """uint8 RGB [height, width, 3] with gradients, edges and some noise in it."""
    y, x = np.mgrid[0:height, 0:width].astype(np.int64)
    channels = []
    for c in range(3):
        slope = (3 + seed) * x + (5 - 2 * c) * y + x * y // (17 + c)
        edges = 90 * ((x // (11 + seed) + y // (7 + c)) % 2)
        noise = (x * 7919 + y * 104729 + seed * 1299709 + c * 15485863) % 8191 % 23
        channels.append((slope + edges + noise) % 256)
    return np.stack(channels, axis=2).astype(np.uint8)
