"""A server whose model answers at once, and a client that says exactly the bytes it is told to."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toolwise.protocols import Generation, Sampling

HELLO: dict[str, Any] = {"model": "small", "messages": [{"role": "user", "content": "Hello"}]}


class Echo:
    """Answers with the first tokens of the prompt."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        ids = list(token_ids[:3])
        return Generation(token_ids=ids, logprobs=[0.0] * len(ids), finish_reason="stop", policy_version=0)


@dataclass
class Answer:
    status: int
    """0 where the connection ended without one."""
    head: bytes
    body: bytes
    closed: bool
    seconds: float

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)["error"]
        return found


def request(
    body: bytes = b"",
    *,
    target: str = "/v1/chat/completions",
    method: str = "POST",
    headers: Sequence[str] | None = None,
    length: bool = True,
) -> bytes:
    lines = [f"{method} {target} HTTP/1.1"]
    lines += headers if headers is not None else ["Host: localhost", "Content-Type: application/json"]
    if length:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def say(port: int, *pieces: bytes, pause_s: float = 0.0, wait_s: float = 10.0) -> Answer:
    """Send the pieces and read one answer, or until the server hangs up."""
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=wait_s) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
                if pause_s:
                    time.sleep(pause_s)
        except OSError:
            pass  # refused already: the answer may be there all the same
        return read_answer(connection, began)


def read_answer(connection: socket.socket, began: float | None = None) -> Answer:
    began = time.monotonic() if began is None else began
    got, closed = b"", False
    while True:
        head, found, rest = got.partition(b"\r\n\r\n")
        if found and len(rest) >= _length(head) and b"connection: close" not in head.lower():
            break  # else all that comes until the end: there must not be a second answer
        try:
            chunk = connection.recv(65536)
        except ConnectionResetError:
            chunk = b""
        if not chunk:
            closed = True
            break
        got += chunk
    status = int(got.split(b" ", 2)[1]) if got else 0
    return Answer(status, head, rest, closed or b"connection: close" in head.lower(), time.monotonic() - began)


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0
