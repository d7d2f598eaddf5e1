"""What an episode itself earned, as rewards: `tools` (their `calc_reward`) and `env` (the rewards of its steps).

They need no function and no sandbox: the figures are the rollout's own. `reward.function = "env"` scores by the world
alone; as `reward.parts` they are weighed against functions over messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from toolwise.rewards.function import Reward, faulty
from toolwise.rewards.signature import Signature
from toolwise.types import EvaluateResult, MetricResult, Rollout


def _of_tools(rollout: Rollout) -> EvaluateResult:
    """The sum of what each tool's `calc_reward` gave; 0 where none has anything to say."""
    metrics = {f"tool/{name}": MetricResult(score=reward) for name, reward in rollout.tool_rewards.items()}
    return EvaluateResult(score=sum(rollout.tool_rewards.values()), metrics=metrics)


def _of_env(rollout: Rollout) -> EvaluateResult:
    """The sum of the rewards that its world, or its tools' calls, gave its steps. A rollout that met a fault on its way
    has earned nothing that would count."""
    if not rollout.trainable:
        return faulty("env_fault", rollout.fault or f"the episode ended by {rollout.stop_reason.value}")
    return EvaluateResult(score=sum(step.base_reward or 0.0 for step in rollout.steps))


EARNED: dict[str, Callable[[Rollout], EvaluateResult]] = {"tools": _of_tools, "env": _of_env}


def earned_reward(name: str) -> Reward:
    """Known by its name alone."""
    return Reward(name, Signature("pointwise", ("messages", "ground_truth")), reference=name)


def score_earned(name: str, rollouts: Sequence[Rollout]) -> list[EvaluateResult]:
    return [EARNED[name](rollout) for rollout in rollouts]
