"""The arguments of a call while they are written, if the call is a JSON object in which they follow the name."""

from __future__ import annotations

import re

_KEY = re.compile(r'\s*+,\s*+"(?:arguments|parameters)"\s*+:\s*+(?=\{)')
_KEY_CHARS = 64
"""How far after the name the arguments must begin."""
_STRUCTURE = re.compile(r"[\"{}\[\]]")
_STRING_END = re.compile(r'["\\]')


class ArgumentStream:
    """Feed it the text after a call's name, in pieces of any size: returns the arguments, without the brace that closes
    them. A reader thus has valid JSON only once the whole call has been read."""

    def __init__(self) -> None:
        self.fed = 0
        """Characters of all pieces."""
        self._state = "key"
        """"key": before the arguments; "value"; "string": in one; "over": after them, or they are not an object."""
        self._held = ""
        self._depth = 0
        self._escaped = False

    def feed(self, piece: str) -> str:
        self.fed += len(piece)
        if self._state == "over":
            return ""
        if self._state == "key":
            self._held += piece
            key = _KEY.match(self._held)
            if key is None:
                if len(self._held) > _KEY_CHARS:
                    self._state = "over"
                return ""
            piece, self._held, self._state = self._held[key.end() :], "", "value"
        return piece[: self._scan(piece)]

    def _scan(self, piece: str) -> int:
        """Number of characters of `piece` that belong to the arguments, without the last brace."""
        position = 0
        while position < len(piece):
            if self._escaped:
                self._escaped = False
                position += 1
                continue
            mark = (_STRING_END if self._state == "string" else _STRUCTURE).search(piece, position)
            if mark is None:
                break
            position = mark.end()
            if mark[0] == '"':
                self._state = "value" if self._state == "string" else "string"
            elif mark[0] == "\\":
                self._escaped = True
            else:
                self._depth += 1 if mark[0] in "{[" else -1
                if self._depth == 0:
                    self._state = "over"
                    return mark.start()
        return len(piece)
