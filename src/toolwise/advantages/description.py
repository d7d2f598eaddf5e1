"""What an estimator will see of the rewards, in one line: a run says it once, at its start."""

from __future__ import annotations

from typing import Any

from toolwise.advantages.grpo import Grpo, Rloo
from toolwise.advantages.step_rewards import innermost_estimator, reward_settings

_ROLLOUT_REWARDS = {
    "remainder": "the score of each rollout; step rewards do not enter",
    "add": "score + step rewards of each rollout",
    "never": "the score of each rollout; step rewards do not enter",
}
_STEP_REWARDS = {
    "remainder": (
        "score on the last step, step rewards at each step; the last step gets the score less the step rewards, so "
        "that a rollout's total is its score"
    ),
    "add": (
        "score on the last step, step rewards at each step; the whole score is added, so that a rollout's total is "
        "score + step rewards"
    ),
    "never": "step rewards at each step and nothing else: the score is left out of the returns",
}


def describe_rewards(name: str, estimator: Any) -> str:
    """The line for an estimator that the configuration calls `name`."""
    held, settings = innermost_estimator(estimator), reward_settings(estimator)
    if "terminal_score" not in settings:
        return f"advantages: {name} (step rewards and score as the estimator itself uses them)"
    how = settings["terminal_score"]
    parts = [(_STEP_REWARDS if has_step_returns(estimator) else _ROLLOUT_REWARDS)[how]]
    if how == "never" and hasattr(held, "omega"):
        parts[0] += ", and only compared between whole rollouts"
    if settings["default_step_reward"]:
        parts.append(f"a step without a reward counts as {settings['default_step_reward']:g}")
    if settings["invalid_action_penalty"]:
        parts.append(f"an invalid action costs {settings['invalid_action_penalty']:g}")
    return f'advantages: {name} sees {"; ".join(parts)} (algorithm.terminal_score = "{how}")'


def has_step_returns(estimator: Any) -> bool:
    """Whether it has returns for steps or tokens, with the score in them somewhere; GRPO and RLOO have none."""
    return "terminal_score" in reward_settings(estimator) and not isinstance(
        innermost_estimator(estimator), Grpo | Rloo
    )
