"""Many clients of a server at once, over plain sockets: well-behaved ones, slow readers, some that leave or send
nonsense."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Tally:
    """What became of the requests."""

    outcomes: dict[str, int] = field(default_factory=dict)
    first_s: list[float] = field(default_factory=list)
    """Seconds to the first event of each stream."""
    faults: list[str] = field(default_factory=list)

    def count(self, name: str) -> None:
        self.outcomes[name] = self.outcomes.get(name, 0) + 1


def chat_body(number: int, **fields: Any) -> bytes:
    messages = [{"role": "user", "content": f"What is {number % 997} + {number % 89}?"}]
    return json.dumps({"model": "builtin:small", "messages": messages, **fields}).encode()


def post(body: bytes) -> bytes:
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    return (head + "Content-Type: application/json\r\nConnection: close\r\n\r\n").encode() + body


async def read_stream(port: int, number: int, tally: Tally, *, pause_s: float = 0.0, **fields: Any) -> None:
    """One streamed answer, read to its end."""
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(post(chat_body(number, stream=True, **fields)))
        received = await reader.readuntil(b"data: ")
        tally.first_s.append(time.perf_counter() - start)
        while chunk := await reader.read(64 if pause_s else 65536):
            received += chunk
            await asyncio.sleep(pause_s)
        complete = received.startswith(b"HTTP/1.1 200") and b"data: [DONE]" in received and b'"error"' not in received
        tally.count("stream" if complete else "broken stream")
        if not complete:
            tally.faults.append(received[-300:].decode(errors="replace"))
    except (OSError, asyncio.IncompleteReadError) as fault:
        tally.count("broken stream")
        tally.faults.append(repr(fault))
    finally:
        writer.close()


async def leave_early(port: int, number: int, tally: Tally, **fields: Any) -> None:
    """Hang up after the first event."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(post(chat_body(number, stream=True, **fields)))
    await reader.readuntil(b"data: ")
    writer.transport.abort()
    tally.count("left")


async def say_nonsense(port: int, number: int, tally: Tally) -> None:
    nonsense = (b"{", b'{"model": 5}', b"\xff\xfe", chat_body(number, n=0), chat_body(number, top_p=7))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(post(nonsense[number % len(nonsense)]))
    answer = await reader.read()
    tally.count("refused" if answer.startswith(b"HTTP/1.1 400") else "nonsense was not refused")
    writer.close()


async def stay_half_open(port: int, held: list[asyncio.StreamWriter], tally: Tally) -> None:
    """Send half a request, and nothing more."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(post(chat_body(0))[:80])
    held.append(writer)
    tally.count("half-open")
