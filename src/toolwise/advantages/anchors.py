"""State anchors: which steps were in the same state, for step-level credit.

The main pitfall of step-level credit is to hash the whole history, so that no two steps share a state. An anchor is
where the agent *is*, not how it got there:

    auto               the environment's `state_key` (in `step_info`), or else the last observation
    state_key          only the environment's `state_key`
    last_observation   everything since the assistant's last message (tool results, user messages, the prompt)
    last_messages      the last `messages` messages of any role
    a function         of `step.observation_data`; also by name, "package.module:name" or "path/to/file.py:name"

Text is compared with whitespace collapsed and without tool call ids. With `similarity` < 1, texts of one group that are
at least that similar (difflib's ratio) are one state. A state of None matches no other step.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from toolwise.advantages.arrays import CreditError, Ints
from toolwise.config.imports import did_you_mean, load_reference
from toolwise.messages import Message
from toolwise.types import StepData

StateHash = Callable[[Any], Hashable]
"""Maps `step.observation_data` to a key that is equal for equal states."""


@dataclass(frozen=True, slots=True)
class StateAnchor:
    """How to identify states."""

    by: str | StateHash = "auto"
    messages: int = 3
    """Number of messages for "last_messages"."""
    similarity: float = 1.0
    """Texts at least this similar are one state; 1 requires equality."""

    def check(self) -> None:
        """Raises an error for an invalid setting before any work is done."""
        if self.by not in ("auto", "state_key"):
            self._function()
        if not 0.0 < self.similarity <= 1.0:
            raise CreditError(f"anchor_similarity is {self.similarity}; it must be above 0 and at most 1 (equal texts)")

    def codes(self, steps: Sequence[StepData], groups: Ints) -> Ints:
        """One code per step, equal for equal states within a group; `groups` has one entry per step."""
        keys = self.keys(steps)
        if self.similarity < 1.0:
            keys = _merge_similar(keys, groups.tolist(), self.similarity)
        code_of: dict[Hashable, int] = {}
        # A step without a state gets a unique negative code.
        return np.fromiter(
            (-1 - i if key is None else code_of.setdefault(key, len(code_of)) for i, key in enumerate(keys)),
            np.intp,
            len(keys),
        )

    def keys(self, steps: Sequence[StepData]) -> list[Hashable]:
        if self.by not in ("auto", "state_key"):
            return list(map(partial(_observation_key, self._function()), steps))
        keys = [_env_state_key(step) for step in steps]
        if self.by == "auto":
            return [key or last_observation(step.observation_data) for key, step in zip(keys, steps, strict=True)]
        if steps and not any(keys):
            raise CreditError("state_anchor is state_key, but no step has a state_key; use last_observation")
        return keys

    def _function(self) -> StateHash:
        if not isinstance(self.by, str):
            return self.by
        if self.by == "last_messages":
            return last_messages(self.messages)
        if self.by != "last_observation" and ":" not in self.by:
            known = ("auto", "state_key", "last_observation", "last_messages")
            hint = did_you_mean(self.by, known) or f"; choose {', '.join(known)}, or name a function"
            raise CreditError(f"state_anchor is {self.by!r}, an unknown name{hint}")
        loaded: StateHash = load_reference(self.by, what="state_anchor") if ":" in self.by else last_observation
        return loaded


def as_anchor(source: StateAnchor | StateHash | str | None) -> StateAnchor:
    """Accepts None (the default), a name, a function or an anchor."""
    if isinstance(source, StateAnchor):
        return source
    return StateAnchor(source or "auto")


def last_observation(observation: Any) -> Hashable:
    """Everything since the assistant's last message; an observation that is not a conversation is used as a whole."""
    return _messages_text(_since_assistant(observation)) if _is_conversation(observation) else _to_hashable(observation)


def last_messages(count: int) -> StateHash:
    """A state function: the last `count` messages of any role."""
    if count < 1:
        raise CreditError(f"anchor_messages is {count}; use 1 or more")

    def read(observation: Any) -> Hashable:
        return _messages_text(observation[-count:]) if _is_conversation(observation) else _to_hashable(observation)

    return read


def _env_state_key(step: StepData) -> Hashable:
    key = step.step_info.get("state_key")
    # Wrapped in a tuple so that a key is never merged with a similar text.
    return None if key is None else ("state_key", key if isinstance(key, str) else _to_hashable(key))


def _observation_key(state_hash: StateHash, step: StepData) -> Hashable:
    try:
        key = state_hash(step.observation_data)
        return None if key is None else _to_hashable(key)
    except CreditError:
        raise
    except Exception as fault:
        name = getattr(state_hash, "__name__", type(state_hash).__name__)
        raise CreditError(
            f"cannot compute the state of step {step.system_step_index}: {name}: {type(fault).__name__}: {fault}"
        ) from fault


def _is_conversation(observation: Any) -> bool:
    if not isinstance(observation, Sequence) or isinstance(observation, str | bytes) or not observation:
        return False
    last = observation[-1]
    return isinstance(last, Message) or (isinstance(last, Mapping) and "role" in last)


def _since_assistant(messages: Sequence[Any]) -> list[Any]:
    since: list[Any] = []
    for message in reversed(messages):
        if _field(message, "role") == "assistant" and since:
            break
        since.append(message)
    return since[::-1]


def _messages_text(messages: Sequence[Any]) -> str:
    return "\n".join(_message_text(message) for message in messages)


def _message_text(message: Any) -> str:
    text = f"{_field(message, 'role')}: {_collapse_whitespace(str(_field(message, 'content') or ''))}"
    for call in _field(message, "tool_calls") or ():
        function = call.get("function", call) if isinstance(call, Mapping) else call
        if not isinstance(arguments := _field(function, "arguments"), str):
            arguments = json.dumps(arguments, sort_keys=True, default=str)
        text += f" {_field(function, 'name')}{_collapse_whitespace(arguments)}"
    return text


def _field(message: Any, name: str) -> Any:
    return message.get(name) if isinstance(message, Mapping) else getattr(message, name, None)


def _collapse_whitespace(text: str) -> str:
    return " ".join(text.split())


def _to_hashable(value: Any) -> Hashable:
    """A key compared by value: with objects that hash by identity, every step would be a different state."""
    if isinstance(value, str):
        return _collapse_whitespace(value)
    if value is None or isinstance(value, int | float | bytes):
        return value
    hash_method: Any = type(value).__hash__
    if hash_method is not None and hash_method is not object.__hash__:
        try:
            hash(value)
            return value  # type: ignore[no-any-return]
        except TypeError:  # a tuple of lists
            pass
    try:
        return json.dumps(value.tolist() if hasattr(value, "tolist") else value, sort_keys=True)
    except (TypeError, ValueError):
        raise CreditError(
            f"states of type {type(value).__name__} cannot be compared; give a state_hashing_function that returns "
            "text, a number or a tuple"
        ) from None


def _merge_similar(keys: Sequence[Hashable], groups: Sequence[int], min_ratio: float) -> list[Hashable]:
    """Replaces each text by the first similar one of its group; independent of the order of `keys`."""
    texts: dict[int, set[str]] = defaultdict(set)
    for key, group in zip(keys, groups, strict=True):
        if isinstance(key, str):
            texts[group].add(key)
    merged = {group: dict(_representatives(items, min_ratio)) for group, items in texts.items()}
    return [merged[g][key] if isinstance(key, str) else key for key, g in zip(keys, groups, strict=True)]


def _representatives(texts: Iterable[str], min_ratio: float) -> Iterator[tuple[str, str]]:
    from difflib import SequenceMatcher

    representatives: list[str] = []
    matcher = SequenceMatcher(autojunk=False)  # autojunk drops frequent characters, which in long texts are all of them
    for text in sorted(texts, key=lambda text: (len(text), text)):
        matcher.set_seq2(text)
        for other in representatives:
            matcher.set_seq1(other)
            # Upper bounds first, cheapest first: most different texts are ruled out by their lengths or letters.
            if all(ratio() >= min_ratio for ratio in (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)):
                yield text, other
                break
        else:
            representatives.append(text)
            yield text, text
