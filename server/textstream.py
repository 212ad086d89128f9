"""Generated token ids to text: UTF-8 assembly, the split of reasoning and answer, tool calls, stop strings.

A pure state machine: `feed` one token, get the deltas that are certain; `finish` releases what was held back.
It runs on the engine's thread, so that a matched stop string ends generation before the next token is computed.
Knows no HTTP and no engine.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from server.toolcalls import ToolCallDelta, ToolCallParser

TokenBytes = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one channel. `reasoning` comes before the end-of-think marker, `content` after it."""

    channel: Literal["reasoning", "content"]
    text: str


Delta = TextDelta | ToolCallDelta


class StopMatcher:
    """Finds the first of several stop strings in text that arrives in pieces.

    Holds back only a tail that may still grow into a stop string. The match that ends first wins (of several, the
    longest), so that the result does not depend on where the pieces were cut.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.match: str | None = None

    @property
    def matched(self) -> bool:
        return self.match is not None

    def feed(self, text: str) -> str:
        """Text that is certain to precede any stop string; empty for ever after a match."""
        if self.matched:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        match = min(
            ((start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0), default=None
        )
        if match is not None:
            self.match = text[match[1] : match[0]]
            self._held = ""
            return text[: match[1]]
        held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """What was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    start = max(0, len(text) - len(stop) + 1)
    while (start := text.find(stop[0], start)) >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0


class TextStream:
    """All text of one generated choice.

    token_bytes: visible bytes of a token (control tokens have none); think_end: ids of the end-of-think marker;
    in_reasoning: whether the prompt left a thinking block open; stops: stop strings, asleep while reasoning and
    inside tool calls; tools: the parser if the request offers functions; tool_start: ids of the marker that opens
    a call, which ends an unclosed thinking block too.
    """

    def __init__(
        self,
        token_bytes: TokenBytes,
        *,
        think_end: Sequence[int],
        in_reasoning: bool,
        stops: Sequence[str] = (),
        tools: ToolCallParser | None = None,
        tool_start: Sequence[int] = (),
    ) -> None:
        self._token_bytes = token_bytes
        self._think_end = tuple(think_end)
        self._tool_start = tuple(tool_start) if tools is not None else ()
        self._tools = tools
        self._stop = StopMatcher(stops)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("ignore")
        self._in_reasoning = in_reasoning
        self._pending: list[int] = []
        self._held_blank = ""
        self._at_content_start = False
        self.reasoning_tokens = 0

    @property
    def stopped(self) -> bool:
        """A stop string was met, or the one wanted call is complete: nothing that follows may be shown."""
        return self._stop.matched or (self._tools is not None and self._tools.finished)

    @property
    def stop_string(self) -> str | None:
        """The stop string that was met."""
        return self._stop.match

    @property
    def in_reasoning(self) -> bool:
        return self._in_reasoning

    @property
    def has_tool_calls(self) -> bool:
        return self._tools is not None and self._tools.reported > 0

    def is_answer(self, token_id: int) -> bool:
        """Whether the next token, `token_id`, belongs to the answer: not to the reasoning or the blank behind it."""
        if self._in_reasoning:
            return False
        return not self._at_content_start or bool(self._token_bytes(token_id).strip(b"\n"))

    def feed(self, token_id: int) -> list[Delta]:
        """The deltas that one more token makes certain."""
        if not self._in_reasoning:
            return self._content(self._decode(token_id))
        self.reasoning_tokens += 1
        self._pending.append(token_id)
        if tuple(self._pending) == self._think_end:
            self._leave_reasoning()
            return []
        if self._tool_start and tuple(self._pending) == self._tool_start:
            opening, self._pending = self._pending, []
            self.reasoning_tokens -= len(opening)
            self._leave_reasoning()
            return self._content("".join(map(self._decode, opening)))
        text = ""
        while self._pending and not self._may_be_marker():
            text += self._decode(self._pending.pop(0))
        return self._reasoning(text)

    def finish(self, *, truncated: bool) -> list[Delta]:
        """Release what was held back. An unfinished UTF-8 sequence is dropped.

        truncated: generation was cut by a limit, so an open tool call stays open.
        """
        if self._in_reasoning:
            text = self._held_blank + "".join(map(self._decode, self._pending))
            self._pending, self._held_blank = [], ""
            return [TextDelta("reasoning", text)] if text else []
        shown = self._through_stop(self._tools.finish(truncated=truncated) if self._tools is not None else [])
        if not self._stop.matched and (held := self._stop.finish()):
            shown.append(TextDelta("content", held))
        return shown

    def _decode(self, token_id: int) -> str:
        return self._utf8.decode(self._token_bytes(token_id))

    def _may_be_marker(self) -> bool:
        count = len(self._pending)
        pending = tuple(self._pending)
        return pending == self._think_end[:count] or pending == self._tool_start[:count]

    def _leave_reasoning(self) -> None:
        # The blank before the marker and the line breaks after it belong to the template, not to the text.
        self._in_reasoning = False
        self._pending = []
        self._held_blank = ""
        self._at_content_start = True
        self._utf8.reset()

    def _reasoning(self, text: str) -> list[Delta]:
        text = self._held_blank + text
        shown = text.rstrip()
        self._held_blank = text[len(shown) :]
        return [TextDelta("reasoning", shown)] if shown else []

    def _content(self, text: str) -> list[Delta]:
        if self._at_content_start:
            text = text.lstrip("\n")
            self._at_content_start = not text
        if not text:
            return []
        return self._through_stop([text] if self._tools is None else self._tools.feed(text))

    def _through_stop(self, pieces: Sequence[str | ToolCallDelta]) -> list[Delta]:
        shown: list[Delta] = []
        for piece in pieces:
            if isinstance(piece, ToolCallDelta):
                # Text before a call can no longer grow into a stop string.
                if held := self._stop.finish():
                    shown.append(TextDelta("content", held))
                shown.append(piece)
                continue
            if text := self._stop.feed(piece):
                shown.append(TextDelta("content", text))
            if self._stop.matched:
                break
        return shown
