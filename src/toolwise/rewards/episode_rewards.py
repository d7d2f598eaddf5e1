"""What an episode itself earned, as rewards: `tools` (their `calc_reward`) and `env` (the rewards of its steps).

They need no function and no sandbox: the figures are the rollout's own. `reward.function = "env"` scores by the world
alone; as `reward.parts` they are weighed against functions over messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from toolwise.rewards.function import Reward, fault_result
from toolwise.rewards.signature import Signature
from toolwise.types import EvaluateResult, MetricResult, Rollout


def _tools_result(rollout: Rollout) -> EvaluateResult:
    """The sum of what each tool's `calc_reward` gave; 0 where none has anything to say."""
    metrics = {f"tool/{name}": MetricResult(score=reward) for name, reward in rollout.tool_rewards.items()}
    return EvaluateResult(score=sum(rollout.tool_rewards.values()), metrics=metrics)


def _env_result(rollout: Rollout) -> EvaluateResult:
    """The sum of the rewards that its world, or its tools' calls, gave its steps. A rollout that met a fault on its way
    has earned nothing that would count."""
    if not rollout.trainable:
        return fault_result("env_fault", rollout.fault or f"the episode ended by {rollout.stop_reason.value}")
    return EvaluateResult(score=sum(step.base_reward or 0.0 for step in rollout.steps))


EPISODE_REWARDS: dict[str, Callable[[Rollout], EvaluateResult]] = {"tools": _tools_result, "env": _env_result}


def episode_reward(name: str) -> Reward:
    """Known by its name alone."""
    return Reward(name, Signature("pointwise", ("messages", "ground_truth")), reference=name)


def score_episodes(name: str, rollouts: Sequence[Rollout]) -> list[EvaluateResult]:
    return [EPISODE_REWARDS[name](rollout) for rollout in rollouts]
