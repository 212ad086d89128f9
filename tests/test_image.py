"""Pictures: pixels equal to the official processor's, and what is refused before and while it is decoded."""

from __future__ import annotations

import hashlib
import json
import resource
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from picture_files import MODES, encode, mode_file, pattern, save
from PIL import Image

from engine.config import VisionConfig
from engine.errors import ConfigError, ModelFileError
from engine.image import (
    MAX_SOURCE_PIXELS,
    Detail,
    PictureError,
    PreprocessorConfig,
    fit,
    load_picture,
    parse_preprocessor_config,
)
from server.config import DEMO_CHECKPOINT

SMALL = PreprocessorConfig(16, 2, 4096, 65536)
FULL = PreprocessorConfig(16, 2, 65536, 16777216)
VISION = VisionConfig(2, 64, 128, 4, 3, 16, 2, 2, 64, 64)
VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "vectors" / "images.json").read_text())


@pytest.mark.parametrize("entry", VECTORS["sizes"], ids=lambda entry: "-".join(map(str, entry[:4])))
def test_pixels_equal_the_official_processors(entry: list[Any]) -> None:
    least, most, height, width, rows, columns, digest = entry
    picture = load_picture(encode(pattern(height, width)), PreprocessorConfig(16, 2, least, most))
    assert picture.pixels.shape == (rows, columns, 3)
    assert hashlib.sha256(picture.pixels.data).hexdigest() == digest
    assert picture.tokens == rows * columns // 1024


@pytest.mark.parametrize("mode", MODES)
def test_every_way_of_storing_equals_the_official_conversion(mode: str) -> None:
    rows, columns, digest = VECTORS["modes"][mode]
    picture = load_picture(mode_file(mode), SMALL)
    assert picture.pixels.shape == (rows, columns, 3)
    assert hashlib.sha256(picture.pixels.data).hexdigest() == digest


@pytest.mark.parametrize(
    ("height", "width", "rows", "columns"),
    [(480, 640, 480, 640), (768, 1024, 768, 1024), (1080, 1920, 1088, 1920), (3000, 4000, 3008, 4000)],
)
def test_sizes_of_well_known_formats(height: int, width: int, rows: int, columns: int) -> None:
    assert fit(height, width, FULL, FULL.max_pixels) == (rows, columns)


def test_every_size_is_whole_tokens_within_the_limits() -> None:
    for height in [*range(1, 70), 127, 500, 4000, 20000]:
        for width in [1, 5, 31, 32, 33, 100, 999, 20000]:
            if max(height, width) <= 200 * min(height, width):
                rows, columns = fit(height, width, SMALL, SMALL.max_pixels)
                assert rows % 32 == columns % 32 == 0
                # A very long picture keeps one token of width, so that its area may be a little outside.
                assert min(rows, columns) == 32 or 4096 <= rows * columns <= 65536


def test_sixteen_bits_keep_the_upper_eight() -> None:
    wide = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64) * 16
    pixels = load_picture(save(Image.fromarray(wide)), SMALL).pixels
    assert (pixels == (wide >> 8)[:, :, None]).all()


LOSSLESS = {"PNG": {}, "WEBP": {"lossless": True}, "BMP": {}, "GIF": {}}


@pytest.mark.parametrize("kind", LOSSLESS)
def test_lossless_formats_give_the_same_picture(kind: str) -> None:
    grey = np.repeat(pattern(64, 96, 1), 3, axis=2)
    picture = load_picture(encode(grey, kind, **LOSSLESS[kind]), SMALL)
    assert (picture.pixels == grey).all()


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpeg(mode: str) -> None:
    y, x = np.mgrid[0:64, 0:96]
    smooth = Image.fromarray(np.stack([2 * x, 3 * y, 200 - x], axis=2).astype(np.uint8)).convert(mode)
    expected = np.asarray(smooth.convert("RGB")).astype(int)
    got = load_picture(save(smooth, "JPEG", quality=95), SMALL).pixels.astype(int)
    assert np.abs(got - expected).mean() < 3


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_counts(kind: str) -> None:
    frames = [Image.fromarray(np.full((64, 64, 3), shade, np.uint8)) for shade in (10, 200)]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = save(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert (load_picture(data, SMALL).pixels == 10).all()


TURNS: list[tuple[int, Callable[[Any], Any]]] = [
    (1, lambda seen: seen),
    (2, lambda seen: seen[:, ::-1]),
    (3, lambda seen: seen[::-1, ::-1]),
    (4, lambda seen: seen[::-1]),
    (5, lambda seen: seen.transpose(1, 0, 2)),
    (6, lambda seen: np.rot90(seen, 1)),
    (7, lambda seen: np.rot90(seen, 2).transpose(1, 0, 2)),
    (8, lambda seen: np.rot90(seen, -1)),
    (9, lambda seen: seen),
]


@pytest.mark.parametrize(("orientation", "stored"), TURNS)
def test_exif_turns_the_picture(orientation: int, stored: Callable[[Any], Any]) -> None:
    """`stored` is what a camera held that way writes of a scene."""
    scene = pattern(64, 96)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(np.ascontiguousarray(stored(scene)), exif=exif)
    assert (load_picture(data, SMALL).pixels == scene).all()


def test_broken_exif_is_no_exif() -> None:
    data = encode(pattern(64, 96), exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert (load_picture(data, SMALL).pixels == pattern(64, 96)).all()


def test_digests_tell_pictures_apart() -> None:
    def digest(pixels: Any, kind: str = "PNG") -> bytes:
        return load_picture(encode(pixels, kind), SMALL).digest

    changed = pattern(64, 96)
    changed[63, 95, 2] ^= 1
    assert digest(pattern(64, 96)) == digest(pattern(64, 96), "BMP")
    assert digest(pattern(64, 96)) != digest(changed)
    # The same bytes in another shape are another picture.
    assert digest(np.zeros((64, 128, 3), np.uint8)) != digest(np.zeros((128, 64, 3), np.uint8))


def test_detail_and_cap_bound_the_area() -> None:
    data = encode(pattern(700, 900), compress_level=1)
    assert load_picture(data, FULL).pixels.shape[:2] == (704, 896)
    assert 450_000 < load_picture(data, FULL, max_pixels=500_000).pixels.size // 3 <= 500_000
    low = load_picture(data, FULL, detail=Detail.LOW)
    assert 200_000 < low.pixels.size // 3 <= 512 * 512
    # Never below what the checkpoint was made for.
    assert load_picture(data, FULL, max_pixels=1024).pixels.size // 3 <= 65536
    assert load_picture(data, FULL, max_pixels=1024).tokens > 40


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A grey PNG with this header and these chunks."""
    head = (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    parts = (
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in (head, *chunks, (b"IEND", b""))
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def webp(chunk: bytes, body: bytes) -> bytes:
    return b"RIFF" + struct.pack("<I", len(body) + 12) + b"WEBP" + chunk + struct.pack("<I", len(body)) + body


RLE_BMP = (
    b"BM" + struct.pack("<IHHI", 100, 0, 0, 1078) + struct.pack("<IiiHHIIiiII", 40, 64, 64, 1, 8, 1, 0, 0, 0, 256, 0)
) + bytes(1024 + 64)

GIF_START = b"GIF89a" + struct.pack("<HHBBB", 60000, 60000, 0, 0, 0)

REFUSED = {
    "empty": (b"", "empty"),
    "text": (b"hello, I am no picture", "of no known format"),
    "html": (b"\n<!DOCTYPE html><html></html>", "an HTML page"),
    "svg": (b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"></svg>', "an SVG"),
    "tiff": (b"II*\0" + bytes(100), "a TIFF"),
    "heic": (b"\0\0\0\x18ftypheic" + bytes(100), "a HEIC"),
    "avif": (b"\0\0\0\x18ftypavif" + bytes(100), "an AVIF"),
    "mp4": (b"\0\0\0\x18ftypisom" + bytes(100), "a video"),
    "jpeg 2000": (b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(100), "a JPEG 2000"),
    "pdf": (b"%PDF-1.7", "a PDF"),
    "only a start": (b"\x89PNG\r\n\x1a\n", "its header cannot be read"),
    "jpeg start": (b"\xff\xd8\xff\xe0\x00\x10JFIF", "its header cannot be read"),
    "no data": (png(64, 64), "truncated or damaged"),
    "large png": (png(14000, 14000), "14000 x 14000"),
    "large webp": (webp(b"VP8X", bytes(4) + b"\xff\x3f\0\xff\x3f\0" + bytes(50)), "16384 x 16384"),
    "large lossless webp": (webp(b"VP8L", b"\x2f\xff\xff\xff\x0f" + bytes(50)), "16384 x 16384"),
    "large lossy webp": (webp(b"VP8 ", bytes(3) + b"\x9d\x01\x2a\xff\x3f\xff\x3f" + bytes(50)), "16383 x 16383"),
    "webp without a size": (webp(b"VP9 ", bytes(50)), "its header cannot be read"),
    "large gif": (GIF_START + b"," + struct.pack("<HHHHB", 0, 0, 60000, 60000, 0) + b"\x08\x01\0\0;", "60000 x 60000"),
    "long": (png(201, 1), "201 x 1"),
    "run-length": (RLE_BMP, "run-length"),
    "scans": (encode(pattern(64, 64), "JPEG")[:-2] + b"\xff\xda" * 101 + b"\xff\xd9", "more than 100 scans"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name: str) -> None:
    data, reason = REFUSED[name]
    with pytest.raises(PictureError) as refusal:
        load_picture(data, SMALL)
    assert reason in str(refusal.value)
    assert refusal.value.code == ("image_too_large" if name.startswith("large") else "invalid_image")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_truncated_files_are_refused(kind: str) -> None:
    data = encode(pattern(200, 200), kind)
    for share in (0.2, 0.5, 0.9):
        with pytest.raises(PictureError, match=r"cannot be decoded"):
            load_picture(data[: int(len(data) * share)], SMALL)


def test_the_limit_itself_is_read() -> None:
    side = int(MAX_SOURCE_PIXELS**0.5)
    with pytest.raises(PictureError, match="truncated"):
        load_picture(png(side, side), SMALL)
    with pytest.raises(PictureError, match="at most"):
        load_picture(png(side, side + 1), SMALL)


def test_a_bomb_costs_nothing() -> None:
    """196 million pixels in 0.9 MB are refused from the header: neither decoded nor given room."""
    rows = zlib.compressobj(1)
    body = b"".join(rows.compress(bytes(1 + 14000)) for _ in range(14000)) + rows.flush()
    bomb = png(14000, 14000, (b"IDAT", body))
    assert len(bomb) > 500_000
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on, whatever ran before
    for _ in range(20):
        with pytest.raises(PictureError, match="14000 x 14000"):
            load_picture(bomb, FULL)
    assert peak() - before < 8 << 20


def settings(**changes: Any) -> dict[str, Any]:
    given = json.loads((DEMO_CHECKPOINT / "preprocessor_config.json").read_text())
    return {**given, **changes}


def test_the_demo_checkpoints_settings_are_read() -> None:
    assert parse_preprocessor_config(Path("p"), settings(), VISION) == SMALL
    assert SMALL.factor == 32


def test_older_keys_of_the_area_win() -> None:
    config = parse_preprocessor_config(Path("p"), settings(min_pixels=2048, max_pixels=8192), VISION)
    assert (config.min_pixels, config.max_pixels) == (2048, 8192)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"patch_size": 14}, "patch_size is 14, expected 16"),
        ({"merge_size": None}, "merge_size is None, expected 2"),
        ({"temporal_patch_size": 1}, "temporal_patch_size"),
        ({"image_mean": [0.48, 0.46, 0.41]}, "image_mean"),
        ({"do_resize": False}, "do_resize"),
        ({"resample": 2}, "resample"),
        ({"size": None}, "size.shortest_edge is None"),
        ({"size": {"shortest_edge": 4096, "longest_edge": "big"}}, "size.longest_edge is 'big'"),
        ({"size": {"shortest_edge": 4096, "longest_edge": 2048}}, "expected limits in order"),
        ({"max_pixels": True}, "max_pixels is True"),
    ],
)
def test_settings_that_are_not_computed_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=r"^p: ") as refusal:
        parse_preprocessor_config(Path("p"), settings(**changes), VISION)
    assert complaint in str(refusal.value)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_settings_file_must_be_there_and_json(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "preprocessor_config.json").write_text(content)
    with pytest.raises(ModelFileError, match=r"preprocessor_config\.json"):
        PreprocessorConfig.load(tmp_path, VISION)


def mutants(seed: int, count: int) -> Iterator[bytes]:
    """Damaged files: bytes changed, runs doubled, cut out or swapped, ends cut off."""
    r = np.random.default_rng(seed)
    grey = pattern(70, 90, 1)[:, :, 0]
    exif = Image.Exif()
    exif[0x0112] = 6
    good = [
        encode(pattern(70, 90), exif=exif),
        encode(pattern(70, 90, 4)),
        mode_file("P with a transparent colour"),
        encode(pattern(70, 90), "JPEG", exif=exif),
        encode(pattern(70, 90), "JPEG", progressive=True),
        save(Image.fromarray(pattern(70, 90)).convert("CMYK"), "JPEG"),
        encode(pattern(70, 90), "WEBP"),
        encode(pattern(70, 90, 4), "WEBP", lossless=True),
        save(Image.fromarray(grey), "GIF", save_all=True, append_images=[Image.fromarray(grey[::-1].copy())]),
        encode(pattern(70, 90), "BMP"),
        encode(grey, "BMP"),
    ]
    for _ in range(count):
        data = bytearray(good[r.integers(len(good))])
        for _ in range(int(r.integers(1, 6))):
            # Headers are short and decide most, so half of the damage goes there.
            end = len(data) if r.random() < 0.5 else min(len(data), 120)
            if end < 2:
                break
            place = int(r.integers(end))
            length = int(r.integers(1, 30))
            match r.integers(6):
                case 0 | 1:
                    data[place] = int(r.integers(256))
                case 2:
                    data[place : place + 4] = r.choice([b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\1"])
                case 3:
                    del data[place : place + length]
                case 4:
                    data[place:place] = data[place : place + length]
                case _:
                    del data[place + int(r.integers(len(data))) :]
        yield bytes(data)


def peak() -> int:
    """The most bytes of memory in use since the peak was last reset."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


def resident() -> int:
    """Bytes of memory in use."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def check_mutants(seed: int, count: int) -> tuple[int, int]:
    """How many were read and how many refused; nothing else may happen."""
    read = refused = 0
    for data in mutants(seed, count):
        try:
            picture = load_picture(data, SMALL)
        except PictureError:
            refused += 1
        else:
            assert picture.pixels.shape[2] == 3
            read += 1
    return read, refused


def test_damaged_files_are_read_or_refused() -> None:
    read, refused = check_mutants(seed=1, count=250)
    assert min(read, refused) > 20


@pytest.mark.exhaustive
def test_five_thousand_damaged_files_leave_no_memory_behind() -> None:
    check_mutants(seed=2, count=500)
    before = resident()
    check_mutants(seed=3, count=4500)
    assert resident() - before < 64 << 20
