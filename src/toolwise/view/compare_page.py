"""What the page of a comparison shows: the tasks that two files of rollouts share, and how their outcomes differ."""

from __future__ import annotations

from typing import Any, Literal

from toolwise.view.rollout_store import RunStore

Outcome = Literal["learned", "lost", "better", "worse", "cheaper", "dearer", "same"]
ORDER: tuple[Outcome, ...] = ("lost", "learned", "worse", "better", "dearer", "cheaper", "same")
TOLERANCE = 1e-9


def compare_page(first: RunStore, first_file: str, second: RunStore, second_file: str) -> dict[str, Any]:
    """Tasks in both files by outcome. A task with several rollouts is compared by their means."""
    before, after = _by_task(first, first_file), _by_task(second, second_file)
    tasks = []
    for task_id in before.keys() & after.keys():
        one, other = before[task_id], after[task_id]
        tasks.append({"task_id": task_id, "outcome": _outcome(one, other), "first": one, "second": other})
    tasks.sort(key=lambda task: (ORDER.index(task["outcome"]), task["task_id"]))
    counts = {outcome: sum(task["outcome"] == outcome for task in tasks) for outcome in ORDER}
    return {
        "tasks": tasks,
        "counts": counts,
        "only_first": len(before.keys() - after.keys()),
        "only_second": len(after.keys() - before.keys()),
    }


def _by_task(store: RunStore, file: str) -> dict[str, dict[str, Any]]:
    columns = ["task_id", "rollout_id", "question", "kind", "score", "correct", "cost", "tokens"]
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in store.of_file(file).select(columns).to_pylist():
        groups.setdefault(row["task_id"], []).append(row)
    return {
        task_id: {
            "rollout_id": rows[0]["rollout_id"],
            "question": rows[0]["question"],
            "kind": rows[0]["kind"],
            "n": len(rows),
            "rollouts": [{name: row[name] for name in ("rollout_id", "score", "correct", "cost")} for row in rows],
            "score": _mean([row["score"] for row in rows]),
            "correct": _mean([None if row["correct"] is None else float(row["correct"]) for row in rows]),
            "cost": _mean([row["cost"] for row in rows]),
            "tokens": _mean([float(row["tokens"]) for row in rows]),
        }
        for task_id, rows in groups.items()
    }


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _outcome(before: dict[str, Any], after: dict[str, Any]) -> Outcome:
    was, now = before["correct"], after["correct"]
    if was is not None and now is not None and (was >= 0.5) != (now >= 0.5):
        return "learned" if now >= 0.5 else "lost"
    scores = before["score"], after["score"]
    change = 0.0 if None in scores else scores[1] - scores[0]  # without a score there is nothing to compare
    saved = (before["cost"] or 0.0) - (after["cost"] or 0.0)
    as_good = abs(change) <= TOLERANCE if was is None or now is None else was == now
    if abs(saved) > TOLERANCE and as_good:
        return "cheaper" if saved > 0 else "dearer"
    if abs(change) > TOLERANCE:
        return "better" if change > 0 else "worse"
    return "same"
