"""State of one sequence: pages of keys and values, recurrent states, convolution windows, and where they stand.

The state can go forward and be copied, never back: the recurrent part has no memory of earlier positions.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.config import ModelConfig
from engine.core import Float32Array, UInt8Array

PAGE_TOKENS = 64
PAGES_AT_ONCE = 8  # that share an allocation: 10 MB at the 35B shape, five huge pages
CONV_WINDOW = 3  # inputs that the four-tap convolution remembers


def page_bytes(config: ModelConfig, kv_f32: bool) -> int:
    """Bytes of one page: 64 tokens, keys and values of all attention layers."""
    values = config.attention_layers * 2 * config.num_key_value_heads * PAGE_TOKENS * config.head_dim
    return values * (4 if kv_f32 else 2)


def recurrent_bytes(config: ModelConfig) -> int:
    """Bytes of the state that does not grow: recurrent states and convolution windows."""
    heads, key, value = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    return 4 * config.delta_layers * (CONV_WINDOW * config.conv_channels + heads * key * value)


class SequenceState:
    """What the model remembers of the tokens seen so far.

    position: tokens seen. rope_delta: offset from a token's index to its rotary position, for tokens to come (pictures
    advance the two differently). conv: float32 [delta layers, 3, channels], oldest first. ssm: float32 [delta layers,
    value heads, key dim, value dim]. pages: uint8 [page_bytes] each, laid out as [attention layer][K, V][kv head]
    [64][head_dim] of float16 (float32 if kv_f32).
    """

    def __init__(self, config: ModelConfig, *, kv_f32: bool = False) -> None:
        self.config = config
        self.kv_f32 = kv_f32
        self.position = 0
        self.rope_delta = 0
        layers, heads = config.delta_layers, config.linear_num_value_heads
        self.conv: Float32Array = _aligned((layers, CONV_WINDOW, config.conv_channels), np.float32)
        self.ssm: Float32Array = _aligned(
            (layers, heads, config.linear_key_head_dim, config.linear_value_head_dim), np.float32
        )
        self.pages: list[UInt8Array] = []
        self._unused: UInt8Array = np.empty(0, np.uint8)  # the rest of the newest allocation
        self._addresses = np.empty(16, np.uintp)
        self.page_bytes = page_bytes(config, kv_f32)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.conv.nbytes + self.ssm.nbytes + len(self.pages) * self.page_bytes

    def reserve(self, tokens: int) -> None:
        """Make room for the keys and values of `tokens` tokens in all."""
        while len(self.pages) * PAGE_TOKENS < tokens:
            if len(self._unused) < self.page_bytes:
                self._unused = _in_huge_pages(PAGES_AT_ONCE * self.page_bytes)
            self._append(self._unused[: self.page_bytes])
            self._unused = self._unused[self.page_bytes :]

    def adopt(self, pages: Iterable[UInt8Array], tail: UInt8Array | None) -> None:
        """Begin an empty sequence's keys and values with those of another: full `pages`, which are used in place and
        never written, and the partly filled `tail` behind them, which is copied. uint8 [page_bytes] each. The caller
        keeps the pages' memory as it is for as long as the sequence runs."""
        assert not self.pages, "only an empty sequence can adopt pages"
        for page in pages:
            self._append(page)
        if tail is not None:
            self.reserve((len(self.pages) + 1) * PAGE_TOKENS)
            np.copyto(self.pages[-1], tail)

    def _append(self, page: UInt8Array) -> None:
        if len(self.pages) == len(self._addresses):
            self._addresses = np.concatenate([self._addresses, np.empty_like(self._addresses)])
        self._addresses[len(self.pages)] = page.ctypes.data
        self.pages.append(page)

    @property
    def page_addresses(self) -> npt.NDArray[np.uintp]:
        """Where each page lies, [pages]."""
        return self._addresses[: len(self.pages)]

    def layer_positions(self) -> Iterable[int]:
        """The position of each layer with state. They move together."""
        return (self.position for _ in self.config.layer_types)

    def page(self, index: int) -> UInt8Array:
        """Page `index`; the last one may be partly filled."""
        return self.pages[index]

    def recurrent(self) -> Sequence[UInt8Array]:
        """The arrays that do not grow, as bytes."""
        return [self.conv.reshape(-1).view(np.uint8), self.ssm.reshape(-1).view(np.uint8)]


def _in_huge_pages(nbytes: int) -> UInt8Array:
    """Zeros in memory of their own, in huge pages where the system has them: reading keys and values takes a quarter
    less time then."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _aligned(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeros that start on a cache line."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(nbytes + 64, np.uint8)
    begin = -raw.ctypes.data % 64
    return raw[begin : begin + nbytes].view(dtype).reshape(shape)
