"""`SampledTokens`: what a policy sampled in one turn, as one validated, compact value."""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, SupportsIndex, TypedDict

from toolwise.messages import Prefix

Alignment = Literal["first", "clean", "realigned", "forked"]
"""How a turn's prompt continues the previous one: see rollout/tokens.py."""
TOKEN_COUNTS = PROMPT_TOKENS, COMPLETION_TOKENS = "prompt_tokens", "completion_tokens"
"""Keys of a reply without token ids: how many tokens the server read and sampled."""


class TokenLogprobs(TypedDict):
    """The dictionary in which a policy returns the tokens of one turn. `prompt_ids` is everything the model saw before
    them."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    prompt_ids: Sequence[int]
    finish_reason: Literal["stop", "length", "tool_calls", "stop_string"]
    policy_version: int
    alignment: NotRequired[Alignment]
    token_versions: NotRequired[Sequence[int]]


@dataclass(frozen=True, slots=True, eq=False)
class SampledTokens(Mapping[str, Any]):
    """The tokens of one turn. As a mapping it has the keys of the dictionary that the policy returned."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """One per sampled token."""
    prompt_ids: Sequence[int]
    finish_reason: str | None = None
    """"length" if the reply was cut off at its length limit, "stop_string" if one of `rollout.stop` ended it."""
    policy_version: int | None = None
    alignment: Alignment | None = None
    has_ids: bool = True
    """False: the policy returned text without token ids, which can be evaluated but not trained on."""
    extra: Mapping[str, Any] | None = None
    """Other keys that the policy returned."""
    token_versions: Sequence[int] | None = None
    """Version of the weights per token, if they changed within the turn; `policy_version` is the oldest one."""

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(
                f"got {len(self.token_ids)} token_ids but {len(self.logprobs)} logprobs: every sampled token needs one"
            )
        if self.token_versions is not None and len(self.token_versions) != len(self.token_ids):
            raise ValueError(f"got {len(self.token_versions)} token_versions for {len(self.token_ids)} token_ids")

    @classmethod
    def from_dict(cls, values: dict[str, Any] | SampledTokens) -> SampledTokens:
        """Validate and pack a `TokenLogprobs`; raises ValueError. `token_ids`, `logprobs` and `prompt_ids` come
        together; without `token_ids`, every key is optional."""
        if type(values) is cls:  # faster than isinstance, which asks `Mapping`
            return values
        if not isinstance(values, dict):
            raise ValueError(f"log-probs must be a TokenLogprobs or None, not {type(values).__name__}")
        has_ids = values.get("token_ids") is not None
        token_ids, logprobs, prompt_ids = [_pack(values, key) for key in _SEQUENCES] if has_ids else ((), (), ())
        own_keys = _ALL_KEYS if has_ids else _LABELS
        if not math.isfinite(sum(logprobs)):
            raise ValueError("logprobs contain NaN or infinity: are the model's weights broken?")
        return cls(
            token_ids,
            logprobs,
            prompt_ids,
            _checked(values, "finish_reason", str),
            _checked(values, "policy_version", int),
            _checked(values, "alignment", str),
            has_ids,
            None if values.keys() <= own_keys else {key: values[key] for key in values.keys() - own_keys},
            array("q", versions) if has_ids and (versions := values.get("token_versions")) is not None else None,
        )

    def to_dict(self) -> dict[str, Any]:
        """The dictionary that the policy returned."""
        keys = _ALL_KEYS if self.has_ids else _LABELS
        return {key: value for key in keys if (value := getattr(self, key)) is not None} | dict(self.extra or {})

    @property
    def prompt_count(self) -> int:
        """Tokens that were read; without ids, as many as the server says."""
        return self._count(self.prompt_ids, PROMPT_TOKENS)

    @property
    def sampled_count(self) -> int:
        """Tokens that were sampled; without ids, as many as the server says."""
        return self._count(self.token_ids, COMPLETION_TOKENS)

    def _count(self, ids: Sequence[int], name: str) -> int:
        said = None if self.has_ids or self.extra is None else self.extra.get(name)
        return said if type(said) is int and said >= 0 else len(ids)

    def __getitem__(self, key: str) -> Any:
        return self.to_dict()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_dict())

    def __len__(self) -> int:
        return len(self.to_dict())


NO_TOKENS = SampledTokens((), (), (), has_ids=False)

_SEQUENCES = {"token_ids": "i", "logprobs": "df", "prompt_ids": "i"}
"""Keys that hold a sequence, and the types of array that are kept; the first one packs anything else."""
_LABELS = {"finish_reason", "policy_version", "alignment"}
_ALL_KEYS = {*_SEQUENCES, *_LABELS, "token_versions"}


def _pack(values: dict[str, Any], key: str) -> Sequence[Any]:
    sequence, typecodes = values.get(key), _SEQUENCES[key]
    if type(sequence) is Prefix:  # append-only
        return sequence
    if sequence is None:
        raise ValueError(f"got token_ids without {key}: return token_ids, logprobs and prompt_ids, or no token_ids")
    known = type(sequence) is array and sequence.typecode in typecodes
    try:
        packed = array(sequence.typecode if known else typecodes[0], sequence)  # a copy: the policy may reuse its own
    except (TypeError, ValueError, OverflowError) as fault:
        kind = "log-probs" if key == "logprobs" else "token ids"
        raise ValueError(f"{key} must be a list of {kind}: {fault}") from None
    if key != "logprobs" and packed and (lowest := min(packed)) < 0:
        raise ValueError(f"{key} contain {lowest}: token ids are 0 or more")
    return packed


def _checked(values: dict[str, Any], key: str, kind: type) -> Any:
    value = values.get(key)
    if value is not None and not isinstance(value, kind):
        if kind is int and isinstance(value, SupportsIndex):  # a NumPy integer is one too
            return operator.index(value)
        raise ValueError(f"{key} must be of type {kind.__name__}, not {type(value).__name__}")
    return value
