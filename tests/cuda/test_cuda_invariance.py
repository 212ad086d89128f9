"""A token's result is the same bits however many tokens share its pass: fused passes equal separate ones, and a pass
resumed from the middle equals the uncut one."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from cuda_cases import Array, ceil_div, f32, i32, normal, pack_q4
from cuda_emulator import Emulator

from engine.gpu import tile_bound

RNG_SEED = 3


@pytest.fixture
def device(library: Path) -> Emulator:
    return Emulator(library)


def dense(device: Emulator, x: Array, packed: Array, n: int) -> Array:
    rows, k = x.shape
    y = device.upload(np.zeros((rows, n), np.float32))
    device.launch(
        "matmul_q4", (ceil_div(n, 128), ceil_div(rows, 64)), 256,
        device.upload(x), i32(k), device.upload(packed), y, i32(n), i32(rows), i32(n), i32(k), i32(0),
    )  # fmt: skip
    return device.download(y)


@pytest.mark.parametrize("rows", [slice(0, 1), slice(3, 70), slice(64, 130)], ids=str)
def test_matmul_q4_rows_do_not_depend_on_their_neighbours(device: Emulator, rows: slice) -> None:
    rng = np.random.default_rng(RNG_SEED)
    x, (packed, _) = normal(rng, 130, 192), pack_q4(rng, 144, 192)
    assert np.array_equal(dense(device, x, packed, 144)[rows], dense(device, x[rows], packed, 144))


@pytest.mark.parametrize("count", [1, 16, 17, 32, 33, 64], ids=lambda count: f"{count}-rows")
def test_grouped_tiles_of_all_heights_equal_the_dense_product(device: Emulator, count: int) -> None:
    rng = np.random.default_rng(RNG_SEED)
    x, (packed, _) = normal(rng, count, 128), pack_q4(rng, 144, 128)
    y = device.upload(np.zeros((count, 144), np.float32))
    tiles = np.array([[0, 0, count, next(height for height in (16, 32, 64) if count <= height)]], np.int32)
    device.launch(
        "matmul_q4_grouped", (4, 1), 128,
        device.upload(x), i32(128), None, device.upload(packed), ctypes.c_uint(packed.nbytes), y, i32(144),
        device.upload(tiles), device.upload(np.ones(1, np.int32)), i32(144), i32(128),
    )  # fmt: skip
    assert np.array_equal(device.download(y), dense(device, x, packed, 144))


def test_an_experts_rows_are_cut_into_the_cheapest_tiles(device: Emulator) -> None:
    counts = [0, 1, 16, 17, 32, 33, 48, 49, 64, 65, 111, 200]
    expected, start = [], 0
    for slot, heights in enumerate(
        ([], [16], [16], [32], [32], [32, 16], [32, 16], [64], [64], [64, 16], [64, 32, 16], [64, 64, 64, 16])
    ):
        end = start + counts[slot]
        for height in heights:
            expected.append([slot, start, min(height, end - start), height])
            start += expected[-1][2]
        assert start == end
    tiles = device.upload(np.full((tile_bound(sum(counts), len(counts)), 4), -1, np.int32))
    starts, tile_count = device.upload(np.zeros(len(counts), np.int32)), device.upload(np.zeros(1, np.int32))
    device.launch(
        "expert_plan", (1, 1), 512,
        device.upload(np.array(counts, np.int32)), i32(len(counts)), None, starts, tiles, tile_count,
    )  # fmt: skip
    assert device.download(tile_count).tolist() == [len(expected)]
    assert device.download(tiles)[: len(expected)].tolist() == expected


def test_router_gives_every_token_distinct_experts_even_for_broken_logits(device: Emulator) -> None:
    logits = normal(np.random.default_rng(RNG_SEED), 4, 9)
    logits[1, 3:] = np.nan
    logits[2] = np.nan
    logits[3, ::2] = -np.inf
    chosen = device.upload(np.full((4, 5), -1, np.int32))
    weights = device.upload(np.zeros((4, 5), np.float32))
    device.launch("router_topk", (4, 1), 128, device.upload(logits), i32(9), i32(9), i32(5), chosen, weights)
    assert all(len(set(row)) == 5 and set(row) <= set(range(9)) for row in device.download(chosen).tolist())


def attend(device: Emulator, q: Array, pages: list[Array], position: int) -> Array:
    tokens, heads, d = q.shape
    buffers = [device.upload(page) for page in pages]
    table = device.upload(np.array([buffer.address for buffer in buffers], np.uint64))
    y = device.upload(np.zeros((tokens, heads, d), np.float32))
    row, head, gate = i32(heads * d), i32(d), device.upload(q)
    device.launch(
        f"attention_causal_{d}", (ceil_div(tokens * 2, 32), heads // 2), 256,
        device.upload(q), row, head, gate, row, head, table, i32(0), i32(position), i32(tokens), i32(2),
        f32(d**-0.5), y,
    )  # fmt: skip
    return device.download(y)


@pytest.mark.parametrize("cut", [1, 63, 64, 65, 100])
def test_attention_resumed_in_the_middle_equals_the_uncut_pass(device: Emulator, cut: int) -> None:
    rng = np.random.default_rng(RNG_SEED)
    q = normal(rng, 140, 4, 64)
    pages = [normal(rng, 2, 2, 64, 64).astype(np.float16) for _ in range(3)]
    whole = attend(device, q, pages, 0)
    assert np.array_equal(whole[:cut], attend(device, q[:cut], pages, 0))
    assert np.array_equal(whole[cut:], attend(device, q[cut:], pages, cut))


def delta(device: Emulator, qkv: Array, ab: Array, state: Array, chunks: list[tuple[int, int]]) -> tuple[Array, Array]:
    heads, d = state.shape[0], state.shape[1]
    table = device.upload(np.array([(first, count, -1, 0) for first, count in chunks], np.int32))
    work = device.upload(np.zeros((len(chunks), heads, 4 * 32 * d + 32 * 32 + 32), np.float32))
    carried, o = device.upload(state), device.upload(np.zeros((len(qkv), heads, d), np.float32))
    rates = device.upload(-np.ones(heads, np.float32))
    b = device.upload(np.ascontiguousarray(ab.reshape(-1)[heads:]))
    device.launch(
        f"gated_delta_chunk_{d}", (len(chunks), heads), 256,
        device.upload(qkv), i32(qkv.shape[1]), device.upload(ab), b, i32(2 * heads), rates, rates, table, i32(1),
        f32(1e-6), work,
    )  # fmt: skip
    device.launch(
        f"gated_delta_scan_{d}", (ceil_div(d, 32), heads), 256, work, table, i32(len(chunks)), carried, None, o
    )
    return device.download(o), device.download(carried)


@pytest.mark.parametrize("cut", [32, 64])
def test_delta_rule_resumed_at_a_chunk_equals_the_uncut_pass(device: Emulator, cut: int) -> None:
    rng = np.random.default_rng(RNG_SEED)
    qkv, ab = normal(rng, 90, 4 * 32), normal(rng, 90, 4)
    state = normal(rng, 2, 32, 32)
    whole, final = delta(device, qkv, ab, state, [(0, 32), (32, 32), (64, 26)])
    first, middle = delta(device, qkv[:cut], ab[:cut], state, [(i, 32) for i in range(0, cut, 32)])
    rest = [(i - cut, min(32, 90 - i)) for i in range(cut, 90, 32)]
    second, last = delta(device, qkv[cut:], ab[cut:], middle, rest)
    assert np.array_equal(whole, np.concatenate([first, second]))
    assert np.array_equal(final, last)
