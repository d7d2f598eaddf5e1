"""Protocols of what a user may replace: policy, token generator, estimator, loss, observers, router and learner."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from toolwise.messages import Message
from toolwise.types import (
    AnnotatedRollout,
    CheckpointEvent,
    CreditedBatch,
    CreditedRollout,
    EndEvent,
    RewardSettings,
    RouteDecision,
    RunStart,
    ScoredRollout,
    StepEvent,
    Stop,
    Task,
    ThinkingByRollout,
    ValidationEvent,
)

if TYPE_CHECKING:
    from torch import Tensor

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample tokens. Log-probs are computed after `temperature`; nothing else reshapes the distribution."""

    temperature: float = 1.0
    max_new_tokens: int = 256
    do_sample: bool = True
    """False: greedy decoding."""
    seed: int = 0
    """Samples depend only on (seed, position), never on the rest of the batch."""
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """The tokens a model sampled after a prompt."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: Literal["stop", "length"]
    policy_version: int
    """Version of the weights; the oldest one if they changed during generation."""
    token_versions: Sequence[int] | None = None
    """Weight version per token; None if all are the same."""


@runtime_checkable
class TokenGenerator(Protocol):
    """A model as a function from tokens to tokens."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation: ...


@runtime_checkable
class AgentPolicy(Protocol):
    """Chooses the next action from the messages so far."""

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: Sequence[dict[str, Any]] | None = None
    ) -> tuple[dict[str, Any], str | None, dict[str, Any] | None, float | None]:
        """Return the action and, if available, the raw text, the log-probs (a `TokenLogprobs`) and a value estimate."""
        ...


@runtime_checkable
class SessionPolicy(AgentPolicy, Protocol):
    """A policy with per-episode state, such as the tokens sampled so far."""

    def session(self, *, seed: int, do_sample: bool, prompt_ids: Sequence[int] | None = None) -> AgentPolicy: ...


Annotation = Literal["old_logprobs", "ref_logprobs", "values"]


@runtime_checkable
class AdvantageEstimator(Protocol):
    """Computes an advantage for each sampled token. A subclass need only define `__call__`."""

    @property
    def needs(self) -> frozenset[Annotation]:
        """Annotations that the learner must compute first."""
        return frozenset()

    @property
    def rewards(self) -> RewardSettings | None:
        """How it combines score, step rewards and costs, if it computes rewards with `total_rewards`,
        `episodes_from_rollouts` or `token_rewards_of` of toolwise.advantages. None: it does not, and costs (of KL, of
        thinking) cannot be charged."""
        return None

    @property
    def uses_step_rewards(self) -> bool:
        """Whether it computes a return for each step or token; False: it compares whole rollouts."""
        return False

    @property
    def min_group_size(self) -> int:
        """The smallest group of rollouts of one task from which it can compute advantages."""
        return 2

    @property
    def per(self) -> Literal["token", "turn"]:
        """What the critic learns a value for, if the estimator needs values."""
        return "token"

    def learns_from_equal_scores(self, score: float) -> bool:
        """Whether a group whose rewards all equal `score` can still give nonzero advantages."""
        return False

    @abstractmethod
    def __call__(self, rollouts: Sequence[AnnotatedRollout]) -> CreditedBatch:
        """Return each rollout with its advantages, in the same order."""
        ...


@runtime_checkable
class PolicyLoss(Protocol):
    """Computes the loss of each sampled token. A subclass need only define `__call__`."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metrics that it returns; their means over tokens are logged as actor/NAME."""
        return ()

    @abstractmethod
    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, sequences: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return losses and metrics, one entry per token. Only `logprobs` has a gradient.

        `sequences` numbers the training sequence of each token; all tokens of a sequence are in one call.
        """
        ...


@runtime_checkable
class Tracker(Protocol):
    """Receives the metrics of a run. A subclass need only define `log`: the other methods do nothing by default."""

    def start(self, run: RunStart) -> None:
        """Called once, before the first `log`."""
        return

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after each step, and again after a validation, with other metrics for the same step."""
        ...

    def close(self) -> None:
        """Called once at the end, also if the run fails."""
        return


@runtime_checkable
class Callback(Protocol):
    """Follows a run and may stop it. A subclass defines the methods it needs: by default they do nothing.

    A method that returns `Stop(reason)` ends the run as Ctrl-C does: the current step is finished, a checkpoint is
    written, the summary has the reason, and the run can be resumed.
    """

    def on_step(self, event: StepEvent) -> Stop | None:
        """After each training step, when its rollouts and metrics are written."""
        return None

    def on_validation(self, event: ValidationEvent) -> Stop | None:
        """After each validation, including the one before training."""
        return None

    def on_checkpoint(self, event: CheckpointEvent) -> Stop | None:
        """After each checkpoint."""
        return None

    def on_end(self, event: EndEvent) -> None:
        """At the end, after the summary is written; not called if an error ends the run."""
        return


class Stateful(Protocol):
    """State that must survive a crash: registered once, saved and restored with each checkpoint."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Router(Stateful, Protocol):
    """Chooses a route for each prompt and learns from the scored rollouts."""

    def decide(self, tasks: Sequence[Task], n: int, step: int) -> list[RouteDecision]: ...

    def learn(self, scored: Sequence[ScoredRollout]) -> Metrics: ...


class Learner(Stateful, Protocol):
    """Owns and updates the weights."""

    def annotate(
        self, scored: Sequence[ScoredRollout], thinking: ThinkingByRollout | None = None
    ) -> list[AnnotatedRollout]: ...

    def update(self, credited: Sequence[CreditedRollout]) -> Metrics: ...
