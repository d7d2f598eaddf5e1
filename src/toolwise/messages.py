"""Chat messages and tool calls, which read and write OpenAI's format, and `Prefix`, a view of a shared list."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from itertools import islice
from typing import Any, Generic, Literal, TypeVar, overload

from pydantic import BaseModel, ConfigDict, Field, model_serializer, model_validator

Role = Literal["system", "developer", "user", "assistant", "tool"]
T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)


class _DictModel(BaseModel):
    """A model that can be read like its OpenAI dictionary: `message["content"]`, `.get`, `in`, `dict(message)`.

    `keys()` are those of the dictionary. `[]` also returns fields that the dictionary omits, such as None for the
    `tool_calls` of a message without calls.
    """

    def keys(self) -> list[str]:
        raise NotImplementedError

    def __contains__(self, key: object) -> bool:
        return key in self.keys()

    def __getitem__(self, key: str) -> Any:
        fields = type(self).model_fields
        if key not in fields:
            raise _missing_key_error(type(self).__name__, key, {*self.keys(), *fields})
        return getattr(self, key)

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in type(self).model_fields:
            raise _missing_key_error(type(self).__name__, key, type(self).model_fields)
        setattr(self, key, value)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401  this is `get`


class _Function(dict[str, Any]):
    """The `function` object of a call in OpenAI's format."""

    def __missing__(self, key: str) -> Any:
        raise _missing_key_error("function", key, self)


def _missing_key_error(what: str, key: object, available: Iterable[str]) -> KeyError:
    import difflib  # imported here: needed only for errors

    close = difflib.get_close_matches(str(key), list(available), n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"available: {', '.join(sorted(available))}"
    return KeyError(f"a {what} has no {key!r}; {hint}")


class ToolCall(_DictModel):
    """One tool call. `arguments` stays a string if what the model wrote is not a JSON object."""

    model_config = ConfigDict(extra="forbid")

    name: str
    arguments: dict[str, Any] | str = Field(default_factory=dict)
    id: str = ""

    @model_validator(mode="before")
    @classmethod
    def _from_openai(cls, value: Any) -> Any:
        if not isinstance(value, dict) or "function" not in value:
            return value
        function = value["function"]
        if not isinstance(function, dict):
            raise ValueError("tool_calls[].function must be an object with name and arguments")
        arguments = function.get("arguments") or "{}"
        return {
            "id": value.get("id") or "",
            "name": function.get("name") or "",
            "arguments": parse_arguments(arguments) if isinstance(arguments, str) else arguments,
        }

    @model_serializer
    def to_openai(self) -> dict[str, Any]:
        text = self.arguments if isinstance(self.arguments, str) else json.dumps(self.arguments, ensure_ascii=False)
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": text}}

    def keys(self) -> list[str]:
        return ["id", "type", "function"]

    def __contains__(self, key: object) -> bool:
        return key in ("id", "type", "function", "name", "arguments")

    def __getitem__(self, key: str) -> Any:
        """OpenAI's nested `type` and `function` (whose `arguments` is a string), or a field of this model."""
        if key not in ("type", "function"):
            return super().__getitem__(key)
        value = self.to_openai()[key]
        return _Function(value) if key == "function" else value


def parse_arguments(text: str) -> dict[str, Any] | str:
    """Parse `text` as a JSON object; return `text` unchanged if it is not one, so that malformed calls are kept."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # ValueError also covers numbers with too many digits
        return text
    return value if isinstance(value, dict) else text


class Message(_DictModel):
    """One message. `content` is None only for an assistant message that consists of tool calls alone."""

    model_config = ConfigDict(extra="ignore")

    role: Role
    content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    """The assistant's thoughts, if its server returns them separately from `content`."""

    @classmethod
    def unchecked(
        cls,
        role: Role,
        content: str | None,
        *,
        tool_calls: list[ToolCall] | None = None,
        tool_call_id: str | None = None,
        name: str | None = None,
        reasoning_content: str | None = None,
    ) -> Message:
        """Build a message from fields known to be valid, without validation: a fraction of the time and memory."""
        fields = {
            "role": role,
            "content": content,
            "tool_calls": tool_calls,
            "tool_call_id": tool_call_id,
            "name": name,
            "reasoning_content": reasoning_content,
        }
        return construct(cls, fields, _MESSAGE_FIELDS)

    @model_validator(mode="before")
    @classmethod
    def _join_parts(cls, value: Any) -> Any:
        """OpenAI's content as a list of parts: text parts are joined, other parts are rejected, never dropped."""
        if isinstance(value, dict) and isinstance(value.get("content"), list):
            parts = value["content"]
            if any(not isinstance(p, dict) or p.get("type") != "text" for p in parts):
                raise ValueError("content parts other than text are not supported")
            return {**value, "content": "".join(str(p.get("text", "")) for p in parts)}
        return value

    @model_serializer
    def to_openai(self) -> dict[str, Any]:
        out: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            out["tool_calls"] = [call.to_openai() for call in self.tool_calls]
        for name in ("tool_call_id", "name", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                out[name] = value
        return out

    def keys(self) -> list[str]:
        return [name for name in type(self).model_fields if name == "content" or getattr(self, name) not in (None, [])]


def text_chars(messages: Iterable[Message]) -> int:
    """Characters of all contents."""
    return sum(len(message.content or "") for message in messages)


def construct(model: type[Model], fields: dict[str, Any], fields_set: set[str]) -> Model:
    """A model from all its fields without validation, like `model_construct` at a quarter of its time."""
    instance = model.__new__(model)
    object.__setattr__(instance, "__dict__", fields)
    object.__setattr__(instance, "__pydantic_fields_set__", fields_set)
    object.__setattr__(instance, "__pydantic_extra__", None)
    object.__setattr__(instance, "__pydantic_private__", None)
    return instance


_MESSAGE_FIELDS = set(Message.model_fields)
"""Shared by all messages built with `unchecked`; a copy of a message gets its own set."""


class Prefix(Sequence[T], Generic[T]):
    """The first `length` items of a shared append-only list, without copying.

    A rollout of n steps has n histories, each a prefix of the next. Storing them as prefixes of one list takes memory
    linear in n instead of quadratic.
    """

    __slots__ = ("_items", "_length")

    def __init__(self, items: MutableSequence[T], length: int | None = None) -> None:
        self._items = items
        self._length = len(items) if length is None else length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            if start == 0 and step == 1:
                return Prefix(self._items, stop)
            return [self._items[i] for i in range(start, stop, step)]
        if not -self._length <= index < self._length:
            raise IndexError(index)
        return self._items[index % self._length]

    def __iter__(self) -> Iterator[T]:
        return islice(self._items, self._length)

    def tolist(self) -> list[T]:
        """As a list: of an array, faster than through the iterator."""
        items = self._items[: self._length]
        return items.tolist() if isinstance(items, array) else list(items)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Prefix) and other._items is self._items:
            return self._length == other._length
        if isinstance(other, Iterable) and not isinstance(other, str | bytes):
            return list(self) == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Prefix({list(self)!r})"


def as_messages(value: Any) -> Sequence[Message]:
    """Convert OpenAI dictionaries to messages; messages are kept, and a `Prefix` is returned as is, not copied."""
    if isinstance(value, Prefix):
        return value
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError("expected a list of messages")
    # `type` because isinstance is slow on pydantic models; `model_validate` returns a subclass unchanged.
    return [m if type(m) is Message else Message.model_validate(m) for m in value]
