"""Pictures as the vision tower reads them: file bytes to RGB pixels of the right size, and their digest.

What is accepted is decided by the first bytes of a file, and its dimensions are checked before anything is decoded.
The pixels equal those of the model family's published image processor, bit for bit: resizing is its antialiased bicubic
in integers (Keys' cubic convolution with a = -1/2, IEEE ASSP 29 (1981)), columns first, rounded to bytes after each
axis. Decoding runs within the libraries behind Pillow, of which only the five accepted formats are ever started.
"""

from __future__ import annotations

import hashlib
import io
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import BmpImagePlugin, GifImagePlugin, Image, ImageFile, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from engine.config import VisionConfig
from engine.core import ImageSpan, UInt8Array
from engine.errors import ConfigError, RequestError
from engine.json_file import read_json_object

FILE_NAME = "preprocessor_config.json"

MAX_SOURCE_PIXELS = 64 << 20
"""Most pixels of a picture before it is resized: a decoded one takes 4 bytes for each."""
MAX_RATIO = 200
"""Most that one side may be longer than the other."""

ACCEPTED = "PNG, JPEG, WebP, GIF and BMP are accepted"

# Passes over the picture that a JPEG may ask for: encoders make about ten, and each costs as much as a whole picture.
_MAX_JPEG_SCANS = 100
# Rows that are converted and resized at once.
_BAND = 256
_SUPPORT = 2.0  # half the width of the cubic
_MAX_FILE_BYTES = 1 << 20


class Detail(StrEnum):
    """How closely a picture is looked at. LOW: at most LOW_PIXELS; HIGH: as far as the limits allow."""

    LOW = "low"
    HIGH = "high"


LOW_PIXELS = 512 * 512


class PictureError(RequestError):
    """A picture cannot be read; the text says why. `code` is "invalid_image" or "image_too_large"."""


@dataclass(frozen=True, slots=True)
class PreprocessorConfig:
    """Sizes from preprocessor_config.json.

    patch_size: side of a patch in pixels; merge_size: patches a side that make one token; min_pixels, max_pixels:
    limits of the area after resizing.
    """

    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int

    @property
    def factor(self) -> int:
        """Pixels a side of one token: sides after resizing are multiples of it."""
        return self.patch_size * self.merge_size

    @staticmethod
    def load(directory: Path, vision: VisionConfig) -> PreprocessorConfig:
        """From `directory`/preprocessor_config.json, checked against the tower it feeds.

        ModelFileError: the file is missing or not JSON; ConfigError: it asks for something that is not computed.
        """
        path = directory / FILE_NAME
        return parse_preprocessor_config(path, read_json_object(path, _MAX_FILE_BYTES), vision)


# Keys whose only value here is the one that is computed; absent means that value.
_FIXED: Mapping[str, object] = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "resample": 3,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def parse_preprocessor_config(path: Path, values: Mapping[str, Any], vision: VisionConfig) -> PreprocessorConfig:
    """From the content of the file; `path` is for messages. ConfigError as for `PreprocessorConfig.load`."""
    for key, only in _FIXED.items():
        if values.get(key, only) != only:
            raise ConfigError(f"{path}: {key} is {values[key]!r}, expected {only!r}, the only value that is computed")
    for key, built in (
        ("patch_size", vision.patch_size),
        ("merge_size", vision.spatial_merge_size),
        ("temporal_patch_size", vision.temporal_patch_size),
    ):
        if values.get(key) != built:
            raise ConfigError(f"{path}: {key} is {values.get(key)!r}, expected {built}, as in vision_config")
    size = values.get("size")
    size = size if isinstance(size, dict) else {}
    config = PreprocessorConfig(
        vision.patch_size,
        vision.spatial_merge_size,
        _area(path, values, "min_pixels", size, "shortest_edge"),
        _area(path, values, "max_pixels", size, "longest_edge"),
    )
    if not config.factor**2 <= config.max_pixels or config.min_pixels > config.max_pixels:
        raise ConfigError(
            f"{path}: an area of {config.min_pixels} to {config.max_pixels} pixels, expected limits in order that "
            f"admit at least {config.factor} x {config.factor}"
        )
    return config


def _area(path: Path, values: Mapping[str, Any], key: str, size: Mapping[str, Any], edge: str) -> int:
    """An area in pixels. The newer form keeps it under `size`, in keys that are called edges; an older key wins."""
    name, value = (key, values[key]) if values.get(key) is not None else (f"size.{edge}", size.get(edge))
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_SOURCE_PIXELS:
        raise ConfigError(f"{path}: {name} is {value!r}, expected a number of pixels in 1..{MAX_SOURCE_PIXELS}")
    return value


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture ready for the tower. pixels: uint8 RGB [height, width, 3], read-only; tokens: placeholders it takes;
    digest: SHA-256 over mode, size and pixels."""

    pixels: UInt8Array
    tokens: int
    digest: bytes

    def span(self, start: int) -> ImageSpan:
        """This picture at token `start` of a prompt."""
        return ImageSpan(start, self.tokens, self.pixels, self.digest)


def fit(height: int, width: int, config: PreprocessorConfig, max_pixels: int) -> tuple[int, int]:
    """Height and width that a picture is resized to: multiples of the factor with nearly the same ratio.

    The area is within config.min_pixels and max_pixels as far as whole factors allow (the published processor's rule).
    """
    factor = config.factor
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif rows * columns < config.min_pixels:
        grow = math.sqrt(config.min_pixels / (height * width))
        rows = math.ceil(height * grow / factor) * factor
        columns = math.ceil(width * grow / factor) * factor
    return rows, columns


def load_picture(
    data: bytes, config: PreprocessorConfig, *, detail: Detail = Detail.HIGH, max_pixels: int | None = None
) -> Picture:
    """The picture in a file's bytes, as the tower reads it.

    max_pixels: a lower limit of the area than the checkpoint's, never below its minimum. Blocks for the time of
    decoding, mostly without the interpreter lock. PictureError: the file is of another format, too large, or broken.
    """
    kind = _kind(data)
    if kind is _Kind.WEBP:
        # This format's reader makes room for the whole canvas when it is opened.
        _check_dimensions(*_webp_size(data))
    try:
        image = _READERS[kind](io.BytesIO(data))
    except Exception as error:  # readers raise what their parsing happens to raise
        raise _broken(kind, "its header cannot be read") from error
    with image:
        _check_dimensions(*image.size)
        if kind is _Kind.BMP and any(tile[0] == "bmp_rle" for tile in image.tile):
            raise PictureError("The picture is a run-length encoded BMP; only plain ones are read.", code=_INVALID)
        if kind is _Kind.JPEG and data.count(b"\xff\xda") > _MAX_JPEG_SCANS:
            raise PictureError(f"The JPEG has more than {_MAX_JPEG_SCANS} scans.", code=_INVALID)
        try:
            image.load()
            upright = _upright(image)
        except MemoryError:
            raise
        except Exception as error:
            raise _broken(kind, "it is truncated or damaged") from error
        limit = min(config.max_pixels, LOW_PIXELS if detail is Detail.LOW else config.max_pixels)
        if max_pixels is not None:
            limit = min(limit, max_pixels)
        rows, columns = fit(upright.height, upright.width, config, max(limit, config.min_pixels))
        pixels = _resized(upright, rows, columns)
    pixels.flags.writeable = False
    digest = hashlib.sha256(b"RGB" + struct.pack("<II", rows, columns))
    digest.update(pixels.data)
    return Picture(pixels, (rows // config.factor) * (columns // config.factor), digest.digest())


_INVALID = "invalid_image"
_TOO_LARGE = "image_too_large"


class _Kind(StrEnum):
    """Formats that are decoded."""

    PNG = "PNG"
    JPEG = "JPEG"
    WEBP = "WebP"
    GIF = "GIF"
    BMP = "BMP"


_READERS: Mapping[_Kind, Callable[[io.BytesIO], ImageFile.ImageFile]] = {
    _Kind.PNG: PngImagePlugin.PngImageFile,
    _Kind.JPEG: JpegImagePlugin.JpegImageFile,
    _Kind.WEBP: WebPImagePlugin.WebPImageFile,
    _Kind.GIF: GifImagePlugin.GifImageFile,
    _Kind.BMP: BmpImagePlugin.BmpImageFile,
}

_ACCEPTED_STARTS = (
    (b"\x89PNG\r\n\x1a\n", _Kind.PNG),
    (b"\xff\xd8\xff", _Kind.JPEG),
    (b"GIF87a", _Kind.GIF),
    (b"GIF89a", _Kind.GIF),
    (b"BM", _Kind.BMP),
)
# What is known in order to be refused by name.
_REFUSED_STARTS = (
    (b"II*\0", "a TIFF"),
    (b"MM\0*", "a TIFF"),
    (b"II+\0", "a TIFF"),
    (b"MM\0+", "a TIFF"),
    (b"\0\0\x01\0", "an icon"),
    (b"\xff\x0a", "a JPEG XL"),
    (b"\0\0\0\x0cJXL ", "a JPEG XL"),
    (b"\0\0\0\x0cjP  ", "a JPEG 2000"),
    (b"\xff\x4f\xff\x51", "a JPEG 2000"),
    (b"8BPS", "a Photoshop file"),
    (b"%PDF", "a PDF"),
    (b"RIFF", "a RIFF file"),
    (b"\x1aE\xdf\xa3", "a video"),
)
_BRANDS = {b"avi": "an AVIF", b"hei": "a HEIC", b"hev": "a HEIC", b"mif": "a HEIC", b"msf": "a HEIC"}


def _kind(data: bytes) -> _Kind:
    """The format by its first bytes; labels lie."""
    if not data:
        raise PictureError("The picture is empty.", code=_INVALID)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _Kind.WEBP
    for start, kind in _ACCEPTED_STARTS:
        if data.startswith(start):
            return kind
    raise PictureError(f"The data is {_foreign(data)}, not a picture that is read here: {ACCEPTED}.", code=_INVALID)


def _foreign(data: bytes) -> str:
    if data[4:8] == b"ftyp":
        return _BRANDS.get(data[8:11], "a video")
    for start, name in _REFUSED_STARTS:
        if data.startswith(start):
            return name
    head = data[:1024].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if b"<svg" in head:
        return "an SVG"
    if head.startswith((b"<!doctype html", b"<html")):
        return "an HTML page"
    return "of no known format"


def _check_dimensions(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise PictureError(f"The picture has {width} x {height} pixels.", code=_INVALID)
    if width * height > MAX_SOURCE_PIXELS:
        raise PictureError(
            f"The picture has {width} x {height} pixels; at most {MAX_SOURCE_PIXELS} are read.", code=_TOO_LARGE
        )
    if max(width, height) > MAX_RATIO * min(width, height):
        raise PictureError(
            f"The picture has {width} x {height} pixels; one side may be at most {MAX_RATIO} times the other.",
            code=_INVALID,
        )


def _webp_size(data: bytes) -> tuple[int, int]:
    """Width and height from the first chunk (RFC 9649, sections 2.5 to 2.7)."""
    chunk, body = data[12:16], data[20:30]
    if len(body) == 10:
        if chunk == b"VP8X":
            return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
        if chunk == b"VP8L" and body[0] == 0x2F:
            bits = int.from_bytes(body[1:5], "little")
            return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        if chunk == b"VP8 " and body[3:6] == b"\x9d\x01\x2a":
            width, height = struct.unpack_from("<HH", body, 6)
            return width & 0x3FFF, height & 0x3FFF
    raise _broken(_Kind.WEBP, "its header cannot be read")


def _broken(kind: _Kind, what: str) -> PictureError:
    return PictureError(f"The {kind} picture cannot be decoded: {what}.", code=_INVALID)


_ORIENTATION = 0x0112
_TURNS: Mapping[int, Image.Transpose] = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def _upright(image: Image.Image) -> Image.Image:
    """The picture as its EXIF orientation wants it seen. Unreadable EXIF is none."""
    try:
        orientation = image.getexif().get(_ORIENTATION)
    except Exception:
        return image
    turn = _TURNS.get(orientation) if isinstance(orientation, int) else None
    return image if turn is None else image.transpose(turn)


def _rgb(image: Image.Image) -> UInt8Array:
    """uint8 [height, width, 3]. Transparent pixels lie on white; of 16 bits the upper 8 count."""
    if image.mode.startswith("I"):
        grey = (np.asarray(image).astype(np.int64).clip(0, 0xFFFF) >> 8).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    return np.asarray(image if image.mode == "RGB" else image.convert("RGB"))


def _resized(image: Image.Image, rows: int, columns: int) -> UInt8Array:
    """uint8 RGB [rows, columns, 3]. Band by band, so that beside the decoded picture only little is held."""
    narrowed = np.empty((image.height, columns, 3), np.uint8)
    for top in range(0, image.height, _BAND):
        bottom = min(top + _BAND, image.height)
        band = _rgb(image.crop((0, top, image.width, bottom)))
        turned = np.ascontiguousarray(band.transpose(1, 0, 2)).reshape(image.width, -1)
        narrowed[top:bottom] = _resample(turned, columns).reshape(columns, -1, 3).transpose(1, 0, 2)
    return _resample(narrowed.reshape(image.height, -1), rows).reshape(rows, columns, 3)


@dataclass(frozen=True, slots=True)
class _Taps:
    """How output samples are made: out[i] = sum over k of weights[i, k] * in[first[i] + k], over 2^precision."""

    first: npt.NDArray[np.int64]
    weights: npt.NDArray[np.int32]
    precision: int


def _taps(size: int, target: int) -> _Taps:
    """Sample positions are pixel centres; when shrinking, the cubic is as wide as `size` / `target` of its own.

    Weights of one output sum to 1 before they are rounded, halves away from zero, to the finest binary fraction at
    which the largest of all still fits 15 bits.
    """
    scale = size / target
    stretch = max(scale, 1.0)
    support = _SUPPORT * stretch
    centre = scale * (np.arange(target) + 0.5)
    first = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    count = np.minimum((centre + support + 0.5).astype(np.int64), size) - first
    offset = np.arange(int(count.max()))
    weights = _cubic((offset + first[:, None] - centre[:, None] + 0.5) * (1.0 / stretch))
    weights[offset >= count[:, None]] = 0.0
    weights /= weights.sum(axis=1, keepdims=True)
    largest = float(weights.max())
    precision = next(bits for bits in range(23) if bits == 22 or int(0.5 + largest * (1 << (bits + 1))) >= 1 << 15)
    scaled = weights * (1 << precision)
    return _Taps(first, np.trunc(scaled + np.copysign(0.5, scaled)).astype(np.int32), precision)


def _cubic(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Keys' interpolation kernel with a = -1/2."""
    x = np.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _resample(lines: UInt8Array, target: int) -> UInt8Array:
    """uint8 [n, m] to [target, m], each column on its own."""
    size, width = lines.shape
    if size == target:
        return lines
    taps = _taps(size, target)
    out = np.empty((target, width), np.uint8)
    # Few enough lines at once that the sums stay in the processor's cache.
    step = max(1, (1 << 16) // width)
    for start in range(0, target, step):
        block = slice(start, start + step)
        first, weights = taps.first[block], taps.weights[block]
        total = np.full((len(first), width), 1 << taps.precision >> 1, np.int32)
        for k in range(weights.shape[1]):
            # Past the last line weights are zero.
            total += lines[np.minimum(first + k, size - 1)] * weights[:, k, None]
        np.right_shift(total, taps.precision, out=total)
        out[block] = np.clip(total, 0, 255, out=total)
    return out
