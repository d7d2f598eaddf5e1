"""Decodes byte-level tokens (GPT-2, Llama 3, Qwen, …) by table. For the few tokens of a piece of a stream, calling the
tokenizer's library takes longer, and each call gives the interpreter to other threads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any


def _bytes_by_character() -> dict[str, int]:
    """How byte-level tokenizers write each byte: printable ones as themselves, others as characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}


_BYTES = _bytes_by_character()


class _TokenBytes(dict[int, bytes]):
    """The bytes of each token, read from the tokenizer when they are first asked for."""

    def __init__(self, id_to_token: Callable[[int], str | None]) -> None:
        super().__init__()
        self.id_to_token = id_to_token

    def __missing__(self, token_id: int) -> bytes:
        token = self.id_to_token(token_id)
        if token is None:  # not in the vocabulary: no text
            return b""
        try:
            text = bytes(map(_BYTES.__getitem__, token))
        except KeyError:  # an added token, which is text as it is
            text = token.encode()
        self[token_id] = text
        return text


def byte_level_decode(backend: Any) -> Callable[[Iterable[int]], str] | None:
    """What `backend.decode(ids, skip_special_tokens=False)` does; None if its tokens are not byte-level."""
    decoder = backend.decoder
    if decoder is None or json.loads(decoder.__getstate__()).get("type") != "ByteLevel":
        return None
    bytes_of = _TokenBytes(backend.id_to_token).__getitem__
    return lambda ids: b"".join(map(bytes_of, ids)).decode("utf-8", "replace")
