"""Control tokens are the chat template's alone: whatever anybody says in a conversation is encoded as ordinary text.

`guard` marks where text would become a control token; a template then carries the marks along like any other letter;
`encode` cuts the rendered text at the marks, so that no piece holds a control token that the template did not write.
Nothing is changed in what the model reads: the pieces decode to the text as it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

GUARD_MARK = "\ufdd0"
"""A code point that Unicode keeps out of text for good. Found in a message all the same, it becomes U+FFFD."""


class ControlTokens:
    """The control tokens of one tokenizer: those it flags as special, its eos, bos and pad among them.

    Tags that a tokenizer adds without the flag, such as `<tool_call>`, are text to everyone but tools: what a tool
    returns cannot write those either.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = {i: token for i, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
        special = [token.content for token in added.values() if token.special]
        self.texts: tuple[str, ...] = tuple(dict.fromkeys([*tokenizer.all_special_tokens, *special]))
        self.ids = frozenset(tokenizer.convert_tokens_to_ids(list(self.texts)))
        tags = [token.content for token in added.values()]
        self._control = _any_of(self.texts)
        self._control_or_tag = _any_of([*self.texts, *tags])
        self._beginnings = frozenset(text[:n] for text in self.texts for n in range(1, len(text)))
        self._longest = max(map(len, self._beginnings), default=0)
        # Where text is normalised before tokens are looked for, other spellings of a token become it too.
        backend = getattr(tokenizer, "backend_tokenizer", None)
        normalises = backend is not None and backend.normalizer is not None
        self._normalizes_specials = normalises and any(t.normalized for t in added.values() if t.special)

    def guard(self, text: str, *, tags: bool = False) -> str:
        """`text` with marks where it would become a control token (`tags`: or any other added token)."""
        text = text.replace(GUARD_MARK, "\ufffd")
        if not text.isascii():  # half a character is no text, and no tokenizer takes it
            text = text.encode("utf-8", "replace").decode("utf-8")
        wanted = self._control_or_tag if tags else self._control
        while wanted.search(text):  # what is left of one token may hold another
            text = wanted.sub(_insert_mark, text)
        text = self._guard_end(text)
        if self._normalizes_specials and any(self._has_control_token(piece) for piece in text.split(GUARD_MARK)):
            letters = [c for c in text if c != GUARD_MARK]
            return GUARD_MARK.join("\ufffd" if self._has_control_token(c) else c for c in letters)
        return text

    def guard_all(self, value: Any) -> Any:
        """`value` with each string in it guarded, keys too: arguments, and the schemas of other people's tools."""
        if isinstance(value, str):
            return self.guard(value)
        if isinstance(value, dict):
            return {self.guard_all(key): self.guard_all(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.guard_all(item) for item in value]
        return value

    def encode(self, text: str, end_text: str) -> list[int]:
        """The tokens of rendered text. Pieces are encoded as what they are, the middle of something."""
        first, *rest = text.split(GUARD_MARK)
        ids = self._encode(first)
        for piece in rest:
            if piece:
                ids += self._encode(piece) if piece[0].isspace() else self._encode(end_text + piece)[1:]
        return ids

    def _guard_end(self, text: str) -> str:
        """A string that ends as a control token begins must not be completed by what a template writes after it."""
        body = text.rstrip()
        for n in range(min(self._longest, len(body)), 0, -1):
            if body[-n:] in self._beginnings:
                at = len(body) - n + 1
                return text[:at] + GUARD_MARK + text[at:]
        return text

    def _has_control_token(self, text: str) -> bool:
        unknown = self._tokenizer.unk_token_id
        return any(i in self.ids and i != unknown for i in self._encode(text))

    def _encode(self, text: str) -> list[int]:
        # Not verbose: what is too long for the model is said by whoever asks it, not by the tokenizer's warning.
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids


def strip_guard_marks(text: str) -> str:
    """Rendered text as people read it."""
    return text.replace(GUARD_MARK, "")


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(set(texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _insert_mark(found: re.Match[str]) -> str:
    text = found.group()
    return text[0] + GUARD_MARK + text[1:] if len(text) > 1 else "\ufffd"
