"""What the choices of a streamed completion have sampled, on its way to the client."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from toolwise.protocols import Generation

if TYPE_CHECKING:
    from toolwise.engine.request import SampledPiece

Event = tuple[int, "SampledPiece | asyncio.Task[Generation] | Exception"]
"""Index of a choice, and what is new of it: tokens, its end, or why it cannot be sent."""
Events = asyncio.Queue[Event]


async def next_event(events: Events, held: list[Event], *, merge: bool) -> Event:
    """The next event. With `merge`, pieces of one choice that have come meanwhile are one piece: a server that falls
    behind then sends fewer, larger ones. `held` keeps an event of another choice for the next call."""
    index, event = held.pop() if held else await events.get()
    while merge and not isinstance(event, asyncio.Task | Exception) and not events.empty():
        next_index, more = events.get_nowait()
        if next_index != index or isinstance(more, asyncio.Task | Exception):
            held.append((next_index, more))
            break
        event = event + more
    return index, event
