"""`check_reward`: a reward in its sandbox over stored rollouts, looked at from every side before a run trusts it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from toolwise.checks.reward.findings import (
    ROLLOUTS_PER_STEP,
    Finding,
    check_determinism,
    check_results,
    check_speed,
    check_spread,
    check_steps,
    usable_score,
)
from toolwise.checks.reward.gold import GoldTrial, check_empty, check_gold, run_gold_trials
from toolwise.checks.reward.scoring_pass import Results, score_rollouts, scoring_mode, split_into_calls
from toolwise.checks.reward.stored_rollouts import StoredRollout
from toolwise.config.schema import RewardConfig
from toolwise.rewards.printed_output import PrintPreview
from toolwise.training.scoring import Scoring, build_scoring

TIMING_RUNS, QUICK_S = 3, 1.0
MAX_PRINTED_LINES = 20
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
    config: RewardConfig, stored: Sequence[StoredRollout], *, gold: bool = True, gold_form: str | None = None
) -> RewardCheck:
    """Runs the reward that `config` names over `stored`. `gold=False` is for rewards that only shape others.

    `gold_form` says how a bare ground truth is to be answered, such as "Answer: {}".
    """
    return asyncio.run(_check(config, stored, gold, gold_form))


async def _check(
    config: RewardConfig, stored: Sequence[StoredRollout], gold: bool, gold_form: str | None
) -> RewardCheck:
    scoring = build_scoring(config)
    try:
        scoring.check([one.rollout.task for one in stored])
        printed = PrintPreview(MAX_PRINTED_LINES)
        scoring.set_print_callback(printed)
        first = await score_rollouts(scoring, stored)
        scoring.set_print_callback(None)
        sound = _faultless_rollouts(scoring, stored, first)
        repeated, seconds = await _time_scoring(scoring, sound)
        trials = await run_gold_trials(scoring, stored, first, gold_form) if gold and _any_score(first) else []
        mode, sandbox = scoring_mode(scoring), scoring.describe()
    finally:
        scoring.close()
    reordered = await _score_in_fresh_workers(config, sound)
    picked = {id(one): result for one, result in zip(stored, first, strict=True)}
    before = [picked[id(one)] for one in sound]
    findings = [
        check_results(stored, first),
        check_determinism(sound, before, repeated, reordered, fresh=config.sandbox.tier != "off"),
        check_speed(len(sound), seconds),
        check_spread(stored, first, _best_gold(trials)),
        check_steps(stored, first),
    ]
    if trials:
        findings += [check_gold(trials), check_empty(trials)]
    tasks = len({one.rollout.task.task_id for one in stored})
    return RewardCheck(
        *(
            scoring.rewards.name,
            mode,
            len(stored),
            tasks,
            sandbox,
            tuple(findings),
            tuple(printed.lines),
            printed.omitted,
        )
    )


def _faultless_rollouts(scoring: Scoring, stored: Sequence[StoredRollout], first: Results) -> list[StoredRollout]:
    """About a step's worth of rollouts whose calls came through: what failed once has been told already."""
    sound: list[StoredRollout] = []
    for call in split_into_calls(stored, scoring_mode(scoring)):
        results = [first[place] for place in call]
        if all(result is not None and result.error is None for result in results):
            sound += [stored[place] for place in call]
        if len(sound) >= ROLLOUTS_PER_STEP:
            break
    return sound


async def _time_scoring(scoring: Scoring, sound: Sequence[StoredRollout]) -> tuple[Results, float]:
    """All at once, as in training. What is quick is timed a few times: a worker may still be coming up."""
    fastest = inf
    for _ in range(TIMING_RUNS):
        began = time.monotonic()
        results = await score_rollouts(scoring, sound, first_chunk=ROLLOUTS_PER_STEP)
        seconds = time.monotonic() - began
        fastest = min(fastest, seconds)
        if seconds > QUICK_S:
            break
    return results, fastest


async def _score_in_fresh_workers(config: RewardConfig, sound: Sequence[StoredRollout]) -> Results:
    """In fresh workers and in the reverse order; given back in the order of `sound`."""
    if not sound:
        return []
    scoring = build_scoring(config)
    try:
        return (await score_rollouts(scoring, sound[::-1]))[::-1]
    finally:
        scoring.close()


def _any_score(results: Results) -> bool:
    return any(usable_score(result) is not None for result in results)


def _best_gold(trials: Sequence[GoldTrial]) -> float | None:
    return max((score for score in (usable_score(trial.gold) for trial in trials) if score is not None), default=None)
