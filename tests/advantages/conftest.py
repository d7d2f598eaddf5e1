"""Fixtures that build rollouts for the estimators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from toolwise.messages import Message
from toolwise.types import AnnotatedRollout, EvaluateResult, Rollout, ScoredRollout, StepData, StopReason, Task, Usage


def make_step(
    index: int = 0, *, state: Any = None, tokens: int | None = 1, logprob: float = -1.0, **fields: Any
) -> Any:
    info = {} if state is None else {"state_key": state}
    drawn = {"token_ids": [7] * (tokens or 0), "logprobs": [logprob] * (tokens or 0), "prompt_ids": [1]}
    given: dict[str, Any] = {
        "system_step_index": index,
        "observation_data": [Message(role="user", content="?")],
        "action_taken": {"type": "text"},
        "resulting_messages_history": [],
        "policy_logprobs": None if tokens is None else drawn,
        "step_info": info | fields.pop("info", {}),
    }
    return StepData(**(given | fields))


def make_rollout(
    score: float,
    group: str = "g",
    steps: Sequence[StepData] = (),
    *,
    values: Sequence[Sequence[float]] | None = None,
    ref: Sequence[Sequence[float]] | None = None,
    old: Sequence[Sequence[float]] | None = None,
    stop: StopReason = StopReason.ANSWERED,
    cost: float = 0.0,
    metrics: Mapping[str, float] | None = None,
) -> AnnotatedRollout:
    task = Task(task_id=group, prompt=[Message(role="user", content="?")])
    made = tuple(steps)
    rollout = Rollout("r", group, 0, 0, task, None, made, task.prompt, stop, Usage(cost=cost))
    arrays = [None if part is None else tuple(np.array(a, np.float32) for a in part) for part in (old, ref, values)]
    return AnnotatedRollout(
        ScoredRollout(rollout, EvaluateResult(score=score, metrics=dict(metrics or {})), made), *arrays
    )


@pytest.fixture(scope="session")
def step() -> Callable[..., StepData]:
    return make_step


@pytest.fixture(scope="session")
def rollout() -> Callable[..., AnnotatedRollout]:
    return make_rollout
