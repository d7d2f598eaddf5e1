"""`check_reward`: runs a reward in its sandbox over stored rollouts and reports problems before a run uses it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from toolwise.checks.reward.findings import (
    ROLLOUTS_PER_STEP,
    check_determinism,
    check_results,
    check_speed,
    check_spread,
    check_steps,
    usable_score,
)
from toolwise.checks.reward.gold import check_empty, check_gold, run_gold_trials
from toolwise.checks.reward.stored_rollouts import (
    Results,
    StoredRollout,
    score_rollouts,
    scoring_mode,
    split_into_calls,
)
from toolwise.config.schema import RewardConfig
from toolwise.rewards.printed_output import PrintPreview
from toolwise.training.evaluate import Scoring, build_scoring
from toolwise.types.findings import Finding

TIMING_RUNS, QUICK_S = 3, 1.0
MAX_PRINTED_LINES = 20
"""Lines kept of what the function prints in the first pass."""


@dataclass(frozen=True, slots=True)
class RewardCheck:
    reward: str
    mode: str
    rollouts: int
    tasks: int
    sandbox: str
    findings: tuple[Finding, ...]
    printed: tuple[str, ...] = ()
    """The first printed lines, each with its rollout."""
    printed_more: int = 0
    """Number of further lines."""

    @property
    def ok(self) -> bool:
        return all(finding.verdict != "wrong" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        findings = [
            {name: getattr(finding, name) for name in ("name", "verdict", "says", "figures", "details")}
            for finding in self.findings
        ]
        return {"ok": self.ok, **asdict(self), "findings": findings}


def check_reward(
    config: RewardConfig, stored: Sequence[StoredRollout], *, gold: bool = True, gold_form: str | None = None
) -> RewardCheck:
    """Check the reward in `config` on stored rollouts. Pass `gold=False` for rewards that only shape others.

    `gold_form` turns a bare ground truth into an answer, such as "Answer: {}".
    """
    return asyncio.run(_check(config, stored, gold, gold_form))


async def _check(
    config: RewardConfig, stored: Sequence[StoredRollout], gold: bool, gold_form: str | None
) -> RewardCheck:
    with closing(build_scoring(config)) as scoring:
        scoring.check([item.rollout.task for item in stored])
        printed = PrintPreview(MAX_PRINTED_LINES)
        scoring.set_print_callback(printed)
        first = await score_rollouts(scoring, stored)
        scoring.set_print_callback(None)
        usable, before = _faultless_rollouts(scoring, stored, first)
        repeated, seconds = await _time_scoring(scoring, usable)
        gold = gold and any(usable_score(result) is not None for result in first)
        trials = await run_gold_trials(scoring, stored, first, gold_form) if gold else []
        mode, sandbox = scoring_mode(scoring), scoring.describe()
    reordered = await _score_in_fresh_workers(config, usable)
    gold_scores = (usable_score(trial.gold) for trial in trials)
    findings = [
        check_results(stored, first),
        check_determinism(usable, before, repeated, reordered, fresh=config.sandbox.tier != "off"),
        check_speed(len(usable), seconds),
        check_spread(stored, first, max((score for score in gold_scores if score is not None), default=None)),
        check_steps(stored, first),
    ]
    if trials:
        findings += [check_gold(trials), check_empty(trials)]
    return RewardCheck(
        reward=scoring.rewards.name,
        mode=mode,
        rollouts=len(stored),
        tasks=len({item.rollout.task.task_id for item in stored}),
        sandbox=sandbox,
        findings=tuple(findings),
        printed=tuple(printed.lines),
        printed_more=printed.omitted,
    )


def _faultless_rollouts(
    scoring: Scoring, stored: Sequence[StoredRollout], first: Results
) -> tuple[list[StoredRollout], Results]:
    """About one step's worth of rollouts whose calls succeeded, with their results; failures are reported already."""
    usable: list[int] = []
    for call in split_into_calls(stored, scoring_mode(scoring)):
        if all((result := first[index]) is not None and result.error is None for index in call):
            usable += call
        if len(usable) >= ROLLOUTS_PER_STEP:
            break
    return [stored[index] for index in usable], [first[index] for index in usable]


async def _time_scoring(scoring: Scoring, rollouts: Sequence[StoredRollout]) -> tuple[Results, float]:
    """Score all rollouts at once, as in training. Quick rewards run several times: a worker may still be starting."""
    fastest = inf
    for _ in range(TIMING_RUNS):
        start = time.monotonic()
        results = await score_rollouts(scoring, rollouts, first_chunk=ROLLOUTS_PER_STEP)
        seconds = time.monotonic() - start
        fastest = min(fastest, seconds)
        if seconds > QUICK_S:
            break
    return results, fastest


async def _score_in_fresh_workers(config: RewardConfig, rollouts: Sequence[StoredRollout]) -> Results:
    """Score in fresh workers and in reverse order; return results in the original order."""
    if not rollouts:
        return []
    with closing(build_scoring(config)) as scoring:
        return (await score_rollouts(scoring, rollouts[::-1]))[::-1]
