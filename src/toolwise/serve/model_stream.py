"""A streamed completion of a model: what its choices sample becomes chunks, or takes the short cut to the client."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toolwise.protocols import Generation
from toolwise.rollout.chat_tokenizer import ChatTokenizer
from toolwise.serve.choice_stream import ChoiceStream
from toolwise.serve.completion import Completion, logprob_entries
from toolwise.serve.event_stream import ShortCut
from toolwise.serve.piece_queue import Event, Events, next_event

if TYPE_CHECKING:
    from toolwise.engine.request import SampledPiece


@dataclass(slots=True, eq=False)
class ModelStream:
    """Tokens come in through `add`, and leave as events of the short cut while `next` waits for something else to do:
    an end, a fault, or pieces for a client that does not keep up."""

    chat: ChatTokenizer
    completion: Completion
    choices: Sequence[ChoiceStream]
    short_cut: ShortCut
    merges: bool
    """Whether an event may have tokens of several steps."""
    _events: Events = field(default_factory=asyncio.Queue)
    _held: list[Event] = field(default_factory=list)
    _waits: bool = False

    def add(self, index: int, news: SampledPiece | asyncio.Task[Generation]) -> None:
        """Something new of a choice: tokens, or its end."""
        if isinstance(news, asyncio.Task) or not (self._waits and self._events.empty() and self.short_cut.write(b"")):
            self._events.put_nowait((index, news))
            return
        try:
            event = self.completion.event_of(index, *self._new_of(index, news))
        except Exception as fault:  # of this request
            self._events.put_nowait((index, fault))
        else:
            if event is not None:
                self.short_cut.write(event)

    async def next(self) -> tuple[int, SampledPiece | asyncio.Task[Generation]]:
        """What has not taken the short cut."""
        self._waits = not self._held
        try:
            index, event = await next_event(self._events, self._held, merge=self.merges)
        finally:
            self._waits = False
        if isinstance(event, Exception):
            raise event
        return index, event

    def chunk(self, index: int, piece: SampledPiece | Generation) -> dict[str, Any] | None:
        return self.completion.delta(index, *self._new_of(index, piece))

    def _new_of(
        self, index: int, piece: SampledPiece | Generation
    ) -> tuple[dict[str, Any], list[dict[str, Any]] | None, Sequence[int]]:
        """What a piece adds to the message of a choice, its log-probs if they were asked for, and its tokens."""
        request = self.completion.request
        entries = logprob_entries(self.chat, request, piece) if request.logprobs else None
        return self.choices[index].feed(piece.token_ids), entries, piece.token_ids
