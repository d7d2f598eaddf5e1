"""Only the chat template can write control tokens: text in messages is always encoded as ordinary text.

`guard` marks the places where text would become a control token. The template carries the marks along like any other
character, and `encode` cuts the rendered text at the marks, so that no piece holds a control token that the template
did not write. The model reads the same text: the pieces decode to the original.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from toolwise.errors import ModelError

GUARD_MARK = "\ufdd0"
"""A Unicode noncharacter, never used in text. If a message contains it anyway, it becomes U+FFFD."""
MAX_TOKEN_CHARS = 1_000
"""Length of a control token: all its beginnings are kept. Published ones have up to forty."""

MAX_NAME_CHARS, NAME_CACHE_SIZE = 200, 1024


class ControlTokens:
    """The control tokens of one tokenizer: those flagged as special, including eos, bos and pad.

    Tags that a tokenizer adds without the flag, such as `<tool_call>`, may appear in any text except tool results: a
    tool must not be able to write those either.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        if "\ufffd" in tokenizer.get_added_vocab():
            raise ModelError("the tokenizer has U+FFFD as a token: text that cannot be shown is written as U+FFFD")
        _check_guardable([*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens])
        added = {i: token for i, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
        special = [token.content for token in added.values() if token.special]
        self.texts: tuple[str, ...] = tuple(dict.fromkeys([*tokenizer.all_special_tokens, *special]))
        if (length := max(map(len, self.texts), default=0)) > MAX_TOKEN_CHARS:
            raise ModelError(f"the tokenizer has a control token of {length} characters, more than {MAX_TOKEN_CHARS}")
        self.ids = frozenset(tokenizer.convert_tokens_to_ids(list(self.texts)))
        tags = [token.content for token in added.values()]
        self._control = _any_of(self.texts)
        self._control_or_tag = _any_of([*self.texts, *tags])
        self._beginnings = frozenset(text[:n] for text in self.texts for n in range(1, len(text)))
        self._longest = max(map(len, self._beginnings), default=0)
        # If text is normalised before tokens are matched, other spellings of a token become that token too.
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend = backend if has_stock_methods(tokenizer, "encode", "_encode_plus") else None
        """Encodes without transformers' checks, which take as long as a short prompt; None if that may differ."""
        self._guard_name = lru_cache(NAME_CACHE_SIZE)(self.guard)
        """The names and descriptions in tools' schemas are the same in each prompt."""
        normalises = backend is not None and backend.normalizer is not None
        self._normalizes_specials = normalises and any(t.normalized for t in added.values() if t.special)

    def guard(self, text: str, *, tags: bool = False) -> str:
        """`text` with marks where it would become a control token (with `tags`, or any other added token)."""
        text = text.replace(GUARD_MARK, "\ufffd")
        if not text.isascii():  # tokenizers reject lone surrogates
            text = text.encode("utf-8", "replace").decode("utf-8")
        pattern = self._control_or_tag if tags else self._control
        while pattern.search(text):  # the remainder of one token may hold another
            text = pattern.sub(_insert_mark, text)
        text = self._guard_end(text)
        if self._normalizes_specials and any(self._has_control_token(piece) for piece in text.split(GUARD_MARK)):
            letters = [c for c in text if c != GUARD_MARK]
            return GUARD_MARK.join("\ufffd" if self._has_control_token(c) else c for c in letters)
        return text

    def guard_all(self, value: Any) -> Any:
        """`value` with every string guarded, including keys: for arguments and the schemas of user tools."""
        if isinstance(value, str):
            return self._guard_name(value) if len(value) <= MAX_NAME_CHARS else self.guard(value)
        if isinstance(value, dict):
            return {self.guard_all(key): self.guard_all(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.guard_all(item) for item in value]
        return value

    def encode(self, text: str, end_text: str) -> list[int]:
        """The tokens of rendered text. Each piece is encoded as a continuation, not as the start of a text."""
        first, *rest = text.split(GUARD_MARK)
        ids = self._encode(first)
        for piece in rest:
            if piece:
                ids += self._encode(piece) if piece[0].isspace() else self._encode(end_text + piece)[1:]
        return ids

    def _guard_end(self, text: str) -> str:
        """Guard a string that ends like the start of a control token, so that text after it cannot complete it."""
        body = text.rstrip()
        for n in range(min(self._longest, len(body)), 0, -1):
            if body[-n:] in self._beginnings:
                position = len(body) - n + 1
                return text[:position] + GUARD_MARK + text[position:]
        return text

    def _has_control_token(self, text: str) -> bool:
        unknown = self._tokenizer.unk_token_id
        return any(i in self.ids and i != unknown for i in self._encode(text))

    def _encode(self, text: str) -> list[int]:
        if self._backend is not None and is_plain(self._backend, self._tokenizer):
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        # Not verbose: the policy reports prompts that are too long for the model, so the tokenizer need not warn.
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids


def has_stock_methods(tokenizer: Any, *names: str) -> bool:
    """Whether these methods are those of transformers' classes for all fast tokenizers, not of a model's own."""
    classes = type(tokenizer).__mro__
    owners = [next((c for c in classes if name in vars(c)), object) for name in names]
    return all(owner.__module__.startswith("transformers.tokenization_utils") for owner in owners)


def is_plain(backend: Any, tokenizer: Any) -> bool:
    """Whether transformers would change no setting of the backend before it encodes a text."""
    splits: bool = backend.encode_special_tokens == tokenizer.split_special_tokens
    return splits and backend.truncation is None and backend.padding is None


def strip_guard_marks(text: str) -> str:
    """Rendered text without the marks."""
    return text.replace(GUARD_MARK, "")


def _check_guardable(tokens: Iterable[str]) -> None:
    if bad := next((token for token in tokens if GUARD_MARK in token), None):
        raise ModelError(f"the tokenizer has the token {bad!r:.80}: text with U+FDD0 cannot be told from a guard mark")


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(set(texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _insert_mark(match: re.Match[str]) -> str:
    text = match.group()
    return text[0] + GUARD_MARK + text[1:] if len(text) > 1 else "\ufffd"
