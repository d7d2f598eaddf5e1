"""The types passed between stages, from a task to a rollout ready for the update.

    Task ─► RouteDecision ─► Rollout ─► ScoredRollout ─► AnnotatedRollout ─► CreditedRollout

Each value is complete when it is created: no stage fills in fields of another stage's output.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypedDict

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, field_serializer, field_validator

from toolwise.messages import Message, Prefix, ToolCall, as_messages, construct
from toolwise.types.parts import AdvantageParts
from toolwise.types.results import EvaluateResult
from toolwise.types.thinking import RolloutThinking
from toolwise.types.tokens import NO_TOKENS, SampledTokens
from toolwise.types.turns import TurnRoute, TurnRouting
from toolwise.untrusted.patterns import compile_pattern

if TYPE_CHECKING:
    from toolwise.types.thinking import Floats

Messages = Annotated[
    Sequence[Message],
    PlainValidator(as_messages),
    PlainSerializer(lambda messages: [m.to_openai() for m in messages]),
]

Tokens = Annotated[SampledTokens, PlainValidator(SampledTokens.from_dict)]


class Task(BaseModel):
    """One row of a dataset: the prompt, the tools, and what the reward needs."""

    model_config = ConfigDict(extra="forbid")

    task_id: str
    """Unique within its file; each group of rollouts gets a separate id."""
    prompt: Messages
    prompt_ids: list[int] | None = None
    """A tokenized prompt, used instead of rendering `prompt`."""
    ground_truth: Any = None
    data_source: str = ""
    ability: str = ""
    tools: list[str] | None = None
    """Names of the tools offered for this task; None offers all tools of the run."""
    tools_kwargs: dict[str, dict[str, dict[str, Any]]] = Field(default_factory=dict)
    """tool -> {create_kwargs, execute_kwargs, calc_reward_kwargs, release_kwargs}"""
    interaction_kwargs: dict[str, Any] = Field(default_factory=dict)
    reward_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the reward: other columns of the row, and the task's evaluation criteria."""
    extra_info: dict[str, Any] = Field(default_factory=dict)
    termination_regex: str | None = None
    """The episode ends when the assistant's text matches it. Python syntax without look-around and back-references,
    which cannot be matched in linear time."""

    @field_validator("termination_regex")
    @classmethod
    def _check_regex(cls, pattern: str | None) -> str | None:
        if pattern:
            compile_pattern(pattern)
        return pattern


class Action(TypedDict):
    """A policy's decision. `name` and `arguments` are those of the first call; `tool_calls` has all calls."""

    type: Literal["text", "tool_call", "terminate"]
    content: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[dict[str, Any] | str]
    tool_calls: NotRequired[list[ToolCall]]
    reasoning_content: NotRequired[str]
    """Thoughts that are not part of `content`: kept in the conversation and sent back in later turns."""


class StepData(BaseModel):
    """One decision of the policy and its outcome."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    system_step_index: int
    observation_data: Any
    """What the policy saw; for chat agents the messages so far, as a prefix of the rollout's message list."""
    action_taken: dict[str, Any]
    raw_policy_output: str | None = None
    resulting_messages_history: Messages
    policy_logprobs: Tokens | None = None
    """What the policy sampled, if it says so. Given as a `TokenLogprobs` dictionary, which it still reads like."""
    policy_value_estimate: float | None = None
    is_done: bool = False
    step_info: dict[str, Any] = Field(default_factory=dict)
    base_reward: float | None = None
    advantage: float | None = None
    return_to_go: float | None = None

    @property
    def tokens(self) -> SampledTokens:
        """`policy_logprobs`, also where an unvalidated copy has a dictionary; empty if the policy returned None."""
        return NO_TOKENS if self.policy_logprobs is None else SampledTokens.from_dict(self.policy_logprobs)

    @classmethod
    def unchecked(cls, **fields: Any) -> StepData:
        """Build a step from all its fields without validation: in less time and memory."""
        return construct(cls, fields, _STEP_FIELDS)

    @field_serializer("observation_data", "policy_logprobs")
    def _plain(self, value: Any) -> Any:
        """Convert shared prefixes and packed arrays to lists, so that a step can be written as JSON."""
        if isinstance(value, dict | SampledTokens):
            return {key: self._plain(item) for key, item in value.items()}
        return list(value) if isinstance(value, Prefix | array) else value


_STEP_FIELDS = set(StepData.model_fields)
"""Shared by all steps built with `unchecked`; a copy of a step gets its own set."""


class StopReason(StrEnum):
    """Why an episode ended."""

    ANSWERED = "answered"
    TERMINATED = "terminated"
    ENV_DONE = "env_done"
    ENV_TRUNCATED = "env_truncated"
    REGEX = "regex"
    MAX_STEPS = "max_steps"
    MAX_TOKENS = "max_tokens"
    PROMPT_TOO_LONG = "prompt_too_long"
    """The prompt does not fit the model's context: nothing was sampled, so there is nothing to score."""
    REPEATED_INVALID = "repeated_invalid"
    DEADLINE = "deadline"
    POLICY_FAULT = "policy_fault"
    ENV_FAULT = "env_fault"
    CRITICAL_ERROR = "critical_error"
    """The environment reports that the agent's action cannot be undone. The agent caused it, so it is trained on."""

    @property
    def trainable(self) -> bool:
        """False if the infrastructure failed or the prompt did not fit: the policy did not cause it."""
        return self not in (
            StopReason.PROMPT_TOO_LONG,
            StopReason.DEADLINE,
            StopReason.POLICY_FAULT,
            StopReason.ENV_FAULT,
        )

    @property
    def truncated(self) -> bool:
        return self in (
            StopReason.MAX_STEPS,
            StopReason.MAX_TOKENS,
            StopReason.ENV_TRUNCATED,
            StopReason.DEADLINE,
        )


CountUsage = Callable[[Sequence[StepData]], tuple[Mapping[str, int], float]]
OVER_BUDGET = "over_budget"
"""The key in `Usage.failed_calls` of calls that a cap on the cost refused."""
PriceCalls = Callable[[Mapping[str, int]], float]
"""Total cost of calls, given as tool name -> number of calls."""


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """How the rollouts of one group start: the messages and tools after routing."""

    task: Task
    group_id: str
    """Unique per prompt, route and training step: advantages are computed within a group."""
    n: int
    """Number of rollouts."""
    seed: int
    prompt: Sequence[Message]
    tools: tuple[str, ...] | None = None
    """Names of the tools offered; None offers those of the task."""
    route: str | None = None
    log_prob: float | None = None
    forbidden: tuple[str, ...] = ()
    """Tools that are shown to the model but refused when called."""
    prompt_id: str = ""
    """Identifies the prompt if it has several groups, one per route."""
    count_usage: CountUsage | None = None
    """Counts the calls in a rollout's steps, by tool, and their cost, where none are executed; None: the environment
    counts them."""
    policy: Any = None
    """The `AgentPolicy` that acts; None: that of the run."""
    answered_by: str = ""
    """The name of another model that acts, whose tokens must not train the actor; empty: the model being trained."""
    price: float = 0.0
    """Cost of a rollout besides its calls."""
    logits: tuple[float | None, ...] | None = None
    """The router's logits, one per route; None for a route that does not apply to the task."""
    turns: TurnRouting | None = None
    """Routes each turn of the rollouts; None: the route stays."""
    wrap_env: Callable[[Any], Any] | None = None
    """Wraps the environment of each rollout, such as to hold it to a cost."""
    price_calls: PriceCalls | None = field(default=None, compare=False)
    """Prices the calls of a rollout, those that were refused included; None: the tools' own prices."""
    budget: float | None = None
    """What the agent is told that it may spend on average; None: what the configuration says."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The resources an episode used."""

    calls: Mapping[str, int] = field(default_factory=dict)
    """tool name -> number of calls, including failed ones"""
    failed_calls: Mapping[str, int] = field(default_factory=dict)
    """kind of failure (unknown_tool, forbidden_tool, bad_json, bad_arguments, exception, timeout, tool_error,
    server_down) -> count"""
    cost: float = 0.0
    """Total cost of the calls made, including those that could not be parsed, and of the route: by `[router]` if it has
    prices, else by those of the tools. Without prices of tokens and seconds: see `ScoredRollout.cost`."""
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    seconds: float = 0.0
    queue_s: float = 0.0
    """Total time calls waited for a worker or a slot: part of `seconds`, but not counted against tool deadlines."""
    longest_queue_s: float = 0.0
    """The longest wait of a single call."""
    tool_s: Mapping[str, float] = field(default_factory=dict)
    """tool name -> measured seconds of its calls, without the waiting"""
    reply_s: float = 0.0
    """Measured seconds of the model's replies, without the waiting for a slot."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One episode, complete or not."""

    rollout_id: str
    group_id: str
    batch_data_id: int
    rollout_offset: int
    task: Task
    route: str | None
    steps: tuple[StepData, ...]
    messages: Sequence[Message]
    stop_reason: StopReason
    usage: Usage
    tool_rewards: Mapping[str, float] = field(default_factory=dict)
    """tool name -> result of its calc_reward"""
    fault: str | None = None
    """Error message, if `stop_reason` is a fault."""
    infrastructure_fault: bool = False
    """Whether something behind a tool failed (server down, worker dead) although the episode continued."""
    router_log_prob: float | None = None
    """The router's log-probability of `route`; of turns that were routed one by one the sum over `turn_routes`."""
    router_logits: tuple[float | None, ...] | None = None
    """As in `RouteDecision.logits`; those of turns are in `turn_routes`."""
    answered_by: str = ""
    """As in `RouteDecision`: another model wrote this rollout."""
    result: EvaluateResult | None = None
    """The reward that an outside agent reported for itself."""
    turn_routes: tuple[TurnRoute, ...] = ()
    """The route of each turn, if they were routed one by one; one more than `steps` if the last turn failed."""

    @property
    def trainable(self) -> bool:
        """Whether the policy caused the outcome; if not, the rollout is stored and scored but not trained on."""
        return self.stop_reason.trainable and not self.infrastructure_fault

    @property
    def unanswered(self) -> bool:
        """Whether the episode ended before the agent acted: its messages are only the prompt, nothing to score."""
        return not self.steps and not self.stop_reason.trainable

    @property
    def prompt_length(self) -> int:
        """Number of `messages` before the first step; a prompt may itself contain assistant messages."""
        assistant_indices = [index for index, message in enumerate(self.messages) if message.role == "assistant"]
        n_actions = min(len(self.steps), len(assistant_indices))
        return assistant_indices[-n_actions] if n_actions else min(len(self.task.prompt), len(self.messages))


@dataclass(frozen=True, slots=True)
class RouterCredit:
    """What a rollout used, and what its router learns from it; None where it learns nothing."""

    used_any_tool: bool
    used_search: bool
    used_calculate: bool
    """Whether a tool of the family was called, as the cost counts calls."""
    reward: float | None = None
    """r_task − Σ λ·cost, the router's reward: `router_token_level_rewards`."""
    advantage: float | None = None
    """Of the rollout's route: `router_advantages`, and as in GRPO also `router_returns`."""
    turn_advantages: tuple[float, ...] = ()
    """Of the route of each turn, if they were routed one by one."""
    cost: float | None = None
    """What the rollout cost in the unit of the first budget."""
    turn_returns: tuple[float, ...] = ()
    """Of each turn routed: rewards less λ·cost from it on; the first is `reward`."""


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """A rollout with its reward; `steps` carry their base rewards."""

    rollout: Rollout
    result: EvaluateResult
    steps: tuple[StepData, ...]
    warnings: tuple[str, ...] = ()
    """Step rewards that match no step: "unmatched step_index 7: …"."""
    router: RouterCredit | None = None
    """None if it was not routed by a learned router."""

    @property
    def score(self) -> float:
        """The score; raises if there is none, so check `result.has_valid_score` first."""
        if self.result.score is None:
            raise ValueError(f"rollout {self.rollout.rollout_id} has no score")
        return self.result.score

    @property
    def cost(self) -> float:
        """In the unit of its router's first budget; without a router, by the tools' own prices."""
        known = None if self.router is None else self.router.cost
        return self.rollout.usage.cost if known is None else known

    @property
    def trainable(self) -> bool:
        return (
            self.result.has_valid_score
            and self.rollout.trainable
            and not self.rollout.answered_by
            and any(step.policy_logprobs is not None for step in self.steps)
        )


@dataclass(frozen=True, slots=True)
class AnnotatedRollout:
    """A scored rollout with the annotations that the estimator needs, one array per step."""

    scored: ScoredRollout
    old_logprobs: tuple[Floats, ...] | None = None
    ref_logprobs: tuple[Floats, ...] | None = None
    values: tuple[Floats, ...] | None = None
    thinking: RolloutThinking | None = None
    """Thoughts at the other thinking levels, and the action's log-prob after each."""
    kl_coef: float | None = None
    """β: every nat of log π_old − log π_ref of a sampled token costs this much reward; None: nothing."""


@dataclass(frozen=True, slots=True)
class CreditedRollout:
    """A rollout ready for the update: an advantage for each sampled token of each step."""

    annotated: AnnotatedRollout
    steps: tuple[StepData, ...]
    advantages: tuple[Floats, ...]
    returns: tuple[Floats, ...] | None = None
    parts: AdvantageParts | None = None
    """What the advantages consist of, for the records; None if the estimator does not say."""

    @property
    def rollout(self) -> Rollout:
        return self.annotated.scored.rollout
