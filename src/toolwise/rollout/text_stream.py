"""Turns tokens into text while they are sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

OnText = Callable[[str], None]


class TextStream:
    """Turns tokens into text piece by piece. Holds back what the next token may still change.

    The last pieces are decoded again together with new tokens, since the text of a token depends on the one before it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], on_text: OnText) -> None:
        self.decode, self.on_text = decode, on_text
        self._context: list[int] = []
        """The last tokens whose text was written."""
        self._context_text = ""
        self._new: list[int] = []
        self._written: list[str] = []

    def add(self, ids: Sequence[int]) -> None:
        self._new += ids
        text = self.decode([*self._context, *self._new])
        if text.endswith("\N{REPLACEMENT CHARACTER}") or not text.startswith(self._context_text):
            return  # the first bytes of a character
        self._write(text[len(self._context_text) :])
        self._context, self._new = self._new, []
        self._context_text = self.decode(self._context)

    def finish(self, text: str) -> None:
        """Write what is left of the complete `text`."""
        written = "".join(self._written)
        if text.startswith(written):
            self._write(text[len(written) :])

    def _write(self, piece: str) -> None:
        if piece:
            self._written.append(piece)
            self.on_text(piece)
