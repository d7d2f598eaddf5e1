"""Protocols of what a user may replace: policy, engine, parser, estimator, loss, tracker, callback, router, learner.

Each is complete: a run calls nothing that is not in it. Optional methods have a default, so that a subclass defines
only what it needs. Tools and environments have base classes: `tools.base.BaseTool` and `envs.base.BaseEnv`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeGuard, runtime_checkable

from toolwise.messages import Message, ToolCall
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
    UpdatedTokens,
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
    stop_strings: tuple[str, ...] = ()
    """Texts that end a reply as soon as they occur in it. Their tokens belong to it, as sampled."""


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
    top_logprobs: Sequence[Sequence[tuple[int, float]]] | None = None
    """The likeliest tokens at each position with their log-probs, best first, if they were asked for."""


@runtime_checkable
class TokenGenerator(Protocol):
    """A model as a function from tokens to tokens."""

    @abstractmethod
    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation: ...


class GenerationEngine(TokenGenerator, Protocol):
    """Samples from the weights being trained: the Toolwise engine, batched transformers, or a vLLM server."""

    version: int = 0
    """Counts weight updates."""
    max_context: int = 0
    """Maximum tokens of a prompt and its continuation; 0: as many as the model takes."""
    busy_s: float = 0.0
    """Seconds in which it had any request, if it counts them."""

    @abstractmethod
    def weights_changed(self, version: int) -> None:
        """The model's parameters have changed: later tokens are sampled from the new ones."""

    def metrics(self) -> Metrics:
        """Counters since the engine was created."""
        return {}

    def close(self) -> None:
        """Stop what runs outside this process."""
        return


@runtime_checkable
class ReloadingEngine(GenerationEngine, Protocol):
    """An engine outside of this process that takes new weights while requests are under way."""

    cache_tokens: int = 0
    """What its KV cache holds; 0: it does not say."""

    @abstractmethod
    async def replace_weights(self, write: Callable[[], None], version: int) -> None:
        """Run `write`, which changes the model, and return when every later token is sampled from its weights."""


@runtime_checkable
class PrefixEngine(GenerationEngine, Protocol):
    """An engine that also scores and encodes tokens, over one prefix cache."""

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, stop_strings: Sequence[str] = ()
    ) -> Generation:
        """`stop_strings` end the text too, as those of `sampling` do."""

    async def score(
        self, prefix_ids: Sequence[int], continuations: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> Sequence[Any]:
        """`logprobs` and `entropies` of the tokens of each continuation."""

    async def encode(self, prompt_ids: Sequence[int], *, pool: Literal["last", "mean"] = "last") -> Any:
        """The hidden state of a prompt, a tensor [d]."""


@runtime_checkable
class AgentPolicy(Protocol):
    """Chooses the next action from the messages so far."""

    async def get_action(
        self, observation: Sequence[Message], available_tools_specs: Sequence[dict[str, Any]] | None = None
    ) -> tuple[dict[str, Any], str | None, dict[str, Any] | None, float | None]:
        """Return the action and, if available, the raw text, the log-probs (a `TokenLogprobs`) and a value estimate."""


@runtime_checkable
class SessionPolicy(AgentPolicy, Protocol):
    """A policy with per-episode state, such as the tokens sampled so far."""

    def session(self, *, seed: int, do_sample: bool, prompt_ids: Sequence[int] | None = None) -> AgentPolicy: ...


def has_sessions(policy: AgentPolicy) -> TypeGuard[SessionPolicy]:
    return _class_has_sessions(type(policy))


@lru_cache(maxsize=256)
def _class_has_sessions(kind: type) -> bool:
    """Decided once per class: each episode asks, and checking a protocol takes microseconds."""
    return issubclass(kind, SessionPolicy)


class ModelPolicy(SessionPolicy, TokenGenerator, Protocol):
    """The policy of a training run, on the weights being trained."""

    model: Any
    """A transformers model."""
    chat: Any
    """Its `rollout.chat_tokenizer.ChatTokenizer`."""
    engine: GenerationEngine
    sampling: Sampling

    @property
    def version(self) -> int:
        """Counts weight updates; setting it tells the engine that the weights have changed."""

    @version.setter
    def version(self, version: int) -> None: ...

    def metrics(self) -> Metrics: ...

    def close(self) -> None: ...


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


@runtime_checkable
class Tracker(Protocol):
    """Receives the metrics of a run. A subclass need only define `log`: the other methods do nothing by default."""

    def start(self, run: RunStart) -> None:
        """Called once, before the first `log`."""
        return

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after each step, and again after a validation, with other metrics for the same step."""

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
        """At the end, after the summary is written; not called if the run ends without one."""
        return


class Stateful(Protocol):
    """State that must survive a crash: registered once, saved and restored with each checkpoint."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class ToolCallParser(Protocol):
    """A format of tool calls in a model's text. A subclass need only define `parse`."""

    @abstractmethod
    def parse(self, text: str) -> tuple[str, list[ToolCall]]:
        """Split the model's text into content and calls. A call that cannot be read keeps its text as `arguments`: the
        model then sees an error, and the failure is counted."""

    def render(self, content: str, calls: Sequence[ToolCall]) -> str | None:
        """The text that `parse` reads as these, to describe the format to models whose chat template ignores tools;
        None: there is no such text."""
        return None


@runtime_checkable
class Sampler(Stateful, Protocol):
    """Chooses the tasks that are trained on, by their numbers: a curriculum. A subclass need only define `draw`; one
    with state of its own defines `state_dict` and `load_state_dict` too, so that a resumed run goes on with it.

    Its class is called with `tasks` and `seed`, if it has such parameters, and with `data.sampler_kwargs`."""

    @abstractmethod
    def draw(self, count: int) -> Sequence[int]:
        """The numbers of the next batch's tasks, `count` of them, from 0. In asynchronous training batches are drawn
        ahead of the scores that `observe` tells."""

    def observe(self, scores: Mapping[int, Sequence[float]]) -> None:
        """After each step: the number of a task -> the scores of its rollouts."""
        return

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return


@runtime_checkable
class Router(Stateful, Protocol):
    """Chooses how each prompt is rolled out. A subclass need only define `decide`: by default nothing is learned."""

    @abstractmethod
    def decide(
        self, tasks: Sequence[Task], n: int, step: int, *, label: str = "step", explore: bool = True
    ) -> list[RouteDecision]:
        """One or more decisions per task, with `n` rollouts per task in all.

        `group_id` must differ between decisions, steps and labels: a step may ask several times, with other labels.
        With `explore=False` (validation) each task gets one decision and nothing is learned from it.
        """

    def learn(self, scored: Sequence[ScoredRollout]) -> Metrics:
        """Called once per step with the rollouts of its decisions."""
        return {}

    def warm_start(self) -> None:
        """Called once before the first step, and again when a run is resumed."""
        return

    def overspend(self, scored: Sequence[ScoredRollout]) -> float | None:
        """How far the rollouts of a validation exceed the budget, as a share of it; None without a budget. A
        validation within the budget beats any that is not."""
        return None

    def save(self, folder: Path) -> None:
        """Save what routing needs without training, next to the model's weights."""
        return

    def load(self, folder: Path) -> None:
        """Load what `save` wrote."""
        return

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return


class Learner(Stateful, Protocol):
    """Owns and updates the weights."""

    version: int
    """Counts updates."""
    updated: Mapping[str, UpdatedTokens]
    """What the last update computed for each token, by rollout id."""

    def annotate(
        self, scored: Sequence[ScoredRollout], thinking: ThinkingByRollout | None = None
    ) -> list[AnnotatedRollout]: ...

    def update(self, credited: Sequence[CreditedRollout]) -> Metrics: ...

    def weights_checksum(self) -> str:
        """Changes whenever a trainable weight does."""

    def weights_to_save(self) -> Mapping[str, Any] | None:
        """The tensors that `save_model` writes, by name, not copied; None if there is no such list, so that training
        must wait for `save_model`."""

    def save_model(self, folder: Path, weights: dict[str, Any] | None = None) -> None:
        """`weights`: copies of `weights_to_save()`, to write in place of the current weights."""

    def load_weights(self, folder: Path) -> None:
        """Load what `save_model` wrote."""
