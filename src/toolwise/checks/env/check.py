"""`check_env`: tests whether an environment meets the contract that rollouts rely on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from toolwise.checks.contract import CheckReport, run_parts
from toolwise.checks.env.env_trial import EnvViolation
from toolwise.checks.env.rules import EnvChecks
from toolwise.envs.base import BaseEnv

MIN_BLOCK_S = 1.0


def check_env(
    make: Callable[[], BaseEnv],
    *,
    name: str = "environment",
    actions: Sequence[Any] = (),
    gold: Sequence[Any] | None = None,
    gold_reward: float | None = None,
    seed: int = 0,
    max_steps: int = 20,
    step_timeout_s: float = 10.0,
) -> CheckReport:
    """Check the environments that `make` creates, using a new one for each episode.

    `actions` are valid actions to sample from, for environments with neither `example_actions` nor tools. `gold` is a
    sequence of actions that reaches the goal, by default the environment's `gold_actions`. The goal counts as reached
    if the last gold action ends the episode untruncated with `info["success"]`, or with a total reward above 0, or of
    at least `gold_reward`.
    """
    checks = EnvChecks(make, list(actions), gold, gold_reward, seed, max_steps, step_timeout_s)
    findings = run_parts(
        checks.parts(),
        essential={"life cycle"},  # nothing else works in an environment that cannot start
        explain=_explain,
        limit_s=step_timeout_s,
        min_block_s=MIN_BLOCK_S,
        blocked="warning",
    )
    return CheckReport("env", name, tuple(findings))


def _explain(fault: Exception) -> str:
    if not isinstance(fault, EnvViolation):
        raise fault
    return str(fault)
