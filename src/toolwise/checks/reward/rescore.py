"""`rescore`: what a changed reward says of rollouts that a run has kept, beside what it said then."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from math import isfinite, sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

from toolwise.checks.reward.findings import scores_equal, usable_score
from toolwise.checks.reward.scoring_pass import Results, score_rollouts
from toolwise.checks.reward.stored_rollouts import StoredRollout
from toolwise.config.schema import RewardConfig, RunConfig, load_config
from toolwise.data.files import Row
from toolwise.errors import DataError
from toolwise.rewards.align import align_steps
from toolwise.serialization.json_text import json_text
from toolwise.training.changes import check_files
from toolwise.training.records import write_atomic
from toolwise.training.scoring import build_scoring
from toolwise.types import EvaluateResult

MAX_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class RescoreReport:
    """Then and now."""

    reward: str
    rollouts: int
    old_mean: float | None
    new_mean: float | None
    changed: int
    """Rollouts whose score is another, or that have one now and had none, or the other way round."""
    old_errors: dict[str, int]
    new_errors: dict[str, int]
    correlation: float | None
    """Pearson's, over rollouts with both scores; None where one side does not vary."""
    pairs: int
    """Pairs of rollouts of one group that differed then."""
    pairs_turned: int
    """Those of them that stand the other way round now: what a group-wise advantage would notice."""
    not_tried: int
    largest: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def load_run_reward(run: Path, reference: str | None, kwargs: Mapping[str, Any]) -> RewardConfig:
    """The reward that the run was scored by, or `reference` in the run's sandbox.

    A function that the run used already keeps the arguments it had there; `kwargs` go before them.
    """
    file = run / "config.toml"
    config = load_config(file) if file.is_file() else RunConfig()
    known = config.reward
    if reference is None:
        check_files(config, run, "reward")
        if known.parts and kwargs:
            raise DataError(f"{file}: has several rewards, so --kwargs does not say whose; name one with --reward")
        if not known.parts and not known.function:
            raise DataError(f"{run}: no configuration names a reward of these rollouts; add --reward REF")
        return known.model_copy(update={"kwargs": {**known.kwargs, **kwargs}})
    used = [(known.function, known.kwargs), *((part.function, part.kwargs) for part in known.parts)]
    had = next(
        (
            found
            for function, found in used
            if function and _resolve_reference(function) == _resolve_reference(reference)
        ),
        {},
    )
    return RewardConfig(function=reference, kwargs={**had, **kwargs}, sandbox=known.sandbox)


def _resolve_reference(reference: str) -> str:
    """A reference with its file's whole path, so that two ways of naming it are one."""
    place, colon, name = (reference, "", "") if reference.endswith(".py") else reference.rpartition(":")
    return f"{Path(place).expanduser().resolve()}{colon}{name}" if place.endswith(".py") else reference


def rescore(config: RewardConfig, stored: Sequence[StoredRollout]) -> tuple[RescoreReport, list[Row]]:
    """What came of it, and the new rows: the old ones with the new word in place of the old."""
    scoring = build_scoring(config)
    try:
        scoring.check([one.rollout.task for one in stored])
        results = asyncio.run(score_rollouts(scoring, stored))
    finally:
        scoring.close()
    name = scoring.rewards.name
    tried = [(one, result) for one, result in zip(stored, results, strict=True) if result is not None]
    return compare(name, stored, results), [_new_row(name, one, result) for one, result in tried]


def compare(name: str, stored: Sequence[StoredRollout], results: Results) -> RescoreReport:
    old, new = [_old_score(one.row) for one in stored], [usable_score(result) for result in results]
    tried = [i for i, result in enumerate(results) if result is not None]
    both = [(a, b) for a, b in zip(old, new, strict=True) if a is not None and b is not None]
    pairs, turned = _count_pairs(stored, old, new)
    return RescoreReport(
        reward=name,
        rollouts=len(stored),
        old_mean=_mean(old),
        new_mean=_mean(new),
        changed=sum(not scores_equal(old[i], new[i]) for i in tried),
        old_errors=dict(Counter(kind for one in stored if (kind := _old_error(one.row)))),
        new_errors=dict(Counter(r.error.kind for r in results if r is not None and r.error is not None)),
        correlation=_correlation(both),
        pairs=pairs,
        pairs_turned=turned,
        not_tried=len(stored) - len(tried),
        largest=_largest_changes(stored, old, new),
    )


def _old_score(row: Row) -> float | None:
    score = row.get("score")
    if isinstance(score, bool) or not isinstance(score, int | float) or not isfinite(score) or row.get("error"):
        return None
    return float(score)


def _old_error(row: Row) -> str | None:
    error = row.get("error")
    return str(error.get("kind")) if isinstance(error, dict) else None


def _mean(scores: Sequence[float | None]) -> float | None:
    found = [score for score in scores if score is not None]
    return fmean(found) if found else None


def _correlation(both: Sequence[tuple[float, float]]) -> float | None:
    if len(both) < 2:
        return None
    mean_a, mean_b = fmean(a for a, _ in both), fmean(b for _, b in both)
    spread_a, spread_b = sum((a - mean_a) ** 2 for a, _ in both), sum((b - mean_b) ** 2 for _, b in both)
    if sqrt(spread_a * spread_b) < 1e-12:
        return None
    return sum((a - mean_a) * (b - mean_b) for a, b in both) / sqrt(spread_a * spread_b)


def _count_pairs(
    stored: Sequence[StoredRollout], old: Sequence[float | None], new: Sequence[float | None]
) -> tuple[int, int]:
    groups: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for one, a, b in zip(stored, old, new, strict=True):
        if a is not None and b is not None:
            groups[one.group].append((a, b))
    differed = turned = 0
    for found in groups.values():
        for (a, b), (c, d) in combinations(found, 2):
            if not scores_equal(a, c):
                differed += 1
                turned += (a - c) * (b - d) < 0 and not scores_equal(b, d)
    return differed, turned


def _largest_changes(
    stored: Sequence[StoredRollout], old: Sequence[float | None], new: Sequence[float | None]
) -> tuple[dict[str, Any], ...]:
    moved = [
        (abs(a - b), one.rollout.rollout_id, a, b)
        for one, a, b in zip(stored, old, new, strict=True)
        if a is not None and b is not None and not scores_equal(a, b)
    ]
    moved.sort(key=lambda found: -found[0])
    return tuple({"rollout_id": name, "old": a, "new": b} for _, name, a, b in moved[:MAX_EXAMPLES])


def _new_row(name: str, one: StoredRollout, result: EvaluateResult) -> Row:
    """Advantages were those of the old score, so they go."""
    steps, warnings = align_steps(one.rollout.steps, result.step_outputs or (), one.rollout.rollout_id)
    told = one.row.get("steps") if isinstance(one.row.get("steps"), list) else [{} for _ in steps]
    return {
        **one.row,
        "step": one.step,
        "score": result.score,
        "metrics": {key: metric.score for key, metric in result.metrics.items()},
        "reason": result.reason,
        "error": result.error.model_dump() if result.error else None,
        "warnings": [str(warning) for warning in warnings],
        "steps": [
            {**(kept if isinstance(kept, dict) else {}), "advantage": None, "base_reward": step.base_reward}
            for kept, step in zip(told or (), steps, strict=True)
        ],
        "rescored": {"reward": name, "old_score": one.row.get("score"), "old_error": _old_error(one.row)},
    }


def unused_path(source: Path, reward: str, out: Path | None = None) -> Path:
    """Where the new rows go: beside the old ones, and never in the place of a file that is there."""
    if out is not None:
        if out.suffix.lower() != ".jsonl":
            raise DataError(f"{out}: the new rows are JSONL; end --out in .jsonl")
        if out.exists():
            raise DataError(f"{out} is there already; give another --out")
        return out
    folder, stem = (source, "rescored") if source.is_dir() else (source.parent, f"{source.stem}-rescored")
    function = Path(reward).stem if reward.endswith(".py") else reward.rpartition(":")[2]
    named = "".join(c if c.isalnum() or c in "._-" else "_" for c in function)[:60] or "reward"
    numbers = ["", *(f"-{number}" for number in range(2, 10_000))]
    paths = (folder / f"{stem}-{named}{number}.jsonl" for number in numbers)
    return next(path for path in paths if not path.exists())


def write_rescored(path: Path, rows: Sequence[Row]) -> None:
    text = "".join(f"{json_text(row)}\n" for row in rows)
    write_atomic(path, text.encode("utf-8", "backslashreplace"))
