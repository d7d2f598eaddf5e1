"""The seams: what a policy, an estimator, a tracker, an executor, a router and a learner must offer, no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from toolwise.messages import Message
from toolwise.types import (
    AnnotatedRollout,
    CreditedRollout,
    RouteDecision,
    ScoredRollout,
    Task,
)

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw tokens. Log-probs are taken after `temperature`; nothing else reshapes the distribution."""

    temperature: float = 1.0
    max_new_tokens: int = 256
    do_sample: bool = True
    """False takes the likeliest token each time."""
    seed: int = 0
    """Draws depend on (seed, position) alone, never on what else is in the batch."""
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """What a model sampled after a prompt."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: Literal["stop", "length"]
    policy_version: int
    """Of the weights; of the oldest where they changed on the way."""
    token_versions: Sequence[int] | None = None
    """One a token, where they are not all the same."""


@runtime_checkable
class TokenGenerator(Protocol):
    """The seam to a model is tokens."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation: ...


@runtime_checkable
class AgentPolicy(Protocol):
    """Whoever decides, seen through messages."""

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: Sequence[dict[str, Any]] | None = None
    ) -> tuple[dict[str, Any], str | None, dict[str, Any] | None, float | None]:
        """The action, the raw text, the log-probs (a `TokenLogprobs`) and a value, where there are such."""
        ...


@runtime_checkable
class SessionPolicy(AgentPolicy, Protocol):
    """A policy that keeps something for the length of one episode, such as the tokens it has sampled."""

    def session(self, *, seed: int, do_sample: bool, prompt_ids: Sequence[int] | None = None) -> AgentPolicy: ...


Annotation = Literal["old_logprobs", "ref_logprobs", "values"]


class AdvantageEstimator(Protocol):
    """Credit: from scores to an advantage for each sampled token."""

    @property
    def needs(self) -> frozenset[Annotation]:
        """What the learner must annotate first."""
        ...

    def __call__(self, rollouts: Sequence[AnnotatedRollout]) -> list[CreditedRollout]: ...


@runtime_checkable
class MeasuredEstimator(AdvantageEstimator, Protocol):
    """An estimator that has something to report beside its credit."""

    def credit(self, rollouts: Sequence[AnnotatedRollout]) -> tuple[list[CreditedRollout], Metrics]: ...


class Tracker(Protocol):
    """Where metrics go."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Stateful(Protocol):
    """Whatever must survive a crash: registered once, saved and restored by the checkpoint."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Router(Stateful, Protocol):
    """Chooses how each prompt begins, and learns from what came of it."""

    def decide(self, tasks: Sequence[Task], n: int, step: int) -> list[RouteDecision]: ...

    def learn(self, scored: Sequence[ScoredRollout]) -> Metrics: ...


class Learner(Stateful, Protocol):
    """Owns the weights."""

    def annotate(self, scored: Sequence[ScoredRollout]) -> list[AnnotatedRollout]: ...

    def update(self, credited: Sequence[CreditedRollout]) -> Metrics: ...
