"""`check_reward`: a reward in its sandbox over stored rollouts, looked at from every side before a run trusts it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from toolwise.authoring.findings import (
    A_STEP,
    Finding,
    judge_determinism,
    judge_results,
    judge_speed,
    judge_spread,
    judge_steps,
    score_of,
)
from toolwise.authoring.gold import Trial, judge_empty, judge_gold, try_golds
from toolwise.authoring.passes import Results, calls_of, mode_of, score_stored
from toolwise.authoring.stored import Stored
from toolwise.config import RewardConfig
from toolwise.rewards.printed import PrintedLines
from toolwise.scoring import Scoring, build_scoring

TIMINGS, QUICK_S = 3, 1.0
LINES_SHOWN = 20
"""Of what the function prints in the first pass."""


@dataclass(frozen=True, slots=True)
class RewardCheck:
    """All that was found about one reward."""

    reward: str
    mode: str
    rollouts: int
    tasks: int
    sandbox: str
    findings: tuple[Finding, ...]
    printed: tuple[str, ...] = ()
    """The first lines that it printed, each with its rollout."""
    printed_more: int = 0
    """How many lines more there were."""

    @property
    def ok(self) -> bool:
        return all(finding.verdict != "wrong" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def check_reward(
    config: RewardConfig, stored: Sequence[Stored], *, gold: bool = True, gold_form: str | None = None
) -> RewardCheck:
    """Runs the reward that `config` names over `stored`. `gold=False` is for rewards that only shape others.

    `gold_form` says how a bare ground truth is to be answered, such as "Answer: {}".
    """
    return asyncio.run(_check(config, stored, gold, gold_form))


async def _check(config: RewardConfig, stored: Sequence[Stored], gold: bool, gold_form: str | None) -> RewardCheck:
    scoring = build_scoring(config)
    try:
        scoring.check([one.rollout.task for one in stored])
        printed = PrintedLines(LINES_SHOWN)
        scoring.tell_prints(printed)
        first = await score_stored(scoring, stored)
        scoring.tell_prints(None)
        sound = _sound_part(scoring, stored, first)
        again, seconds = await _timed(scoring, sound)
        trials = await try_golds(scoring, stored, first, gold_form) if gold and _any_score(first) else []
        mode, sandbox = mode_of(scoring), scoring.describe()
    finally:
        scoring.close()
    elsewhere = await _score_elsewhere(config, sound)
    picked = {id(one): result for one, result in zip(stored, first, strict=True)}
    before = [picked[id(one)] for one in sound]
    findings = [
        judge_results(stored, first),
        judge_determinism(sound, before, again, elsewhere, fresh=config.sandbox.tier != "off"),
        judge_speed(len(sound), seconds),
        judge_spread(stored, first, _best_gold(trials)),
        judge_steps(stored, first),
    ]
    if trials:
        findings += [judge_gold(trials), judge_empty(trials)]
    tasks = len({one.rollout.task.task_id for one in stored})
    return RewardCheck(
        *(scoring.rewards.name, mode, len(stored), tasks, sandbox, tuple(findings), tuple(printed.lines), printed.more)
    )


def _sound_part(scoring: Scoring, stored: Sequence[Stored], first: Results) -> list[Stored]:
    """About a step's worth of rollouts whose calls came through: what failed once has been told already."""
    sound: list[Stored] = []
    for call in calls_of(stored, mode_of(scoring)):
        results = [first[place] for place in call]
        if all(result is not None and result.error is None for result in results):
            sound += [stored[place] for place in call]
        if len(sound) >= A_STEP:
            break
    return sound


async def _timed(scoring: Scoring, sound: Sequence[Stored]) -> tuple[Results, float]:
    """All at once, as in training. What is quick is timed a few times: a worker may still be coming up."""
    fastest = inf
    for _ in range(TIMINGS):
        began = time.monotonic()
        results = await score_stored(scoring, sound, at_first=A_STEP)
        seconds = time.monotonic() - began
        fastest = min(fastest, seconds)
        if seconds > QUICK_S:
            break
    return results, fastest


async def _score_elsewhere(config: RewardConfig, sound: Sequence[Stored]) -> Results:
    """In fresh workers and in the reverse order; given back in the order of `sound`."""
    if not sound:
        return []
    scoring = build_scoring(config)
    try:
        return (await score_stored(scoring, sound[::-1]))[::-1]
    finally:
        scoring.close()


def _any_score(results: Results) -> bool:
    return any(score_of(result) is not None for result in results)


def _best_gold(trials: Sequence[Trial]) -> float | None:
    return max((score for score in (score_of(trial.gold) for trial in trials) if score is not None), default=None)
