"""`check_env`: whether an environment keeps what rollouts rely on, tried out before a run trusts it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from toolwise.checks.env.loop_blocking import run_watched
from toolwise.checks.env.rules import EnvChecks, Verdict
from toolwise.envs.base import BaseEnv


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """One thing that was looked at."""

    name: str
    verdict: Verdict
    says: str


@dataclass(frozen=True, slots=True)
class EnvCheck:
    """All that was found about one environment."""

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
    """Tries `make`'s environments out, each for one episode.

    `actions` are valid ones to play with, where neither the environment nor its tools tell. `gold` reaches the goal; by
    default what the environment's `gold_actions` gives. The goal is reached where the last of them ends the episode
    untruncated with `info["success"]`, or with rewards above 0 in all, or of at least `gold_reward`.
    """
    exam = EnvChecks(make, list(actions), gold, gold_reward, seed, max_steps, step_timeout_s)
    findings: list[CheckFinding] = []

    def tell(name: str, verdict: Verdict, says: str) -> None:
        findings.append(CheckFinding(name, verdict, says))

    blocked = run_watched(lambda: exam.run(tell), limit_s=step_timeout_s)
    findings.append(CheckFinding("event loop", *blocked))
    tried = {finding.name for finding in findings}
    findings += [CheckFinding(name, "skipped", "not tried") for name in exam.names() if name not in tried]
    return EnvCheck(name, tuple(findings))
