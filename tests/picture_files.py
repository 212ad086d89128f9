"""Pictures for tests, made from whole numbers alone so that they are the same everywhere, and files that hold them."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

from engine.core import UInt8Array


def pattern(height: int, width: int, channels: int = 3, seed: int = 0) -> UInt8Array:
    """uint8 [height, width, channels]: waves, hard edges and noise, none of them a multiple of another."""
    y, x, c = np.meshgrid(
        *(np.arange(size, dtype=np.uint64) for size in (height, width, channels)), indexing="ij", sparse=True
    )
    noise = (x * 73856093 ^ y * 19349663 ^ c * 83492791 ^ np.uint64(seed * 2654435761 + 1)) * 6364136223846793005
    ramp = (x * 5 + y * 3 + c * 60) % 256
    edges = ((x // 7 + y // 11 + c) % 2) * 255
    value = np.where((noise >> 40) % 3 == 0, noise >> 56, np.where((noise >> 45) % 2 == 0, ramp, edges))
    return value.astype(np.uint8)


def encode(pixels: UInt8Array, kind: str = "PNG", **options: Any) -> bytes:
    """The file of a picture. pixels: [height, width] or [height, width, 1 to 4]."""
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    return save(Image.fromarray(pixels), kind, **options)


def save(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def data_url(data: bytes, label: str = "image/png") -> str:
    return f"data:{label};base64,{base64.b64encode(data).decode()}"


SIZES = [
    (1, 1), (1, 7), (9, 1), (1, 200), (37, 501), (301, 299), (255, 257), (64, 64), (96, 64), (480, 640), (333, 47),
    (700, 33), (128, 129), (31, 33), (500, 513), (16, 16), (48, 80), (211, 4), (1000, 701), (97, 1013),
]  # fmt: skip
AREAS = [(4096, 65536), (65536, 262144)]
MODES = ["RGB", "RGBA", "LA", "L", "1", "P", "P with a transparent colour", "L with a transparent grey"]


def mode_file(mode: str, height: int = 53, width: int = 71) -> bytes:
    """A PNG whose pixels are stored in that way."""
    options: dict[str, Any] = {}
    if mode == "L with a transparent grey":
        image = Image.fromarray(pattern(height, width, 1)[:, :, 0])
        options["transparency"] = 0
    elif mode.startswith("P"):
        image = Image.fromarray(pattern(height, width)).quantize(32, method=Image.Quantize.FASTOCTREE, dither=0)
        if mode != "P":
            options["transparency"] = bytes(range(0, 256, 8))
    elif mode == "1":
        image = Image.fromarray(pattern(height, width, 1)[:, :, 0] > 127)
    else:
        channels = len(mode)
        pixels = pattern(height, width, channels)
        image = Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
        assert image.mode == mode
    return save(image, **options)
