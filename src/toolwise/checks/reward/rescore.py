"""`rescore`: scores the stored rollouts of a run with a changed reward and compares old and new scores."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from heapq import nlargest
from itertools import combinations, count
from pathlib import Path
from statistics import StatisticsError, correlation, fmean
from typing import Any

from toolwise.checks.reward.findings import MAX_EXAMPLES, scores_equal, usable_score
from toolwise.checks.reward.stored_rollouts import Results, StoredRollout, score_rollouts
from toolwise.config.schema import RewardConfig, RunConfig, load_config
from toolwise.data.files import Row
from toolwise.errors import DataError
from toolwise.rewards.align import align_steps
from toolwise.serialization.files import write_atomic
from toolwise.serialization.json_text import json_line
from toolwise.training.changes import check_files
from toolwise.training.evaluate import build_scoring
from toolwise.types import EvaluateResult

Rescored = Sequence[tuple[StoredRollout, float, float]]
"""Rollouts with an old and a new score."""


@dataclass(frozen=True, slots=True)
class RescoreReport:
    reward: str
    rollouts: int
    old_mean: float | None
    new_mean: float | None
    changed: int
    """Rollouts whose score differs, or exists on only one side."""
    old_errors: dict[str, int]
    new_errors: dict[str, int]
    correlation: float | None
    """Pearson correlation over rollouts with both scores; None if one side is constant."""
    pairs: int
    """Pairs of rollouts in a group whose old scores differ."""
    pairs_turned: int
    """Pairs among them whose order is reversed now, which changes group-relative advantages."""
    not_tried: int
    largest: tuple[dict[str, Any], ...]


def load_run_reward(run: Path, reference: str | None, kwargs: Mapping[str, Any]) -> RewardConfig:
    """The run's reward, or `reference` with the run's sandbox settings.

    A function that the run already used keeps its arguments; `kwargs` override them.
    """
    file = run / "config.toml"
    config = load_config(file) if file.is_file() else RunConfig()
    run_reward = config.reward
    if reference is None:
        check_files(config, run, "reward")
        if run_reward.parts and kwargs:
            raise DataError(f"{file}: has several rewards, so --kwargs is ambiguous; choose one with --reward")
        if not run_reward.parts and not run_reward.function:
            raise DataError(f"{run}: no configuration names the reward of these rollouts; add --reward REF")
        return run_reward.model_copy(update={"kwargs": {**run_reward.kwargs, **kwargs}})
    wanted = _resolve_reference(reference)
    used = [(run_reward.function, run_reward.kwargs), *((part.function, part.kwargs) for part in run_reward.parts)]
    run_kwargs = next((values for function, values in used if _resolve_reference(function) == wanted), {})
    return RewardConfig(function=reference, kwargs={**run_kwargs, **kwargs}, sandbox=run_reward.sandbox)


def _resolve_reference(reference: str) -> str:
    """A reference with the absolute path of its file, so that two spellings compare equal."""
    path, colon, name = (reference, "", "") if reference.endswith(".py") else reference.rpartition(":")
    return f"{Path(path).expanduser().resolve()}{colon}{name}" if path.endswith(".py") else reference


def rescore(config: RewardConfig, stored: Sequence[StoredRollout]) -> tuple[RescoreReport, list[Row]]:
    """The comparison, and the rows with new scores in place of the old."""
    with closing(build_scoring(config)) as scoring:
        scoring.check([item.rollout.task for item in stored])
        results = asyncio.run(score_rollouts(scoring, stored))
    name, scored = scoring.rewards.name, zip(stored, results, strict=True)
    rows = [_new_row(name, item, result) for item, result in scored if result is not None]
    return compare(name, stored, results), rows


def compare(name: str, stored: Sequence[StoredRollout], results: Results) -> RescoreReport:
    old = [None if item.record.error else item.record.score for item in stored]
    new = [usable_score(result) for result in results]
    tried = [i for i, result in enumerate(results) if result is not None]
    both = [(s, a, b) for s, a, b in zip(stored, old, new, strict=True) if a is not None and b is not None]
    pairs, turned = _count_pairs(both)
    return RescoreReport(
        reward=name,
        rollouts=len(stored),
        old_mean=_mean(old),
        new_mean=_mean(new),
        changed=sum(not scores_equal(old[i], new[i]) for i in tried),
        old_errors=dict(Counter(kind for item in stored if (kind := _old_error(item)))),
        new_errors=dict(Counter(r.error.kind for r in results if r is not None and r.error is not None)),
        correlation=_correlation(both),
        pairs=pairs,
        pairs_turned=turned,
        not_tried=len(stored) - len(tried),
        largest=_largest_changes(both),
    )


def _old_error(stored: StoredRollout) -> str | None:
    return None if stored.record.error is None else str(stored.record.error.get("kind"))


def _mean(scores: Sequence[float | None]) -> float | None:
    valid = [score for score in scores if score is not None]
    return fmean(valid) if valid else None


def _correlation(both: Rescored) -> float | None:
    try:
        return correlation([a for _, a, _ in both], [b for _, _, b in both])
    except StatisticsError:  # fewer than two, or one side is constant
        return None


def _count_pairs(both: Rescored) -> tuple[int, int]:
    groups: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for item, old, new in both:
        groups[item.group].append((old, new))
    pairs = [pair for scores in groups.values() for pair in combinations(scores, 2)]
    differed = [(a - c, b - d, scores_equal(b, d)) for (a, b), (c, d) in pairs if not scores_equal(a, c)]
    return len(differed), sum(old * new < 0 and not equal for old, new, equal in differed)


def _largest_changes(both: Rescored) -> tuple[dict[str, Any], ...]:
    changes = [(item.rollout.rollout_id, a, b) for item, a, b in both if not scores_equal(a, b)]
    largest = nlargest(MAX_EXAMPLES, changes, key=lambda change: abs(change[1] - change[2]))
    return tuple({"rollout_id": name, "old": a, "new": b} for name, a, b in largest)


def _new_row(name: str, stored: StoredRollout, result: EvaluateResult) -> Row:
    """The row with its new score. Advantages are dropped: they were computed from the old one."""
    steps, warnings = align_steps(stored.rollout.steps, result.step_outputs or (), stored.rollout.rollout_id)
    old_steps = stored.row.get("steps") if isinstance(stored.row.get("steps"), list) else [{} for _ in steps]
    return {
        **stored.row,
        "step": stored.step,
        "score": result.score,
        "metrics": {key: metric.score for key, metric in result.metrics.items()},
        "reason": result.reason,
        "error": result.error.model_dump() if result.error else None,
        "warnings": [str(warning) for warning in warnings],
        "steps": [
            {**(old if isinstance(old, dict) else {}), "advantage": None, "base_reward": step.base_reward}
            for old, step in zip(old_steps or (), steps, strict=True)
        ],
        "rescored": {"reward": name, "old_score": stored.row.get("score"), "old_error": _old_error(stored)},
    }


def unused_path(source: Path, reward: str, out: Path | None = None) -> Path:
    """A path for the new rows next to the old ones; never an existing file."""
    if out is not None:
        if out.suffix.lower() != ".jsonl":
            raise DataError(f"{out}: the output is JSONL; use a name that ends in .jsonl for --out")
        if out.exists():
            raise DataError(f"{out} already exists; give another --out")
        return out
    folder, stem = (source, "rescored") if source.is_dir() else (source.parent, f"{source.stem}-rescored")
    function = Path(reward).stem if reward.endswith(".py") else reward.rpartition(":")[2]
    slug = "".join(c if c.isalnum() or c in "._-" else "_" for c in function)[:60] or "reward"
    paths = (folder / f"{stem}-{slug}{f'-{number}' if number > 1 else ''}.jsonl" for number in count(1))
    return next(path for path in paths if not path.exists())


def write_rescored(path: Path, rows: Sequence[Row]) -> None:
    write_atomic(path, b"".join(map(json_line, rows)))
