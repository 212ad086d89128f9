"""What may come next in one generated choice: the thinking budget first, then the grammar of the answer.

Implements `engine.core.TokenConstraint`; runs in the engine's thread. While the model thinks, grammars sleep.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from engine.core import BoolArray
from server.grammar import GrammarMatcher


class AnswerConstraint:
    """Thinking budget and grammar of one choice.

    vocab_size: length of the masks; in_reasoning: the prompt left a thinking block open; think_end: ids of the marker
    that closes it; budget: most thinking tokens (None: no limit), after which `forced_end` is injected;
    after_think: ids between the marker and an answer under a grammar; grammar: None lets the answer be anything;
    answer_only: ids that have no place in thinking when a grammar asks for an answer (end of turn, call marker).
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        in_reasoning: bool,
        think_end: Sequence[int],
        budget: int | None = None,
        forced_end: Sequence[int] = (),
        after_think: Sequence[int] = (),
        grammar: GrammarMatcher | None = None,
        answer_only: Iterable[int] = (),
    ) -> None:
        self._vocab_size = vocab_size
        self._in_reasoning = in_reasoning
        self._think_end = tuple(think_end)
        self._budget = budget
        self._forced_end = tuple(forced_end)
        self._after_think = tuple(after_think)
        self._grammar = grammar
        self._spent = 0
        self._recent: tuple[int, ...] = ()
        self._forced: list[int] = []
        self._while_thinking: BoolArray | None = None
        if grammar is not None and in_reasoning:
            self._while_thinking = np.ones(vocab_size, np.bool_)
            self._while_thinking[list(answer_only)] = False

    def allowed(self) -> BoolArray | None:
        """See `TokenConstraint.allowed`."""
        if self._in_reasoning and not self._forced and self._budget is not None and self._spent >= self._budget:
            self._forced = list(self._forced_end)
        if self._forced:
            mask = np.zeros(self._vocab_size, np.bool_)
            mask[self._forced[0]] = True
            return mask
        if self._in_reasoning:
            return self._while_thinking
        return None if self._grammar is None else self._grammar.allowed()

    def accept(self, token_id: int) -> None:
        """See `TokenConstraint.accept`."""
        was_forced = bool(self._forced)
        if was_forced:
            self._forced.pop(0)
        if self._in_reasoning:
            self._spent += 1
            self._recent = (*self._recent, token_id)[-len(self._think_end) :]
            if self._recent == self._think_end:
                self._in_reasoning = False
                if not was_forced and self._grammar is not None:
                    self._forced = list(self._after_think)
        elif not was_forced and self._grammar is not None:
            self._grammar.accept(token_id)
