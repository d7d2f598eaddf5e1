"""What learners get of rollouts: tokens and columns, without messages, tasks and infos. How they divide them, and what
they send back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from toolwise.advantages.assign import sampled_tokens
from toolwise.cluster.interface import Payload
from toolwise.cluster.plain_data import from_payload, to_payload
from toolwise.cluster.rollout_codec import Contexts, encode_tokens, read_tokens
from toolwise.types import (
    AnnotatedRollout,
    CreditedRollout,
    EvaluateResult,
    Rollout,
    ScoredRollout,
    StepData,
    StopReason,
    Task,
    UpdatedTokens,
    Usage,
)

ANNOTATIONS = ("old_logprobs", "ref_logprobs", "values")
UPDATED = ("gaps", "entropies", "clipped")
_TASK = Task(task_id="", prompt=[])
T = TypeVar("T")


def credited_to_payload(credited: Sequence[CreditedRollout]) -> dict[str, Any]:
    return to_payload([_credited(rollout) for rollout in credited], "rollouts")


def credited_from_payload(payload: Payload) -> list[CreditedRollout]:
    return [_read_credited(fields) for fields in from_payload(payload)]


def scored_to_payload(scored: Sequence[ScoredRollout]) -> dict[str, Any]:
    return to_payload([_rollout(s.rollout, s.steps) for s in scored], "rollouts")


def scored_from_payload(payload: Payload) -> list[ScoredRollout]:
    return [_read_scored(fields) for fields in from_payload(payload)]


def annotations_to_payload(annotated: Sequence[AnnotatedRollout]) -> dict[str, Any]:
    return to_payload([{name: _arrays(getattr(a, name)) for name in ANNOTATIONS} for a in annotated], "annotations")


def annotations_from_payload(payload: Payload) -> list[dict[str, Any]]:
    return [{name: None if v is None else tuple(v) for name, v in row.items()} for row in from_payload(payload)]


def updated_to_payload(updated: Iterable[UpdatedTokens]) -> dict[str, Any]:
    """The columns of all rollouts, joined; empty if nothing was updated."""
    rollouts = list(updated)
    return {name: np.concatenate([getattr(one, name) for one in rollouts]) for name in UPDATED} if rollouts else {}


def updated_from_payload(payload: Payload, credited: Sequence[CreditedRollout]) -> dict[str, UpdatedTokens]:
    """By rollout id; `credited` are the rollouts that the learner was sent, in order."""
    if UPDATED[0] not in payload:
        return {}
    ends = np.cumsum([sum(map(len, rollout.advantages)) for rollout in credited])[:-1]
    columns = zip(credited, *(np.split(np.array(payload[name]), ends) for name in UPDATED), strict=True)
    return {rollout.rollout.rollout_id: UpdatedTokens(*arrays) for rollout, *arrays in columns}


def divide(items: Sequence[T], sizes: Sequence[int], groups: Sequence[str], ranks: int) -> list[list[int]]:
    """Indices of the items for each rank: groups stay whole, because their rows share prefixes, and each rank gets
    about as many tokens. With fewer groups than ranks, rollouts are divided."""
    members: dict[str, list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        members[group].append(index)
    units = list(members.values()) if len(members) >= ranks else [[index] for index in range(len(items))]
    parts: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for unit in sorted(units, key=lambda unit: -sum(sizes[index] for index in unit)):
        rank = loads.index(min(loads))
        parts[rank] += unit
        loads[rank] += sum(sizes[index] for index in unit)
    return [sorted(part) for part in parts]


def token_count(steps: Sequence[StepData]) -> int:
    """About what a rollout costs a learner: its longest row."""
    return max((len(step.tokens.prompt_ids) + sampled_tokens(step) for step in steps), default=0)


def _rollout(rollout: Rollout, steps: Sequence[StepData]) -> dict[str, Any]:
    contexts = Contexts()
    tokens = [None if step.policy_logprobs is None else encode_tokens(step.tokens, contexts) for step in steps]
    return {"id": rollout.rollout_id, "group": rollout.group_id, "tokens": tokens, "contexts": contexts.arrays()}


def _credited(credited: CreditedRollout) -> dict[str, Any]:
    annotated = credited.annotated
    return {
        **_rollout(credited.rollout, credited.steps),
        **{name: _arrays(getattr(annotated, name)) for name in ANNOTATIONS},
        "advantages": _arrays(credited.advantages),
        "returns": _arrays(credited.returns),
        "kl_coef": annotated.kl_coef,
    }


def _arrays(values: Sequence[Any] | None) -> list[Any] | None:
    return None if values is None else [np.asarray(value, dtype=np.float32) for value in values]


def _read_credited(fields: Mapping[str, Any]) -> CreditedRollout:
    scored = _read_scored(fields)
    columns: dict[str, Any] = {name: None if fields[name] is None else tuple(fields[name]) for name in ANNOTATIONS}
    returns = None if fields["returns"] is None else tuple(fields["returns"])
    annotated = AnnotatedRollout(scored, **columns, kl_coef=fields["kl_coef"])
    return CreditedRollout(annotated, scored.steps, tuple(fields["advantages"]), returns)


def _read_scored(fields: Mapping[str, Any]) -> ScoredRollout:
    contexts = Contexts.read(fields["contexts"])
    steps = tuple(
        StepData.unchecked(
            system_step_index=index,
            observation_data=(),
            action_taken={},
            raw_policy_output=None,
            resulting_messages_history=(),
            policy_logprobs=None if tokens is None else read_tokens(tokens, contexts),
            policy_value_estimate=None,
            is_done=False,
            step_info={},
            base_reward=None,
            advantage=None,
            return_to_go=None,
        )
        for index, tokens in enumerate(fields["tokens"])
    )
    rollout = Rollout(fields["id"], fields["group"], 0, 0, _TASK, None, steps, (), StopReason.ANSWERED, Usage())
    return ScoredRollout(rollout, EvaluateResult(score=0.0), steps)
