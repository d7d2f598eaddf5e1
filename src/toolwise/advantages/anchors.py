"""Which steps were in the same state: the anchors that step-level credit compares on.

The largest trap of step-level credit: hash the whole history, and no two steps ever meet. So an anchor is where the
agent *is*, not how it came there:

    auto               the environment's own `state_key` (in `step_info`), else the last observation
    state_key          the environment's alone
    last_observation   all that was said since the assistant last spoke (a tool's results, a user's words, the prompt)
    last_messages      the last `messages` messages, whoever spoke
    a function         of `step.observation_data`, yours; also by name, "package.module:name" or "path/to/file.py:name"

Text is compared with runs of white space made one blank; ids of tool calls are left out. With `similarity` < 1 texts of
one group that are alike to that degree (difflib's ratio) are one state. None is no state: such a step meets no other.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolwise.advantages.arrays import CreditError, Ints
from toolwise.config.imports import did_you_mean, load_reference
from toolwise.messages import Message
from toolwise.types import StepData

StateHash = Callable[[Any], Hashable]
"""From `step.observation_data` to whatever is equal where the state is."""


@dataclass(frozen=True, slots=True)
class StateAnchor:
    """How to tell states apart."""

    by: str | StateHash = "auto"
    messages: int = 3
    """For "last_messages": how many."""
    similarity: float = 1.0
    """Texts at least this much alike are one state; 1 wants them equal."""

    def check(self) -> None:
        """A name that is none is found before any work is done."""
        if self.by not in ("auto", "state_key"):
            self._function()
        if not 0.0 < self.similarity <= 1.0:
            raise CreditError(f"anchor_similarity is {self.similarity}; it must lie above 0, and 1 wants texts equal")

    def codes(self, steps: Sequence[StepData], groups: Ints) -> Ints:
        """A number for each step, equal within a group where the state is; `groups` has one entry a step."""
        keys = self.keys(steps)
        if self.similarity < 1.0:
            keys = _merge_similar(keys, groups.tolist(), self.similarity)
        numbers: dict[Hashable, int] = {}
        # A step without a state gets a number below 0 that nobody else has.
        return np.fromiter(
            (-1 - i if key is None else numbers.setdefault(key, len(numbers)) for i, key in enumerate(keys)),
            np.intp,
            len(keys),
        )

    def keys(self, steps: Sequence[StepData]) -> list[Hashable]:
        if self.by == "auto":
            return [_env_state_key(step) or last_observation(step.observation_data) for step in steps]
        if self.by == "state_key":
            found: list[Hashable] = [_env_state_key(step) for step in steps]
            if steps and not any(found):
                raise CreditError("state_anchor is state_key, and the environment names no state; use last_observation")
            return found
        read = self._function()
        return [_observation_key(read, step) for step in steps]

    def _function(self) -> StateHash:
        if not isinstance(self.by, str):
            return self.by
        if self.by == "last_observation":
            return last_observation
        if self.by == "last_messages":
            return last_messages(self.messages)
        if ":" not in self.by:
            known = ("auto", "state_key", "last_observation", "last_messages")
            hint = did_you_mean(self.by, known) or f"; choose {', '.join(known)}, or name a function"
            raise CreditError(f"state_anchor is {self.by!r}, which is none{hint}")
        found: StateHash = load_reference(self.by, what="state_anchor")
        return found


def as_anchor(given: StateAnchor | StateHash | str | None) -> StateAnchor:
    """What a caller may give for one: nothing, a name, a function, or the thing itself."""
    if isinstance(given, StateAnchor):
        return given
    return StateAnchor() if given is None else StateAnchor(given)


def last_observation(observation: Any) -> Hashable:
    """What was said since the assistant last spoke; an observation that is no conversation is taken whole."""
    if not _is_conversation(observation):
        return _to_hashable(observation)
    return _messages_text(_since_assistant(observation))


def last_messages(count: int) -> StateHash:
    """The last `count` messages, whoever spoke."""
    if count < 1:
        raise CreditError(f"anchor_messages is {count}; use 1 or more")

    def read(observation: Any) -> Hashable:
        if not _is_conversation(observation):
            return _to_hashable(observation)
        return _messages_text(observation[max(0, len(observation) - count) :])

    return read


def _env_state_key(step: StepData) -> Hashable:
    key = step.step_info.get("state_key")
    # Wrapped, so that a name is never taken for a text that may be like another.
    return None if key is None else ("state_key", key if isinstance(key, str) else _to_hashable(key))


def _observation_key(read: StateHash, step: StepData) -> Hashable:
    try:
        found = read(step.observation_data)
        return None if found is None else _to_hashable(found)
    except CreditError:
        raise
    except Exception as fault:
        name = getattr(read, "__name__", type(read).__name__)
        raise CreditError(
            f"the state of step {step.system_step_index} could not be read: {name}: {type(fault).__name__}: {fault}"
        ) from fault


def _is_conversation(observation: Any) -> bool:
    if not isinstance(observation, Sequence) or isinstance(observation, str | bytes) or not observation:
        return False
    last = observation[-1]
    return isinstance(last, Message) or (isinstance(last, Mapping) and "role" in last)


def _since_assistant(messages: Sequence[Any]) -> list[Any]:
    since: list[Any] = []
    for place in range(len(messages) - 1, -1, -1):
        if _field(messages[place], "role") == "assistant" and since:
            break
        since.append(messages[place])
    return since[::-1]


def _messages_text(messages: Sequence[Any]) -> str:
    return "\n".join(_message_text(message) for message in messages)


def _message_text(message: Any) -> str:
    """Who said what; what a message calls is part of it, under which id is not."""
    text = f"{_field(message, 'role')}: {_collapse_whitespace(str(_field(message, 'content') or ''))}"
    for call in _field(message, "tool_calls") or ():
        told = call.get("function", call) if isinstance(call, Mapping) else call
        arguments = _field(told, "arguments")
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, sort_keys=True, default=str)
        text += f" {_field(told, 'name')}{_collapse_whitespace(written)}"
    return text


def _field(thing: Any, name: str) -> Any:
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)


def _collapse_whitespace(text: str) -> str:
    return " ".join(text.split())


def _to_hashable(value: Any) -> Hashable:
    """A state by value: objects that hash by identity would make each step a state of its own."""
    if isinstance(value, str):
        return _collapse_whitespace(value)
    if value is None or isinstance(value, int | float | bytes):
        return value
    by_value: Any = type(value).__hash__
    if by_value is not None and by_value is not object.__hash__:
        try:
            hash(value)
            return value  # type: ignore[no-any-return]
        except TypeError:  # a tuple of lists
            pass
    try:
        plain = value.tolist() if hasattr(value, "tolist") else value
        return json.dumps(plain, sort_keys=True)
    except (TypeError, ValueError):
        raise CreditError(
            f"a state that is a {type(value).__name__} cannot be compared; give a state_hashing_function that returns "
            "text, a number or a tuple"
        ) from None


def _merge_similar(keys: Sequence[Hashable], groups: Sequence[int], min_ratio: float) -> list[Hashable]:
    """Texts of a group replaced by the first text they are like; which comes first does not depend on their order."""
    texts: dict[int, set[str]] = defaultdict(set)
    for key, group in zip(keys, groups, strict=True):
        if isinstance(key, str):
            texts[group].add(key)
    merged = {group: dict(_representatives(sorted(found, key=_by_length), min_ratio)) for group, found in texts.items()}
    return [merged[g][key] if isinstance(key, str) else key for key, g in zip(keys, groups, strict=True)]


def _representatives(texts: Sequence[str], min_ratio: float) -> Iterator[tuple[str, str]]:
    from difflib import SequenceMatcher

    kept: list[str] = []
    matcher = SequenceMatcher(autojunk=False)  # "junk" is whatever occurs often: in long texts, all there is
    for text in texts:
        matcher.set_seq2(text)
        for other in kept:
            matcher.set_seq1(other)
            # Bounds from above, cheapest first: most texts that differ are told apart by their lengths or letters.
            if all(ratio() >= min_ratio for ratio in (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)):
                yield text, other
                break
        else:
            kept.append(text)
            yield text, text


def _by_length(text: str) -> tuple[int, str]:
    return len(text), text
