"""Rollouts and settings that the tests of a diagnosis share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolwise.config.schema import RunConfig
from toolwise.messages import Message
from toolwise.types import EvaluateResult, Rollout, ScoredRollout, StepData, StopReason, Task, Usage


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate(sections)


def task(name: str = "t", **fields: Any) -> Task:
    return Task(task_id=name, prompt=[Message(role="user", content="?")], **fields)


def scored(
    score: float | None = 1.0,
    *,
    group: str = "g",
    stop: StopReason = StopReason.ANSWERED,
    finish: str = "stop",
    rewards: Sequence[float | None] = (None,),
    valid: bool = True,
    fault: str | None = None,
    action_valid: bool = True,
    calls: dict[str, int] | None = None,
    failed: dict[str, int] | None = None,
) -> ScoredRollout:
    """One rollout with a step for each of `rewards`."""
    tokens = {"prompt_ids": [1], "token_ids": [2], "logprobs": [-1.0], "finish_reason": finish}
    steps = tuple(
        StepData(
            system_step_index=place,
            observation_data=None,
            action_taken={"type": "text"},
            resulting_messages_history=[],
            policy_logprobs=tokens,
            base_reward=reward,
            step_info={"is_action_valid": action_valid}
            | ({"calls": calls, "failed_calls": failed or {}} if calls else {}),
        )
        for place, reward in enumerate(rewards)
    )
    own = task(group)
    rollout = Rollout(f"{group}/0", group, 0, 0, own, None, steps, own.prompt, stop, Usage(), fault=fault)
    return ScoredRollout(rollout, EvaluateResult(score=score, is_score_valid=valid), steps)


def too_long() -> ScoredRollout:
    return scored(None, valid=False, stop=StopReason.PROMPT_TOO_LONG, rewards=(), fault="a prompt of 9 tokens: shorten")


UPDATED = {"actor/updates": 1.0, "actor/grad_norm": 0.5, "actor/update_norm": 0.1, "actor/lr": 1e-4}
DROPPED = {"actor/updates": 0.0}
