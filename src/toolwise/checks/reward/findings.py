"""What a check found: each judgement takes results and says in one line whether that is as it should be, and why."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any, Literal

from toolwise.checks.reward.scoring_pass import Results
from toolwise.checks.reward.stored_rollouts import StoredRollout
from toolwise.rewards.align import align_steps
from toolwise.types import EvaluateResult

Verdict = Literal["ok", "warning", "wrong"]
ROLLOUTS_PER_STEP = 128
"""Rollouts of a training step, for saying what a speed means."""
SLOW_S = 5.0
"""A step that waits longer than this for its rewards is worth a word."""
MAX_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    verdict: Verdict
    says: str
    figures: dict[str, Any] = field(default_factory=dict)
    details: tuple[str, ...] = ()
    """Offenders and tracebacks: the first few."""


def scores_equal(one: float | None, other: float | None) -> bool:
    """Equal but for what the order of a sum does to a float."""
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)


def usable_score(result: EvaluateResult | None) -> float | None:
    """The score, where there is one to learn from."""
    return result.score if result is not None and result.has_valid_score else None


def check_results(stored: Sequence[StoredRollout], results: Results) -> Finding:
    """Whether every rollout got a result that can be used; each kind of fault with its first traceback."""
    faults = Counter(r.error.kind for r in results if r is not None and r.error is not None)
    scored = sum(usable_score(r) is not None for r in results)
    untried = sum(r is None for r in results)
    unsure = len(results) - scored - untried - faults.total()
    says = [f"{scored} of {len(results)} rollouts got a score"]
    says += [f"{count} {kind}" for kind, count in faults.most_common()]
    says += [f"{unsure} with is_score_valid=False"] if unsure else []
    says += [f"{untried} not tried after too many timeouts"] if untried else []
    figures = {"scored": scored, "errors": dict(faults), "not_valid": unsure, "not_tried": untried}
    wrong = bool(faults) or not scored
    return Finding("results", "wrong" if wrong else "ok", ", ".join(says), figures, _first_faults(stored, results))


def _first_faults(stored: Sequence[StoredRollout], results: Results) -> tuple[str, ...]:
    told: dict[str, str] = {}
    for one, result in zip(stored, results, strict=True):
        fault = result.error if result is not None else None
        if fault is not None and fault.kind not in told:
            trace = f"\n{fault.traceback.strip()}" if fault.traceback.strip() else ""
            told[fault.kind] = f"{fault.kind}, first on {one.rollout.rollout_id}: {fault.message}{trace}"
    return tuple(told.values())


def check_determinism(
    stored: Sequence[StoredRollout], first: Results, repeated: Results, reordered: Results, *, fresh: bool = True
) -> Finding:
    """`repeated`: the same rollouts in the same order; `reordered`: in the reverse order, in a fresh worker."""
    trio = list(zip(stored, first, repeated, reordered, strict=True))
    restless = [_describe_difference(s, a, b) for s, a, b, _ in trio if _comparison_key(a) != _comparison_key(b)]
    moved = [
        _describe_difference(s, a, c)
        for s, a, b, c in trio
        if _comparison_key(a) == _comparison_key(b) and _comparison_key(a) != _comparison_key(c)
    ]
    figures = {"compared": len(trio), "differ_again": len(restless), "differ_elsewhere": len(moved)}
    where = "in the reverse order and a fresh worker" if fresh else "in the reverse order"
    if not trio:
        return Finding("determinism", "warning", "nothing to compare: no call came through without a fault", figures)
    if restless:
        says = f"{len(restless)} of {len(trio)} rollouts got another result the second time, in the same order"
    elif moved:
        why = "it depends on their order, or keeps something between calls"
        says = f"{len(moved)} of {len(trio)} rollouts got another result {where}: {why}"
    else:
        return Finding("determinism", "ok", f"{len(trio)} rollouts got the same three times, also {where}", figures)
    return Finding("determinism", "wrong", says, figures, tuple([*restless, *moved][:MAX_EXAMPLES]))


def _comparison_key(result: EvaluateResult | None) -> tuple[object, ...]:
    """What must be the same again; rounded, since a sum in another order may end in another last digit."""
    if result is None:
        return ("not tried",)
    steps = tuple((str(o.step_index), _rounded(o.base_reward)) for o in result.step_outputs or ())
    return (_rounded(usable_score(result)), result.error.kind if result.error else None, steps)


def _rounded(number: float | None) -> str | None:
    """As text, so that NaN is the same as NaN; -0.0 is 0.0."""
    return None if number is None else f"{number + 0.0:.9g}"


def _describe_difference(stored: StoredRollout, one: EvaluateResult | None, other: EvaluateResult | None) -> str:
    return f"{stored.rollout.rollout_id}: {_describe_result(one)}, then {_describe_result(other)}"


def _describe_result(result: EvaluateResult | None) -> str:
    if result is None:
        return "not tried"
    if result.error is not None:
        return result.error.kind
    return "not valid" if result.score is None else f"{result.score:g}"


def check_speed(rollouts: int, seconds: float) -> Finding:
    """Over warm workers, as in training."""
    if not rollouts:
        return Finding("speed", "warning", "nothing to time: no call came through without a fault")
    rate = rollouts / max(seconds, 1e-6)
    a_step = ROLLOUTS_PER_STEP / rate
    says = f"{rate:,.0f} rollouts a second: a step of {ROLLOUTS_PER_STEP} rollouts waits {a_step:.2g} s for its rewards"
    figures = {"rollouts_per_s": rate, f"seconds_per_{ROLLOUTS_PER_STEP}": a_step}
    return Finding("speed", "warning" if a_step > SLOW_S else "ok", says, figures)


def check_spread(stored: Sequence[StoredRollout], results: Results, best_gold: float | None = None) -> Finding:
    """A reward that says the same of all rollouts of a task teaches nothing.

    Where gold answers earn more, it is the stored rollouts that are all alike, and the reward is not to blame.
    """
    scores = [score for score in map(usable_score, results) if score is not None]
    if not scores:
        return Finding("spread", "wrong", "no scores, so no spread")
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for one, result in zip(stored, results, strict=True):
        if (score := usable_score(result)) is not None:
            groups[one.group].append(score)
    several = [found for found in groups.values() if len(found) > 1]
    flat = sum(scores_equal(min(found), max(found)) for found in several)
    equal = Counter(map(_rounded, scores)).most_common(1)[0][1] / len(scores)
    figures = {
        "min": min(scores),
        "mean": fmean(scores),
        "std": pstdev(scores),
        "max": max(scores),
        "share_equal": equal,
        "groups": len(several),
        "groups_without_spread": flat,
        "std_within_groups": fmean(map(pstdev, several)) if several else None,
    }
    verdict, why = _spread_verdict(min(scores), max(scores), len(scores), len(several), flat, best_gold)
    says = f"{min(scores):.3g} to {max(scores):.3g}, mean {fmean(scores):.3g}, std {pstdev(scores):.3g}; {why}"
    return Finding("spread", verdict, says, figures)


def _spread_verdict(
    low: float, high: float, scores: int, several: int, flat: int, best_gold: float | None
) -> tuple[Verdict, str]:
    gold_tells = best_gold is not None and best_gold > high and not scores_equal(best_gold, high)
    if scores_equal(low, high) and scores > 1:
        if gold_tells:
            return "warning", "all stored rollouts score the same, though a gold answer earns more: give better ones"
        return "wrong", "every rollout scores the same, which teaches nothing"
    if not several:
        return "warning", "no two rollouts share a task, so the spread within groups is not known"
    if flat == several:
        told = f"in all {several} groups every rollout scores the same, which teaches nothing"
        return ("warning" if gold_tells else "wrong"), told
    told = f"{flat} of {several} groups have no spread"
    return ("warning", f"{told} and would teach nothing") if 2 * flat > several else ("ok", told)


def check_steps(stored: Sequence[StoredRollout], results: Results) -> Finding:
    """Whether step rewards fit the steps there are, by the names of the aligner's warnings."""
    given = 0
    warnings: Counter[str] = Counter()
    examples: dict[str, list[str]] = defaultdict(list)
    for one, result in zip(stored, results, strict=True):
        if result is None or not result.step_outputs:
            continue
        given += 1
        _, misfits = align_steps(one.rollout.steps, result.step_outputs, one.rollout.rollout_id)
        for misfit in misfits:
            warnings[misfit.name] += 1
            examples[misfit.name].append(str(misfit))
    figures: dict[str, Any] = {"with_step_outputs": given, "warnings": dict(warnings)}
    if not given:
        return Finding("steps", "ok", "it gives no step rewards", figures)
    if not warnings:
        return Finding("steps", "ok", f"the step rewards of {given} rollouts fit their steps", figures)
    # A step left out keeps what its environment gave it; an index that fits no step is lost.
    verdict: Verdict = "warning" if set(warnings) == {"missing"} else "wrong"
    says = ", ".join(f"{count} {name}" for name, count in warnings.items())
    shown = tuple(line for lines in examples.values() for line in lines[:2])
    return Finding("steps", verdict, f"step rewards do not fit: {says} step_index", figures, shown)
