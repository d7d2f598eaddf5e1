"""`check_env`: tests whether an environment meets the contract that rollouts rely on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from toolwise.checks.env.loop_blocking import run_watched
from toolwise.checks.env.rules import EnvChecks, Verdict
from toolwise.envs.base import BaseEnv


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """Result of one check."""

    name: str
    verdict: Verdict
    says: str


@dataclass(frozen=True, slots=True)
class EnvCheck:
    """All findings about one environment."""

    env: str
    findings: tuple[CheckFinding, ...]

    @property
    def ok(self) -> bool:
        return all(finding.verdict != "wrong" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {"env": self.env, "ok": self.ok, "findings": [asdict(finding) for finding in self.findings]}


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
) -> EnvCheck:
    """Check the environments that `make` creates, using a new one for each episode.

    `actions` are valid actions to sample from, for environments with neither `example_actions` nor tools. `gold` is a
    sequence of actions that reaches the goal, by default the environment's `gold_actions`. The goal counts as reached
    if the last gold action ends the episode untruncated with `info["success"]`, or with a total reward above 0, or of
    at least `gold_reward`.
    """
    checks = EnvChecks(make, list(actions), gold, gold_reward, seed, max_steps, step_timeout_s)
    findings: list[CheckFinding] = []

    def report(name: str, verdict: Verdict, says: str) -> None:
        findings.append(CheckFinding(name, verdict, says))

    blocked = run_watched(lambda: checks.run(report), limit_s=step_timeout_s)
    findings.append(CheckFinding("event loop", *blocked))
    tried = {finding.name for finding in findings}
    findings += [CheckFinding(name, "skipped", "not tried") for name in checks.names() if name not in tried]
    return EnvCheck(name, tuple(findings))
