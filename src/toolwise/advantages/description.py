"""Describes in one line how an estimator uses the rewards; a run logs it once at startup."""

from __future__ import annotations

from typing import Any

from toolwise.advantages.grpo import Grpo, Rloo
from toolwise.advantages.step_rewards import innermost_estimator, reward_settings

_ROLLOUT_REWARDS = {
    "remainder": "the score of each rollout; step rewards are not used",
    "add": "score + step rewards of each rollout",
    "never": "the score of each rollout; step rewards are not used",
}
_STEP_REWARDS = {
    "remainder": (
        "score on the last step, step rewards at each step; the last step gets the score minus the step rewards, so "
        "that a rollout's total is its score"
    ),
    "add": (
        "score on the last step, step rewards at each step; the whole score is added, so that a rollout's total is "
        "score + step rewards"
    ),
    "never": "step rewards at each step only: the score is not part of the returns",
}


def describe_rewards(name: str, estimator: Any) -> str:
    """The line for the estimator configured as `name`."""
    inner, settings = innermost_estimator(estimator), reward_settings(estimator)
    if "terminal_score" not in settings:
        return f"advantages: {name} (step rewards and score as the estimator itself uses them)"
    mode = settings["terminal_score"]
    parts = [(_STEP_REWARDS if has_step_returns(estimator) else _ROLLOUT_REWARDS)[mode]]
    if mode == "never" and hasattr(inner, "omega"):
        parts[0] += " and is only compared between whole rollouts"
    if settings["default_step_reward"]:
        parts.append(f"a step without a reward counts as {settings['default_step_reward']:g}")
    if settings["invalid_action_penalty"]:
        parts.append(f"an invalid action costs {settings['invalid_action_penalty']:g}")
    return f'advantages: {name} sees {"; ".join(parts)} (algorithm.terminal_score = "{mode}")'


def has_step_returns(estimator: Any) -> bool:
    """Whether it computes returns per step or token that may contain the score; GRPO and RLOO do not."""
    return "terminal_score" in reward_settings(estimator) and not isinstance(
        innermost_estimator(estimator), Grpo | Rloo
    )
