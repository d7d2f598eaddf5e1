"""Rewards that the episode itself produced: `tools` (each tool's `calc_reward`) and `env` (the rewards of its steps).

They need no function and no sandbox, since the rollout already holds the numbers. `reward.function = "env"` scores by
the environment alone; as `reward.parts` they are weighted against functions over messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from toolwise.rewards.function import Reward, fault_result
from toolwise.rewards.signature import Signature
from toolwise.types import EvaluateResult, MetricResult, Rollout


def _tools_result(rollout: Rollout) -> EvaluateResult:
    """The sum of the tools' `calc_reward` values; 0 if there are none."""
    metrics = {f"tool/{name}": MetricResult(score=reward) for name, reward in rollout.tool_rewards.items()}
    return EvaluateResult(score=sum(rollout.tool_rewards.values()), metrics=metrics)


def _env_result(rollout: Rollout) -> EvaluateResult:
    """The sum of the step rewards from the environment or from tool calls. A rollout that met a fault gets no score."""
    if not rollout.trainable:
        return fault_result("env_fault", rollout.fault or f"the episode ended with {rollout.stop_reason.value}")
    return EvaluateResult(score=sum(step.base_reward or 0.0 for step in rollout.steps))


EPISODE_REWARDS: dict[str, Callable[[Rollout], EvaluateResult]] = {"tools": _tools_result, "env": _env_result}


def episode_reward(name: str) -> Reward:
    """A `Reward` identified by its name; it has no function."""
    return Reward(name, Signature("pointwise", ("messages", "ground_truth")), reference=name)


def score_episodes(name: str, rollouts: Sequence[Rollout]) -> list[EvaluateResult]:
    return [EPISODE_REWARDS[name](rollout) for rollout in rollouts]
