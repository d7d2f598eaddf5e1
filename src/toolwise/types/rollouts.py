"""What crosses a stage border: one type a stage, each complete when its stage hands it on.

    Task ─► RouteDecision ─► Rollout ─► ScoredRollout ─► AnnotatedRollout ─► CreditedRollout

Nothing is filled in later by somebody else: whoever holds a `ScoredRollout` knows that the score is there.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypedDict

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, field_serializer, field_validator

from toolwise.messages import Message, Prefix, ToolCall, as_messages
from toolwise.types.results import EvaluateResult
from toolwise.types.thinking import RolloutThinking
from toolwise.untrusted.patterns import compile_pattern

if TYPE_CHECKING:
    from toolwise.types.thinking import Floats

Messages = Annotated[
    Sequence[Message],
    PlainValidator(as_messages),
    PlainSerializer(lambda messages: [m.to_openai() for m in messages]),
]


class Task(BaseModel):
    """One row of a dataset: what to do, with which tools, and what counts as done."""

    model_config = ConfigDict(extra="forbid")

    task_id: str
    """Unique within its file; a group of rollouts gets a fresh id of its own."""
    prompt: Messages
    prompt_ids: list[int] | None = None
    """A prompt that came tokenised; used as it is instead of rendering `prompt`."""
    ground_truth: Any = None
    data_source: str = ""
    ability: str = ""
    tools: list[str] | None = None
    """Names of the tools on offer for this task; None offers all that the run has."""
    tools_kwargs: dict[str, dict[str, dict[str, Any]]] = Field(default_factory=dict)
    """tool -> {create_kwargs, execute_kwargs, calc_reward_kwargs, release_kwargs}"""
    interaction_kwargs: dict[str, Any] = Field(default_factory=dict)
    reward_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Other columns of the row and the task's evaluation criteria; keyword arguments of the reward."""
    extra_info: dict[str, Any] = Field(default_factory=dict)
    termination_regex: str | None = None
    """An episode ends when the assistant's text matches it. Python's syntax without look-around and back-references,
    which cannot be matched in linear time."""

    @field_validator("termination_regex")
    @classmethod
    def _check_regex(cls, pattern: str | None) -> str | None:
        if pattern:
            compile_pattern(pattern)
        return pattern


class TokenLogprobs(TypedDict):
    """What a policy sampled, token by token. `prompt_ids` is everything the model saw before."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    prompt_ids: Sequence[int]
    finish_reason: Literal["stop", "length", "tool_calls"]
    policy_version: int
    alignment: NotRequired[Literal["first", "clean", "realigned", "forked"]]
    """How this turn's prompt continues the last one: rollout/tokens.py."""


class Action(TypedDict):
    """What a policy decided. `name` and `arguments` are the first call's; `tool_calls` has them all."""

    type: Literal["text", "tool_call", "terminate"]
    content: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[dict[str, Any] | str]
    tool_calls: NotRequired[list[ToolCall]]
    reasoning_content: NotRequired[str]
    """Thoughts that are not part of `content`: kept in the conversation, and handed back in later turns."""


class StepData(BaseModel):
    """One decision of the policy and what came of it."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    system_step_index: int
    observation_data: Any
    """What the policy saw; for chat agents the messages so far, held as a prefix of the rollout's one list."""
    action_taken: dict[str, Any]
    raw_policy_output: str | None = None
    resulting_messages_history: Messages
    policy_logprobs: dict[str, Any] | None = None
    """A `TokenLogprobs`, where the policy gives one."""
    policy_value_estimate: float | None = None
    is_done: bool = False
    step_info: dict[str, Any] = Field(default_factory=dict)
    base_reward: float | None = None
    advantage: float | None = None
    return_to_go: float | None = None

    @classmethod
    def unchecked(cls, **fields: Any) -> StepData:
        """From every field, unchecked: what `model_construct` does, at a quarter of its time and less memory."""
        made = cls.__new__(cls)
        object.__setattr__(made, "__dict__", fields)
        object.__setattr__(made, "__pydantic_fields_set__", _STEP_FIELDS)
        object.__setattr__(made, "__pydantic_extra__", None)
        object.__setattr__(made, "__pydantic_private__", None)
        return made

    @field_serializer("observation_data", "policy_logprobs")
    def _plain(self, value: Any) -> Any:
        """Shared prefixes and packed arrays as plain lists, so that a step can be written as JSON."""
        if isinstance(value, dict):
            return {key: self._plain(item) for key, item in value.items()}
        return list(value) if isinstance(value, Prefix | array) else value


_STEP_FIELDS = set(StepData.model_fields)
"""One set for all steps that are made unchecked; a copy gets its own."""


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
    """The prompt does not fit the model's context: nothing was sampled, and there is nothing to score."""
    REPEATED_INVALID = "repeated_invalid"
    DEADLINE = "deadline"
    POLICY_FAULT = "policy_fault"
    ENV_FAULT = "env_fault"
    CRITICAL_ERROR = "critical_error"
    """The world says that what the agent did cannot be put right: the agent's own doing, and learned from."""

    @property
    def trainable(self) -> bool:
        """False where infrastructure failed or the prompt did not fit: not the policy's doing, so not learned from."""
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


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """How one group's rollouts begin: the messages and tools after routing."""

    task: Task
    group_id: str
    """Fresh for each prompt and training step: what advantages are compared within."""
    n: int
    """How many rollouts to make."""
    seed: int
    prompt: Sequence[Message]
    tools: tuple[str, ...] | None = None
    """Names of the tools on offer; None offers the task's own."""
    route: str | None = None
    log_prob: float | None = None
    forbidden: tuple[str, ...] = ()
    """Tools that are shown and refused when called."""
    prompt_id: str = ""
    """The prompt that the group is of, where a prompt has several: one for each route."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What an episode spent."""

    calls: Mapping[str, int] = field(default_factory=dict)
    """tool name -> calls made, failed ones included"""
    failed_calls: Mapping[str, int] = field(default_factory=dict)
    """kind of failure (unknown_tool, forbidden_tool, bad_json, bad_arguments, exception, timeout, tool_error,
    server_down) -> count"""
    cost: float = 0.0
    """The sum of the prices of the calls made, of those too that nobody could read."""
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    seconds: float = 0.0
    queue_s: float = 0.0
    """How long calls waited, together, for a worker or a place: in `seconds`, and in no tool's deadline."""
    longest_queue_s: float = 0.0
    """Of one call."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One episode, however it ended."""

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
    """tool name -> what its calc_reward gave"""
    fault: str | None = None
    """What went wrong, where `stop_reason` says that something did."""
    infrastructure_fault: bool = False
    """Something behind a tool failed on the way (a server down, a worker dead), and the episode went on."""

    @property
    def trainable(self) -> bool:
        """Whether what happened was the policy's doing; if not, it is kept and scored but not learned from."""
        return self.stop_reason.trainable and not self.infrastructure_fault

    @property
    def unanswered(self) -> bool:
        """It ended before the agent did anything. Its messages are the prompt alone: there is nothing to score."""
        return not self.steps and not self.stop_reason.trainable

    @property
    def prompt_length(self) -> int:
        """How many of `messages` came before the first step: a prompt may hold replies of the assistant too."""
        turns = [place for place, message in enumerate(self.messages) if message.role == "assistant"]
        acted = min(len(self.steps), len(turns))
        return turns[-acted] if acted else min(len(self.task.prompt), len(self.messages))


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """A rollout with its reward; `steps` carry the base rewards that the reward gave them."""

    rollout: Rollout
    result: EvaluateResult
    steps: tuple[StepData, ...]
    warnings: tuple[str, ...] = ()
    """Step rewards that fit no step, by name: "unmatched step_index 7: …"."""

    @property
    def score(self) -> float:
        """The score, where `result.counts`; asking for it otherwise is a mistake of the caller."""
        if self.result.score is None:
            raise ValueError(f"rollout {self.rollout.rollout_id} has no score")
        return self.result.score

    @property
    def trainable(self) -> bool:
        return (
            self.result.has_valid_score
            and self.rollout.trainable
            and any(step.policy_logprobs is not None for step in self.steps)
        )


@dataclass(frozen=True, slots=True)
class AnnotatedRollout:
    """A scored rollout with what only the learner knows, one array a step, where an estimator asked for it."""

    scored: ScoredRollout
    old_logprobs: tuple[Floats, ...] | None = None
    ref_logprobs: tuple[Floats, ...] | None = None
    values: tuple[Floats, ...] | None = None
    thinking: RolloutThinking | None = None
    """What the other thinking levels would have thought at its steps, and how they like its actions."""


@dataclass(frozen=True, slots=True)
class CreditedRollout:
    """A rollout ready to learn from: an advantage for each sampled token of each step."""

    annotated: AnnotatedRollout
    steps: tuple[StepData, ...]
    advantages: tuple[Floats, ...]
    returns: tuple[Floats, ...] | None = None

    @property
    def rollout(self) -> Rollout:
        return self.annotated.scored.rollout
