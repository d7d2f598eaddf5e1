"""The text of the tokens that a run has sampled: `rollouts/vocabulary.ndjson`, one line per token id.

A token may hold a part of a character only, so what is not text is stored as bytes in hexadecimal. With it a page can
show tokens without the tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from toolwise.serialization.json_text import json_line
from toolwise.training.trackers.jsonl import read_metrics

NAME = "vocabulary.ndjson"  # files of rollouts, and no others, end in .jsonl
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class VocabularyFile:
    """Appends the tokens that are new."""

    def __init__(self, path: Path, tokenizer: Any) -> None:
        self.path, self.tokenizer = path, tokenizer
        self._known = set(read_vocabulary(path))
        self._anchor: tuple[list[int], str] | None = None

    def add(self, token_ids: Iterable[int]) -> None:
        new = sorted(set(token_ids) - self._known)
        if not new:
            return
        special = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)
        lines = [json_line({"id": number, **self._text(number, number in special)}) for number in new]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torn = self.path.exists() and self.path.read_bytes()[-1:] not in (b"\n", b"")
        with self.path.open("ab") as file:
            file.write(b"\n" * torn + b"".join(lines))
        self._known |= set(new)

    def _text(self, number: int, special: bool) -> dict[str, Any]:
        piece = self.tokenizer.convert_ids_to_tokens(number)
        if special or not isinstance(piece, str):
            return {"text": str(piece), "special": True}
        if match := _BYTE_PIECE.fullmatch(piece):
            return {"hex": match[1].lower()}
        before, prefix = self._context()
        text = self.tokenizer.decode([*before, number], clean_up_tokenization_spaces=False)
        if "\N{REPLACEMENT CHARACTER}" not in text and text.startswith(prefix):
            return {"text": text[len(prefix) :]}
        raw = _piece_bytes(piece)
        return {"text": piece} if raw is None else {"hex": raw.hex()}

    def _context(self) -> tuple[list[int], str]:
        """Tokens to decode before another: some tokenizers drop the space before the first one."""
        if self._anchor is None:
            ids = list(self.tokenizer.encode("a", add_special_tokens=False))
            self._anchor = ids, self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return self._anchor


def read_vocabulary(path: Path) -> dict[int, bytes]:
    """Token id -> its bytes; empty without a file. Lines that cannot be read are left out."""
    try:
        lines = read_metrics(path)
    except Exception:
        lines = []
        for raw in path.read_bytes().splitlines():
            try:
                lines.append(json.loads(raw))
            except ValueError:
                continue
    found = {}
    for line in (line for line in lines if isinstance(line, dict) and isinstance(line.get("id"), int)):
        text, digits = line.get("text"), line.get("hex")
        if isinstance(digits, str) and re.fullmatch(r"(?:[0-9a-f]{2})+", digits):
            found[line["id"]] = bytes.fromhex(digits)
        elif isinstance(text, str):
            found[line["id"]] = text.encode("utf-8", "replace")
    return found


def _piece_bytes(piece: str) -> bytes | None:
    """The bytes of a piece of a byte-level tokenizer; None if it is not one."""
    table = _byte_characters()
    return bytes(table[c] for c in piece) if all(c in table for c in piece) else None


@cache
def _byte_characters() -> dict[str, int]:
    """The characters by which byte-level tokenizers write bytes: printable ones as themselves, the others from U+0100
    on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
