"""Findings about a reward: each `check_*` function takes results and returns a one-line verdict with details."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean, pstdev

from toolwise.checks.reward.stored_rollouts import Results, StoredRollout
from toolwise.rewards.align import align_steps
from toolwise.types import EvaluateResult
from toolwise.types.findings import Finding, Verdict

ROLLOUTS_PER_STEP = 128
"""Rollouts per training step, to put the speed in context."""
SLOW_S = 5.0
"""Warn if a step would wait longer than this for its rewards."""
MAX_EXAMPLES = 5


def scores_equal(one: float | None, other: float | None) -> bool:
    """Equal up to floating-point error from the order of summation."""
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)


def usable_score(result: EvaluateResult | None) -> float | None:
    return result.score if result is not None and result.has_valid_score else None


def check_results(stored: Sequence[StoredRollout], results: Results) -> Finding:
    """Did every rollout get a usable result? Shows the first traceback per kind of error."""
    faults = Counter(r.error.kind for r in results if r is not None and r.error is not None)
    scored = sum(usable_score(r) is not None for r in results)
    untried = sum(r is None for r in results)
    invalid = len(results) - scored - untried - faults.total()
    says = [
        f"{scored} of {len(results)} rollouts got a score",
        *(f"{count} {kind}" for kind, count in faults.most_common()),
        f"{invalid} with is_score_valid=False" if invalid else "",
        f"{untried} not tried after too many timeouts" if untried else "",
    ]
    return Finding(
        "results",
        "wrong" if faults or not scored else "ok",
        ", ".join(filter(None, says)),
        {"scored": scored, "errors": dict(faults), "not_valid": invalid, "not_tried": untried},
        _first_faults(stored, results),
    )


def _first_faults(stored: Sequence[StoredRollout], results: Results) -> tuple[str, ...]:
    messages: dict[str, str] = {}
    for item, result in zip(stored, results, strict=True):
        fault = result.error if result is not None else None
        if fault is not None and fault.kind not in messages:
            trace = f"\n{fault.traceback.strip()}" if fault.traceback.strip() else ""
            messages[fault.kind] = f"{fault.kind}, first on {item.rollout.rollout_id}: {fault.message}{trace}"
    return tuple(messages.values())


def check_determinism(
    stored: Sequence[StoredRollout], first: Results, repeated: Results, reordered: Results, *, fresh: bool = True
) -> Finding:
    """`repeated`: same rollouts in the same order; `reordered`: in reverse order, in a fresh worker."""
    changed, order_dependent = [], []
    for item, a, b, c in zip(stored, first, repeated, reordered, strict=True):
        name = item.rollout.rollout_id
        if _comparison_key(a) != _comparison_key(b):
            changed.append(f"{name}: {_describe_result(a)}, then {_describe_result(b)}")
        elif _comparison_key(a) != _comparison_key(c):
            order_dependent.append(f"{name}: {_describe_result(a)}, then {_describe_result(c)}")
    total, where = len(stored), "in reverse order and a fresh worker" if fresh else "in reverse order"
    figures = {"compared": total, "differ_again": len(changed), "differ_elsewhere": len(order_dependent)}
    if not total:
        return Finding("determinism", "warning", "nothing to compare: every call failed", figures)
    if changed:
        says = f"{len(changed)} of {total} rollouts got a different result on the second pass, in the same order"
    elif order_dependent:
        says = (
            f"{len(order_dependent)} of {total} rollouts got a different result {where}: "
            "it depends on their order, or keeps state between calls"
        )
    else:
        return Finding("determinism", "ok", f"{total} rollouts got equal results three times, also {where}", figures)
    return Finding("determinism", "wrong", says, figures, tuple([*changed, *order_dependent][:MAX_EXAMPLES]))


def _comparison_key(result: EvaluateResult | None) -> tuple[object, ...]:
    """What must not change between passes; rounded, since the order of a sum can change the last digit."""
    if result is None:
        return ("not tried",)
    steps = tuple((str(o.step_index), _rounded(o.base_reward)) for o in result.step_outputs or ())
    return (_rounded(usable_score(result)), result.error.kind if result.error else None, steps)


def _rounded(number: float | None) -> str | None:
    """As text, so that NaN equals NaN; -0.0 becomes 0.0."""
    return None if number is None else f"{number + 0.0:.9g}"


def _describe_result(result: EvaluateResult | None) -> str:
    if result is None:
        return "not tried"
    if result.error is not None:
        return result.error.kind
    return "not valid" if result.score is None else f"{result.score:g}"


def check_speed(rollouts: int, seconds: float) -> Finding:
    """Throughput on warm workers, as in training."""
    if not rollouts:
        return Finding("speed", "warning", "nothing to time: every call failed")
    rate = rollouts / max(seconds, 1e-6)
    step_s = ROLLOUTS_PER_STEP / rate
    says = f"{rate:,.0f} rollouts per second: a step of {ROLLOUTS_PER_STEP} rollouts waits {step_s:.2g} s for rewards"
    return Finding(
        "speed",
        "warning" if step_s > SLOW_S else "ok",
        says,
        {"rollouts_per_s": rate, f"seconds_per_{ROLLOUTS_PER_STEP}": step_s},
    )


def check_spread(stored: Sequence[StoredRollout], results: Results, best_gold: float | None = None) -> Finding:
    """If all rollouts of a task score the same, the reward gives no training signal.

    If gold answers score higher, the stored rollouts are too similar and the reward is not to blame.
    """
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for rollout, result in zip(stored, results, strict=True):
        if (score := usable_score(result)) is not None:
            groups[rollout.group].append(score)
    if not (scores := [score for group in groups.values() for score in group]):
        return Finding("spread", "wrong", "no scores")
    multi = [group for group in groups.values() if len(group) > 1]
    flat = sum(scores_equal(min(group), max(group)) for group in multi)
    equal = Counter(map(_rounded, scores)).most_common(1)[0][1] / len(scores)
    figures = {
        "min": min(scores),
        "mean": fmean(scores),
        "std": pstdev(scores),
        "max": max(scores),
        "share_equal": equal,
        "groups": len(multi),
        "groups_without_spread": flat,
        "std_within_groups": fmean(map(pstdev, multi)) if multi else None,
    }
    verdict, why = _spread_verdict(min(scores), max(scores), len(scores), len(multi), flat, best_gold)
    says = f"{min(scores):.3g} to {max(scores):.3g}, mean {fmean(scores):.3g}, std {pstdev(scores):.3g}; {why}"
    return Finding("spread", verdict, says, figures)


def _spread_verdict(
    low: float, high: float, scores: int, groups: int, flat: int, best_gold: float | None
) -> tuple[Verdict, str]:
    gold_is_higher = best_gold is not None and best_gold > high and not scores_equal(best_gold, high)
    if scores_equal(low, high) and scores > 1:
        if gold_is_higher:
            return "warning", "all stored rollouts score the same, but a gold answer scores higher: use varied rollouts"
        return "wrong", "every rollout scores the same, which gives no training signal"
    if not groups:
        return "warning", "no two rollouts share a task, so the spread within groups is unknown"
    if flat == groups:
        verdict: Verdict = "warning" if gold_is_higher else "wrong"
        return verdict, f"in all {groups} groups every rollout scores the same, which gives no training signal"
    text = f"{flat} of {groups} groups have no spread"
    return ("warning", f"{text} and give no training signal") if 2 * flat > groups else ("ok", text)


def check_steps(stored: Sequence[StoredRollout], results: Results) -> Finding:
    """Do step rewards match the rollout's steps? Counts the aligner's warnings by name."""
    with_steps = 0
    warnings: dict[str, list[str]] = defaultdict(list)
    for item, result in zip(stored, results, strict=True):
        if result is not None and result.step_outputs:
            with_steps += 1
            for warning in align_steps(item.rollout.steps, result.step_outputs, item.rollout.rollout_id)[1]:
                warnings[warning.name].append(str(warning))
    counts = {name: len(texts) for name, texts in warnings.items()}
    figures = {"with_step_outputs": with_steps, "warnings": counts}
    if not with_steps:
        return Finding("steps", "ok", "no step rewards", figures)
    if not warnings:
        return Finding("steps", "ok", f"the step rewards of {with_steps} rollouts match their steps", figures)
    # A missing step keeps its environment reward; the reward of an unknown index is lost.
    verdict: Verdict = "warning" if set(warnings) == {"missing"} else "wrong"
    says = ", ".join(f"{count} {name}" for name, count in counts.items())
    shown = tuple(text for texts in warnings.values() for text in texts[:2])
    return Finding("steps", verdict, f"step rewards do not match: {says} step_index", figures, shown)
