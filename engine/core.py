"""The vocabulary shared by server and engine: plain frozen values, no behaviour.

A request travels forward as `GenerationRequest` and comes back as a sequence of `Progress` and
`TokenResult`. Nothing here is mutated after it is made. Imports nothing of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
UInt8Array = npt.NDArray[np.uint8]
BoolArray = npt.NDArray[np.bool_]


class FinishReason(StrEnum):
    """Why generation ended. `STOP`: an end token; `LENGTH`: max_tokens or the context window."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """One picture inside a prompt.

    start: index of its first placeholder token; count: number of placeholder tokens (merged patches);
    pixels: uint8 RGB [height, width, 3] after resizing; digest: SHA-256 over pixels, mode and size, empty if unknown,
    and then nothing from `start` on is cached.
    """

    start: int
    count: int
    pixels: UInt8Array
    digest: bytes


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenised prompt. token_ids: int32 [tokens]; boundaries: ascending token positions, half-open
    ends of template parts (messages, headers) at which later prompts are likely to diverge."""

    token_ids: Int32Array
    boundaries: tuple[int, ...] = ()
    images: tuple[ImageSpan, ...] = ()


SAMPLING_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    # Far below 0.01 a division of finite logits would leave the range of float32.
    "repetition_penalty": (0.01, 10.0),
}
"""What is accepted for each number of SamplingParams, both ends included."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Semantics follow the OpenAI API where it defines them.

    temperature 0 (below 1e-6) is greedy (lowest id on ties). top_k 0 and top_p 1.0 and min_p 0.0 switch a filter off.
    presence/frequency penalties subtract from logits of *generated* tokens; repetition_penalty (1.0 = off)
    divides positive and multiplies negative logits of prompt and generated tokens (CTRL, arXiv 1909.05858).
    logit_bias: (token id, bias) pairs added to logits. seed: any integer, taken modulo
    2^64; None: fresh entropy. Order: bias, penalties, temperature, top_k, top_p, min_p, draw.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None


class TokenConstraint(Protocol):
    """Steers one generation (grammar, thinking budget). The engine calls `allowed` before it draws a token and
    `accept` with the token that it drew, in its own thread, for every token in order."""

    def allowed(self) -> BoolArray | None:
        """Which tokens may come next: bool [vocab_size], at least one of them true; None: any."""

    def accept(self, token_id: int) -> None:
        """Take note of the token that was drawn."""


def _no_reply() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """How a request uses the prefix cache. Prompts share only within one scope (the tenant) and one salt.

    exact: reuse only what prefill computed, so that logits have the bits of an uncached run. read, write: use what is
    there; leave snapshots. keep_reply: asked when the generation has ended, whether the next prompt of the
    conversation will hold it token for token, so that a snapshot behind it pays. shadow: nobody has asked for this
    prompt, another one is expected to begin with it: a snapshot of its end is all that is wanted.
    """

    scope: bytes = b""
    salt: bytes = b""
    exact: bool = False
    read: bool = True
    write: bool = True
    keep_reply: Callable[[], bool] = _no_reply
    shadow: bool = False


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What the prefix cache did for one prompt. Counts in tokens.

    position: reused; matched: known to the cache; tier: "ram" or "disk", where the snapshot came from; load_s: time
    to load it; provenance: "prefill" or "decode", how it was computed; miss_reason: why not more was reused; carried:
    what an interrupted prefill had done of the tokens behind `position`, in whole tokens' worth of work.
    """

    tokens: int
    matched: int
    position: int
    tier: str | None
    load_s: float
    provenance: str | None
    miss_reason: str | None
    carried: int = 0

    @property
    def recomputed(self) -> int:
        """Prompt tokens that prefill had to take."""
        return self.tokens - self.position


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One snapshot in the prefix cache. id: its name for pinning; position: tokens it covers; bytes: what its removal
    from a tier would free, 0 where it is not; age: requests since it was used."""

    id: str
    position: int
    kind: str
    provenance: str
    ram_bytes: int
    disk_bytes: int
    in_ram: bool
    on_disk: bool
    hits: int
    age: int
    pinned: bool


class CacheControl(Protocol):
    """The prefix cache as its administration sees it. Callable from any thread. scope None: every tenant's."""

    def entries(self, scope: bytes | None, limit: int) -> Sequence[CacheEntry]:
        """Snapshots, deepest first."""

    def pin(self, entry_id: str, pinned: bool, scope: bytes | None) -> bool:
        """Keep a snapshot from eviction, or stop that. False: there is none. RequestError if too much is pinned."""

    def clear(self, scope: bytes | None) -> int:
        """Delete snapshots in RAM and on disk; how many."""

    def covered(self, prompt: Prompt, options: CacheOptions) -> int:
        """How much of `prompt` a longer one that begins with it would find, in tokens."""

    def counters(self) -> Mapping[str, int | float | Mapping[str, int]]:
        """What has happened since the start, by name; some by reason, tier or kind as well."""

    def gauges(self) -> Mapping[str, int | float | str | None]:
        """Sizes and rates now, by name."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One generation. max_tokens >= 0 new tokens; stop_token_ids end generation and are reported as the
    last TokenResult (finish_reason STOP), for the server to drop from the text.

    constraint: disallowed tokens get logit -inf, after all other changes of the logits and before the draw.
    top_logprobs: None reports no log-probabilities; k >= 0 reports the drawn token's and the k largest.
    """

    request_id: str
    prompt: Prompt
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: frozenset[int] = frozenset()
    constraint: TokenConstraint | None = None
    top_logprobs: int | None = None
    cache: CacheOptions = CacheOptions()


@dataclass(frozen=True, slots=True)
class Progress:
    """Prefill progress: `processed` of `total` prompt tokens are in the state, `cached` of them were reused. cache:
    the details, None without a prefix cache."""

    total: int
    cached: int
    processed: int
    elapsed_s: float
    cache: CacheReport | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities in nats under the model's own logits, before any change of them. logprob: of the drawn token;
    top: the largest (token id, logprob) pairs, descending."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenResult:
    """One generated token. `finish_reason` is set on the last one only; `logprobs` if the request wants them."""

    token_id: int
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
