"""Recipes: the stored form of every tensor. Bytes are printed before anything is written.

What is small and sensitive is float in every recipe: norms, convolution, decay, the a and b projections, router and
shared gate in F32; the vision tower in F16, because its widths do not divide into blocks. Beyond that, by what it
buys on the demo model (KL to the original on running text, all in 4 bits and calibrated: 0.0130):
    head in F16             0.0080   for 1.5 MB
    delta net in F16        0.0100   for 4.5 MB
    embedding in F16        0.0109   for 1.5 MB
    attention, experts and shared experts: 0.0123, 0.0114, 0.0129 for more bytes each
The engine multiplies F16 matrices as float32, so the head of `balanced` costs speed as well as bytes.
"""

from __future__ import annotations

from engine.convert.plan import Format, FormatChoice, default_format

HEAD = ("lm_head.",)
DELTA_NET = ("linear_attn.in_proj_qkv.", "linear_attn.in_proj_z.", "linear_attn.out_proj.")
EMBEDDING = ("embed_tokens.",)


def _in_half(*parts: str) -> FormatChoice:
    """4 bits, but F16 for matrices whose name contains one of `parts`."""

    def choose(name: str, shape: tuple[int, ...]) -> Format:
        stored = default_format(name, shape)
        return Format.F16 if stored is Format.Q4 and any(part in name for part in parts) else stored

    return choose


def _everything_float(name: str, shape: tuple[int, ...]) -> Format:
    return Format.F32


RECIPES: dict[str, FormatChoice] = {
    "size": default_format,
    "balanced": _in_half(*HEAD),
    "quality": _in_half(*HEAD, *EMBEDDING, *DELTA_NET),
    "float": _everything_float,
}
