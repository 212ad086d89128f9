"""Dumps what the official image processor makes of generated pictures, as `images.json` beside this file.

Needs torch 2.13, torchvision 0.28 and transformers 5.24, which the project does not depend on:
`PYTHONPATH=.:tests python tests/vectors/generate_images.py`. The processor is the one that checkpoints of the family
name (torchvision's resizing of bytes), not its older form on Pillow, which differs by 1 or 2 of 255 in up to 1 % of the
values.

    sizes   one entry per limits of the area and size: [min, max, height, width, rows, columns, SHA-256 of the pixels]
    modes   way of storing -> [rows, columns, SHA-256], with limits 4096 and 65536
"""

import hashlib
import io
import json
from pathlib import Path

import numpy as np
import torch
from picture_files import AREAS, MODES, SIZES, encode, mode_file, pattern
from PIL import Image

try:
    import torchvision  # noqa: F401
except RuntimeError:
    # A build of torchvision for other devices: of its own operators, resizing needs none, importing wants these two.
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from transformers import Qwen2VLImageProcessor


def processed(data: bytes, least: int, most: int) -> list[object]:
    """Rows, columns and hash of the pixels that the processor makes, with patches put back in their places."""
    processor = Qwen2VLImageProcessor(
        size={"shortest_edge": least, "longest_edge": most},
        patch_size=16, merge_size=2, temporal_patch_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3,
    )  # fmt: skip
    made = processor(Image.open(io.BytesIO(data)), return_tensors="np")
    _, rows, columns = (int(size) for size in made["image_grid_thw"][0])
    values = np.rint((made["pixel_values"].astype(np.float64) * 0.5 + 0.5) * 255).astype(np.uint8)
    patches = values.reshape(rows // 2, columns // 2, 2, 2, 3, 2, 16, 16)
    assert (patches[:, :, :, :, :, 0] == patches[:, :, :, :, :, 1]).all()
    pixels = patches[:, :, :, :, :, 0].transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * 16, columns * 16, 3)
    return [rows * 16, columns * 16, hashlib.sha256(np.ascontiguousarray(pixels)).hexdigest()]


def main() -> None:
    sizes = [
        [least, most, height, width, *processed(encode(pattern(height, width)), least, most)]
        for least, most in AREAS
        for height, width in SIZES
    ]
    modes = {mode: processed(mode_file(mode), *AREAS[0]) for mode in MODES}
    lines = ",\n".join(json.dumps(entry) for entry in sizes)
    others = ",\n".join(f"{json.dumps(mode)}: {json.dumps(entry)}" for mode, entry in modes.items())
    text = f'{{"sizes": [\n{lines}\n],\n"modes": {{\n{others}\n}}}}\n'
    Path(__file__).with_name("images.json").write_text(text)


if __name__ == "__main__":
    main()
