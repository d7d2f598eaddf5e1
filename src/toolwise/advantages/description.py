"""Describes in one line how an estimator uses the rewards; a run logs it once at startup."""

from __future__ import annotations

from toolwise.protocols import AdvantageEstimator

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


def describe_rewards(name: str, estimator: AdvantageEstimator) -> str:
    """The line for the estimator configured as `name`."""
    rewards = estimator.rewards
    if rewards is None:
        return f"advantages: {name} (step rewards and score as the estimator itself uses them)"
    mode = rewards.terminal_score
    parts = [(_STEP_REWARDS if estimator.uses_step_rewards else _ROLLOUT_REWARDS)[mode]]
    if mode == "never" and estimator.uses_step_rewards and estimator.min_group_size > 1:
        parts[0] += " and is only compared between whole rollouts"
    if rewards.default_step_reward:
        parts.append(f"a step without a reward counts as {rewards.default_step_reward:g}")
    if rewards.invalid_action_penalty:
        parts.append(f"an invalid action costs {rewards.invalid_action_penalty:g}")
    return f'advantages: {name} sees {"; ".join(parts)} (algorithm.terminal_score = "{mode}")'
