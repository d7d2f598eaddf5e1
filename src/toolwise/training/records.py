"""Stored rollouts: `RolloutRecord`, and its reader. A file has one JSON line per rollout."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from toolwise.errors import CheckpointError
from toolwise.messages import Message, as_messages
from toolwise.routing.prompts import route_changes, undo_changes
from toolwise.training.rollout_paths import compressed_path
from toolwise.training.trackers.jsonl import read_metrics
from toolwise.types import CreditedRollout, EvaluateResult, LevelScore, ScoredRollout, StepData
from toolwise.untrusted.bounds import MAX_WARNINGS

T = TypeVar("T")
MAX_FLOAT = sys.float_info.max


class StepRecord(NamedTuple):
    """One step of a stored rollout."""

    advantage: float | None = None
    base_reward: float | None = None
    tokens: int = 0
    return_to_go: float | None = None
    anchor: int | None = None
    """The state in which the step was taken: equal for steps of a training step that were compared with each other."""

    @classmethod
    def of(cls, step: StepData, anchor: int | None = None) -> StepRecord:
        return cls(step.advantage, step.base_reward, len(step.tokens.token_ids), step.return_to_go, anchor)

    @classmethod
    def from_json(cls, step: Mapping[str, Any]) -> StepRecord:
        advantage, base_reward, return_to_go = (
            _number(step.get(name)) for name in ("advantage", "base_reward", "return_to_go")
        )
        return cls(advantage, base_reward, _typed(step, "tokens", int) or 0, return_to_go, _typed(step, "anchor", int))

    def to_json(self) -> dict[str, Any]:
        fields = self._asdict()
        return {name: fields[name] for name in fields if fields[name] is not None or name in self._fields[:3]}


@dataclass(frozen=True)
class RolloutRecord:
    """A stored rollout: one line of rollouts/*.jsonl, whose fields have the same names and order."""

    rollout_id: str = ""
    group_id: str = ""
    task_id: str = ""
    kind: Any = None
    """The task's `extra_info["kind"]`."""
    route: str | None = None
    messages: Sequence[Mapping[str, Any]] = field(default_factory=list)
    """In OpenAI's format."""
    ground_truth: Any = None
    reward_kwargs: Mapping[str, Any] = field(default_factory=dict)
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    data_source: str = ""
    score: float | None = None
    """None if there is no valid one; the metrics of such a rollout are not stored either."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    reason: str | None = None
    error: Mapping[str, Any] | None = None
    """kind, message and traceback of a reward that failed."""
    warnings: Sequence[str] = field(default_factory=list)
    stop_reason: str = ""
    fault: str | None = None
    infrastructure_fault: bool = False
    cost: float | None = None
    calls: Mapping[str, int] = field(default_factory=dict)
    failed_calls: Mapping[str, int] = field(default_factory=dict)
    trained_on: bool | None = None
    """None if the record was not written by a run."""
    steps: Sequence[StepRecord] = field(default_factory=list)
    router_log_prob: float | None = None
    """The router's log-probability of the route, or the sum of those of all turns; this and the next fields are None
    without a learned router."""
    router_logits: Sequence[float | None] | Sequence[Sequence[float | None] | None] | None = None
    """One per route, in the order of the head; None for a route that does not apply to the task. A list of them, one
    per turn, if turns were routed one by one."""
    used_any_tool: bool | None = None
    used_search: bool | None = None
    used_calculate: bool | None = None
    router_token_level_rewards: float | None = None
    """r_task − Σ λ·cost, at the rollout's last token; the others have 0. None if nothing is learned from it."""
    router_advantages: float | Sequence[float] | None = None
    """The same for all tokens of the rollout, or of a turn: one per turn, if they were routed one by one."""
    router_returns: float | Sequence[float] | None = None
    """As in GRPO equal to the advantages; of each turn the rewards less λ·cost from it on."""
    answered_by: str = ""
    """The name of another model that wrote the rollout; empty: the one being trained."""
    turn_routes: Sequence[Mapping[str, Any]] = field(default_factory=list)
    """route, log_prob, logits and advantage of each turn, if they were routed one by one."""
    unrouted: Sequence[tuple[int, Mapping[str, Any] | None]] = field(default_factory=list)
    """Index and original of the messages that the route has changed; None for one that it added."""
    thinking: Sequence[Mapping[str, Any]] = field(default_factory=list)
    """The steps whose thinking levels were compared: see `thinking_records`."""

    @property
    def original_messages(self) -> list[Message]:
        """`messages` as they were before the route changed the prompt."""
        changes = [(index, None if m is None else Message.model_validate(m)) for index, m in self.unrouted]
        return undo_changes(as_messages(self.messages), changes)

    @classmethod
    def of(cls, scored: ScoredRollout, credited: CreditedRollout | None = None) -> RolloutRecord:
        """The record of a rollout, with advantages if the update used it."""
        rollout, result, router = scored.rollout, scored.result, scored.router
        logits, advantages, returns = _route_columns(scored)
        steps = credited.steps if credited is not None else scored.steps
        anchors = None if credited is None or credited.parts is None else credited.parts.anchors
        return cls(
            rollout_id=rollout.rollout_id,
            group_id=rollout.group_id,
            task_id=rollout.task.task_id,
            kind=rollout.task.extra_info.get("kind"),
            route=rollout.route,
            messages=[m.to_openai() for m in rollout.messages],
            ground_truth=rollout.task.ground_truth,
            reward_kwargs=rollout.task.reward_kwargs,
            extra_info=rollout.task.extra_info,
            data_source=rollout.task.data_source,
            score=result.score if result.has_valid_score else None,
            metrics=_valid_metrics(result),
            reason=result.reason,
            error=result.error.model_dump() if result.error else None,
            warnings=_first_warnings(scored.warnings),
            stop_reason=rollout.stop_reason.value,
            fault=rollout.fault,
            infrastructure_fault=rollout.infrastructure_fault,
            cost=scored.cost,
            calls=dict(rollout.usage.calls),
            failed_calls=dict(rollout.usage.failed_calls),
            trained_on=credited is not None,
            steps=[StepRecord.of(s, anchor) for s, anchor in zip(steps, anchors or [None] * len(steps), strict=True)],
            router_log_prob=rollout.router_log_prob,
            router_logits=logits,
            used_any_tool=None if router is None else router.used_any_tool,
            used_search=None if router is None else router.used_search,
            used_calculate=None if router is None else router.used_calculate,
            router_token_level_rewards=None if router is None else router.reward,
            router_advantages=advantages,
            router_returns=returns,
            answered_by=rollout.answered_by,
            turn_routes=_turn_routes(scored),
            unrouted=[(i, None if m is None else m.to_openai()) for i, m in route_changes(rollout.messages)],
            thinking=[] if credited is None else thinking_records(credited),
        )

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> RolloutRecord:
        """Read a stored object. Unknown fields are ignored; fields that an older file lacks, or whose value has
        another type, keep their default."""
        steps = [step if isinstance(step, dict) else {} for step in _typed(row, "steps", list) or ()]
        return cls(
            rollout_id=str(row.get("rollout_id") or ""),
            group_id=str(row.get("group_id") or ""),
            task_id=str(row.get("task_id") or ""),
            kind=row.get("kind"),
            route=_typed(row, "route", str),
            messages=[message for message in _typed(row, "messages", list) or () if isinstance(message, dict)],
            ground_truth=row.get("ground_truth"),
            reward_kwargs=_typed(row, "reward_kwargs", dict) or {},
            extra_info=_typed(row, "extra_info", dict) or {},
            data_source=str(row.get("data_source") or ""),
            score=_number(row.get("score")),
            metrics={
                name: number
                for name, value in (_typed(row, "metrics", dict) or {}).items()
                if (number := _number(value)) is not None
            },
            reason=_typed(row, "reason", str),
            error=_typed(row, "error", dict),
            warnings=_typed(row, "warnings", list) or [],
            stop_reason=str(row.get("stop_reason") or ""),
            fault=_typed(row, "fault", str),
            infrastructure_fault=row.get("infrastructure_fault") is True,
            cost=_number(row.get("cost")),
            calls=_typed(row, "calls", dict) or {},
            failed_calls=_typed(row, "failed_calls", dict) or {},
            trained_on=bool(row["trained_on"]) if "trained_on" in row else None,
            steps=[StepRecord.from_json(step) for step in steps],
            router_log_prob=_number(row.get("router_log_prob")),
            router_logits=_numbers(row.get("router_logits")),
            used_any_tool=_typed(row, "used_any_tool", bool),
            used_search=_typed(row, "used_search", bool),
            used_calculate=_typed(row, "used_calculate", bool),
            router_token_level_rewards=_number(row.get("router_token_level_rewards")),
            router_advantages=_number_or_numbers(row.get("router_advantages")),
            router_returns=_number_or_numbers(row.get("router_returns")),
            answered_by=str(row.get("answered_by") or ""),
            turn_routes=[turn for turn in _typed(row, "turn_routes", list) or () if isinstance(turn, dict)],
            unrouted=[
                (change[0], change[1])
                for change in _typed(row, "unrouted", list) or []
                if isinstance(change, list) and len(change) == 2 and isinstance(change[0], int)
            ],
            thinking=[step for step in _typed(row, "thinking", list) or () if isinstance(step, dict)],
        )

    def to_json(self) -> dict[str, Any]:
        """Without the fields of a router, or of thinking, if there was none."""
        record = vars(self) | {"steps": [step.to_json() for step in self.steps]}
        return {
            name: value for name, value in record.items() if name not in _OPTIONAL_FIELDS or value not in (None, "", [])
        }

    @property
    def correct(self) -> bool | None:
        """By the metric `correct`, else by a score ≥ 1 (yes) or ≤ 0 (no); None if neither tells."""
        if "correct" in self.metrics:
            return self.metrics["correct"] >= 0.5
        return None if self.score is None or 0 < self.score < 1 else self.score >= 1


_OPTIONAL_FIELDS = frozenset(list(RolloutRecord.__dataclass_fields__)[-12:])


def _thought(score: LevelScore) -> str | None:
    """What was written at a level that was not used; its whole text if it has no part that is named as the thought."""
    other = score.alternative
    return None if other is None or not score.thinking_tokens else other.thought or other.text


def thinking_records(credited: CreditedRollout) -> list[dict[str, Any]]:
    """For each step whose thinking levels were compared: the level used, and of each level the thought, its tokens, and
    mean log-prob, entropy and advantage of the action. The thought is None for a level without one, and for the level
    used, whose thought is in the message."""
    thinking, parts = credited.annotated.thinking, credited.parts
    records: list[dict[str, Any]] = []
    for index, step in enumerate(thinking.steps if thinking is not None else ()):
        if step.group is None:
            continue
        advantages = {} if parts is None else dict(enumerate(parts.levels.get(index, ()), start=1))
        levels = [
            {
                "level": score.level,
                "thought": _thought(score),
                "tokens": score.thinking_tokens,
                "action_logprob": score.action_logprob,
                "action_entropy": score.action_entropy,
                "advantage": advantages.get(score.level),
            }
            for score in step.group.scores
        ]
        records.append({"step": index, "level": step.group.level, "levels": levels})
    return records


def _route_columns(scored: ScoredRollout) -> tuple[Any, Any, Any]:
    """`router_logits`, `router_advantages` and `router_returns`; None where there are none."""
    rollout, router = scored.rollout, scored.router
    if rollout.turn_routes:
        logits = [turn.logits for turn in rollout.turn_routes]
        credit = () if router is None else (router.turn_advantages, router.turn_returns)
        advantages, returns = (list(values) or None for values in credit or ((), ()))
        return (logits if any(turn is not None for turn in logits) else None), advantages, returns
    advantage = None if router is None else router.advantage
    return rollout.router_logits, advantage, advantage


def _turn_routes(scored: ScoredRollout) -> list[dict[str, Any]]:
    advantages = () if scored.router is None else scored.router.turn_advantages
    return [
        {"route": turn.route, "log_prob": turn.log_prob, "logits": turn.logits, "advantage": advantage}
        for turn, advantage in itertools.zip_longest(scored.rollout.turn_routes, advantages)
    ]


def read_records(path: Path) -> list[RolloutRecord]:
    """All rollouts of a file that a run wrote, also if it has been compressed since it was found. A last line cut off
    by a crash is omitted."""
    for found in (path, compressed_path(path)):
        try:
            return [RolloutRecord.from_json(line) for line in read_metrics(found, missing_ok=False)]
        except FileNotFoundError:
            continue
    raise CheckpointError(f"{path} is gone: it was there a moment ago; try again")


def _typed(row: Mapping[str, Any], name: str, kind: type[T]) -> T | None:
    value = row.get(name)
    return value if isinstance(value, kind) else None


def _number(value: Any) -> float | None:
    """`value` if it is a finite number; a huge integer would not fit a float."""
    in_range = isinstance(value, int | float) and not isinstance(value, bool) and -MAX_FLOAT <= value <= MAX_FLOAT
    return float(value) if in_range else None


def _numbers(values: Any) -> list[Any] | None:
    """A list of numbers, of such lists, or of None where there is neither."""
    if not isinstance(values, list):
        return None
    return [[_number(v) for v in value] if isinstance(value, list) else _number(value) for value in values]


def _number_or_numbers(value: Any) -> Any:
    return _numbers(value) if isinstance(value, list) else _number(value)


def _valid_metrics(result: EvaluateResult) -> dict[str, float]:
    metrics = result.metrics.items() if result.has_valid_score else ()
    return {name: metric.score for name, metric in metrics if metric.is_score_valid}


def _first_warnings(warnings: Sequence[str]) -> list[str]:
    omitted = len(warnings) - MAX_WARNINGS
    return [*warnings[:MAX_WARNINGS], *([f"… and {omitted:,} more"] if omitted > 0 else ())]
