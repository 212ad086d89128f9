"""The float operations of the layers: every tier against float64, odd sizes included."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine._simd import ffi, lib
from engine.config import SIMD_TIERS
from engine.cpu import supported_tiers

tiers = pytest.mark.parametrize(
    "tier",
    [pytest.param(t, marks=pytest.mark.skipif(t not in supported_tiers(), reason=f"no {t} here")) for t in SIMD_TIERS],
)
Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.float16]
EPS = 1e-6


def table(tier: str) -> Any:
    return lib.fm_ops_for(tier.encode())


def pointer(array: npt.NDArray[np.generic]) -> Any:
    kind = {"float32": "float[]", "int32": "int[]", "uint16": "uint16_t[]", "float16": "char[]"}[array.dtype.name]
    return ffi.from_buffer(kind, array)


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(scale)


def silu(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return x / (1 + np.exp(-x))


@tiers
def test_exp_is_within_two_ulp(tier: str) -> None:
    x = np.linspace(-87, 88, 1 << 16, dtype=np.float32)
    got = np.empty_like(x)
    table(tier).exp(pointer(x), len(x), pointer(got))
    expected = np.exp(x.astype(np.float64))
    assert np.max(np.abs(got - expected) / np.spacing(expected.astype(np.float32))) < 2


@tiers
def test_exp_of_what_is_hidden_is_zero_and_nothing_overflows(tier: str) -> None:
    x = np.full(16, -np.inf, np.float32)
    x[1:4] = -1000.0, 0.0, 88.0
    got = np.empty_like(x)
    table(tier).exp(pointer(x), len(x), pointer(got))
    assert got[0] == got[1] == got[15] == 0
    assert got[2] == 1
    assert np.isfinite(got).all()


@tiers
def test_half_round_trip_of_every_finite_value(tier: str) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    halves = halves[np.isfinite(halves.view(np.float16))]
    halves = halves[: len(halves) // 16 * 16]
    wide, back = np.empty(len(halves), np.float32), np.empty_like(halves)
    table(tier).from_half(pointer(halves), len(halves), pointer(wide))
    assert np.array_equal(wide, halves.view(np.float16).astype(np.float32))
    table(tier).to_half(pointer(wide), len(wide), pointer(back))
    assert np.array_equal(back, halves)


@tiers
def test_half_rounds_to_nearest_even_and_saturates(tier: str) -> None:
    normal = random(4096, scale=100.0)
    ties = np.float32(1) + np.arange(16, dtype=np.float32) / 2048
    x = np.concatenate([normal, ties, np.full(8, 1e6, np.float32), np.full(8, -1e6, np.float32)])
    got = np.empty(len(x), np.uint16)
    table(tier).to_half(pointer(x), len(x), pointer(got))
    expected = np.clip(x, -65504, 65504).astype(np.float16)
    assert np.array_equal(got.view(np.float16), expected)


@tiers
@pytest.mark.parametrize("width", [16, 48, 256, 2048])
def test_rmsnorm(tier: str, width: int) -> None:
    x, weight = random(width, seed=1), random(width, seed=2)
    got = np.empty_like(x)
    table(tier).rmsnorm(pointer(x), pointer(weight), width, EPS, pointer(got))
    wide = x.astype(np.float64)
    assert got == pytest.approx(wide / np.sqrt((wide**2).mean() + EPS) * weight, rel=2e-6, abs=1e-7)


@tiers
def test_gated_norm_multiplies_the_weight_as_stored(tier: str) -> None:
    x, gate, weight = random(128, seed=1), random(128, seed=2, scale=4.0), random(128, seed=3)
    got = np.empty_like(x)
    table(tier).gated_norm(pointer(x), pointer(gate), pointer(weight), 128, EPS, pointer(got))
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean() + EPS) * weight * silu(gate.astype(np.float64))
    assert got == pytest.approx(expected, rel=5e-6, abs=1e-6)


@tiers
@pytest.mark.parametrize("pairs", [1, 4, 32])
def test_rope_turns_halves_and_leaves_the_rest(tier: str, pairs: int) -> None:
    x, angle = random(80, seed=4), random(pairs, seed=5).astype(np.float64)
    got = x.copy()
    cosine, sine = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    table(tier).rope(pointer(got), pointer(cosine), pointer(sine), pairs)
    turned = (x[:pairs] + 1j * x[pairs : 2 * pairs]) * np.exp(1j * angle)
    assert got[:pairs] == pytest.approx(turned.real, abs=1e-6)
    assert got[pairs : 2 * pairs] == pytest.approx(turned.imag, abs=1e-6)
    assert np.array_equal(got[2 * pairs :], x[2 * pairs :])


@tiers
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 70])
def test_convolution_goes_on_from_its_window(tier: str, tokens: int) -> None:
    channels, pitch = 32, 80
    u, weight, state = random(tokens, pitch, seed=6), random(4, pitch, seed=7), random(3, pitch, seed=8)
    got, window = u.copy(), state.copy()
    table(tier).conv_silu(pointer(got), pitch, tokens, pointer(weight), pointer(window), pitch, channels)
    history = np.concatenate([state, u]).astype(np.float64)
    expected = silu(sum(weight[j] * history[j : j + tokens] for j in range(4)))
    assert got[:, :channels] == pytest.approx(expected[:, :channels], abs=3e-6)
    assert np.array_equal(got[:, channels:], u[:, channels:])
    assert np.array_equal(window[:, :channels], history[-3:, :channels].astype(np.float32))
    assert np.array_equal(window[:, channels:], state[:, channels:])


@tiers
def test_swiglu_and_axpy(tier: str) -> None:
    gate, up, y = random(64, seed=1, scale=5.0), random(64, seed=2), random(64, seed=3)
    got = np.empty_like(gate)
    table(tier).swiglu(pointer(gate), pointer(up), 64, pointer(got))
    assert got == pytest.approx(silu(gate.astype(np.float64)) * up, rel=2e-6, abs=1e-7)
    total = y.copy()
    table(tier).axpy(0.7, pointer(up), 64, pointer(total))
    assert total == pytest.approx(y + 0.7 * up.astype(np.float64), abs=1e-6)


def delta_rule(
    q: Floats, k: Floats, v: Floats, beta: Floats, g: Floats, state: Floats
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The recurrence in float64: (outputs, state)."""
    s = state.astype(np.float64)
    out = []
    for t in range(len(q)):
        key = k[t] / np.sqrt((k[t].astype(np.float64) ** 2).sum() + EPS)
        query = q[t] / np.sqrt((q[t].astype(np.float64) ** 2).sum() + EPS) / np.sqrt(q.shape[1])
        s = np.exp(np.float64(g[t])) * s
        s = s + np.outer(key, beta[t] * (v[t] - s.T @ key))
        out.append(s.T @ query)
    return np.array(out), s


@tiers
@pytest.mark.parametrize("form", ["delta_recurrent", "delta_chunk"])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(16, 16), (32, 48), (128, 128)])
@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 33, 63, 64])
def test_delta_rule(tier: str, form: str, key_dim: int, value_dim: int, tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    stride = 2 * key_dim + value_dim + 16
    row = random(tokens, stride, seed=9)
    q, k, v = row[:, :key_dim], row[:, key_dim : 2 * key_dim], row[:, 2 * key_dim : 2 * key_dim + value_dim]
    beta = rng.uniform(0, 1, tokens).astype(np.float32)
    g = -rng.choice([0.0, 0.001, 0.1, 1.0, 60.0], tokens).astype(np.float32)  # from no decay to all of it
    state = random(key_dim, value_dim, seed=10)
    expected, final = delta_rule(q, k, v, beta, g, state)
    out, got = np.empty((tokens, value_dim), np.float32), state.copy()
    scratch = np.full(lib.fm_delta_scratch(key_dim, value_dim), np.nan, np.float32)
    flat = row.reshape(-1)
    arguments = ffi.new(
        "fm_delta_args *",
        {
            "tokens": tokens, "key_dim": key_dim, "value_dim": value_dim, "stride": stride,
            "q": pointer(flat), "k": pointer(flat[key_dim:]), "v": pointer(flat[2 * key_dim :]),
            "beta": pointer(beta), "g": pointer(g), "state": pointer(got), "out": pointer(out),
            "scratch": pointer(scratch),
        },
    )  # fmt: skip
    getattr(table(tier), form)(arguments)
    assert out == pytest.approx(expected, abs=1e-5 * np.abs(expected).max())
    assert got == pytest.approx(final, abs=1e-5 * np.abs(final).max())


PAGE, SPAN = 64, 128


def span_pages(rows: Floats | Halves) -> list[Floats | Halves]:
    """The rows in two pages, what they leave free set to NaN."""
    filled = np.full((SPAN, rows.shape[1]), np.nan, rows.dtype)
    filled[: len(rows)] = rows
    return [np.ascontiguousarray(filled[:PAGE]), np.ascontiguousarray(filled[PAGE:])]


class Attention:
    """Running softmax of some query rows, fed span by span."""

    def __init__(self, tier: str, query: Floats) -> None:
        rows, width = query.shape
        self.ops, self.query = table(tier), np.ascontiguousarray(query)
        self.maximum, self.sum = np.full(rows, -np.inf, np.float32), np.zeros(rows, np.float32)
        self.acc = np.zeros((rows, width), np.float32)
        self.scratch = np.full(lib.fm_attend_scratch(rows), np.nan, np.float32)

    def feed(
        self,
        key: Floats | Halves,
        value: Floats | Halves,
        limit: npt.NDArray[np.int32],
        following: tuple[Halves, Halves] | None = None,
    ) -> None:
        """`key` and `value`: up to SPAN rows; pages are filled up with what must not matter."""
        pages, following_pages = (span_pages(x) for x in (key, value)), ((), ())
        keys, values = pages
        if following is not None:
            following_pages = tuple(span_pages(x) for x in following)
        arguments = ffi.new(
            "fm_attend_args *",
            {
                "rows": self.query.shape[0], "head_dim": self.query.shape[1], "query": pointer(self.query),
                "half": key.dtype == np.float16,
                "key": [pointer(p) for p in keys], "value": [pointer(p) for p in values],
                "next_key": [pointer(p) for p in following_pages[0]],
                "next_value": [pointer(p) for p in following_pages[1]],
                "next_lines": [p.nbytes // 64 for p in following_pages[0]],
                "limit": pointer(limit), "scratch": pointer(self.scratch),
                "maximum": pointer(self.maximum), "sum": pointer(self.sum), "acc": pointer(self.acc),
            },
        )  # fmt: skip
        self.ops.attend(arguments)


@tiers
@pytest.mark.parametrize("rows", [1, 3, 8, 13])
@pytest.mark.parametrize("width", [16, 48, 256])
def test_attention_over_spans(tier: str, rows: int, width: int) -> None:
    keys, values = random(300, width, seed=11), random(300, width, seed=12)
    query = random(rows, width, seed=13) / np.float32(np.sqrt(width))
    visible = np.linspace(1, 300, rows).astype(np.int32)
    attention = Attention(tier, query)
    for first in range(0, 300, SPAN):
        limit = np.clip(visible - first, 0, SPAN).astype(np.int32)
        attention.feed(keys[first : first + SPAN], values[first : first + SPAN], limit)
    for r in range(rows):
        score = keys[: visible[r]].astype(np.float64) @ query[r]
        p = np.exp(score - score.max())
        assert attention.acc[r] / attention.sum[r] == pytest.approx(p @ values[: visible[r]] / p.sum(), abs=1e-5)


@tiers
@pytest.mark.parametrize("width", [16, 48, 80, 144, 256])
def test_attention_over_halves_has_the_bits_of_floats(tier: str, width: int) -> None:
    """They are widened part by part, and the next span is fetched meanwhile: neither changes a bit."""
    keys, values = (random(2 * SPAN, width, seed=s).astype(np.float16) for s in (21, 22))
    limit = np.array([128, 1, 17, 63, 0, 64, 65, 97, 128, 2, 15, 31, 40], np.int32)
    query = random(13, width, seed=23)
    floats, halves = Attention(tier, query), Attention(tier, query)
    floats.feed(keys[:SPAN].astype(np.float32), values[:SPAN].astype(np.float32), limit)
    halves.feed(keys[:SPAN], values[:SPAN], limit, (keys[SPAN:], values[SPAN:]))
    assert halves.acc.tobytes() == floats.acc.tobytes()
    assert halves.sum.tobytes() == floats.sum.tobytes()
    for r in (0, 2, 6, 12):
        alone = Attention(tier, query[r : r + 1])
        alone.feed(keys[: limit[r]], values[: limit[r]], limit[r : r + 1])
        assert alone.acc.tobytes() == halves.acc[r].tobytes()


@tiers
def test_attention_row_does_not_see_its_neighbours(tier: str) -> None:
    keys, values, query = random(SPAN, 48, seed=14), random(SPAN, 48, seed=15), random(5, 48, seed=16)
    limit = np.array([1, 128, 0, 17, 97], np.int32)
    together = Attention(tier, query)
    together.feed(keys, values, limit)
    for r in (0, 1, 3, 4):
        alone = Attention(tier, query[r : r + 1])
        alone.feed(keys[: limit[r]], values[: limit[r]], limit[r : r + 1])
        assert alone.acc.tobytes() == together.acc[r].tobytes()
        assert (alone.sum[0], alone.maximum[0]) == (together.sum[r], together.maximum[r])
    assert together.sum[2] == 0
    assert not together.acc[2].any()


@tiers
def test_spans_merged_afterwards_have_the_bits_of_one_run(tier: str) -> None:
    keys, values, query = random(200, 32, seed=17, scale=3.0), random(200, 32, seed=18), random(1, 32, seed=19)
    whole, first, second = Attention(tier, query), Attention(tier, query), Attention(tier, query)
    for part, begin in ((whole, 0), (whole, SPAN), (first, 0), (second, SPAN)):
        span = slice(begin, begin + SPAN)
        part.feed(keys[span], values[span], np.array([min(200 - begin, SPAN)], np.int32))
    table(tier).attend_merge(
        *(pointer(first.maximum), pointer(first.sum), pointer(first.acc)),
        *(float(second.maximum[0]), float(second.sum[0]), pointer(second.acc), 32),
    )
    assert first.acc.tobytes() == whole.acc.tobytes()
    assert (first.sum[0], first.maximum[0]) == (whole.sum[0], whole.maximum[0])
    gate, got = random(32, seed=20), np.empty(32, np.float32)
    table(tier).attend_finish(pointer(first.acc), float(first.sum[0]), pointer(gate), 32, pointer(got))
    expected = whole.acc[0] / whole.sum[0] / (1 + np.exp(-gate.astype(np.float64)))
    assert got == pytest.approx(expected, abs=2e-6)


def test_tables_know_their_names() -> None:
    for tier in SIMD_TIERS:
        assert ffi.string(table(tier).tier).decode() == tier
    assert table("mmx") == ffi.NULL
