"""Recipes: the stored form of every tensor. Bytes are printed before anything is written.

What is small and sensitive is float in every recipe: norms, convolution, decay, the a and b projections, router and
shared gate in F32; the vision tower in F16, because its widths do not divide into blocks.
"""

from __future__ import annotations

from engine.convert.plan import Format, FormatChoice, default_format

HEAD = ("lm_head.",)
DELTA_NET = ("linear_attn.in_proj_qkv.", "linear_attn.in_proj_z.", "linear_attn.out_proj.")
ATTENTION = ("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj.", "self_attn.o_proj.")


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
    "quality": _in_half(*HEAD, *DELTA_NET, *ATTENTION),
    "float": _everything_float,
}
