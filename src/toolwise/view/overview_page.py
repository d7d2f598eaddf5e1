"""What the overview of a run shows: its state, figures before and after, curves with spreads, faults, findings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from toolwise.training.metrics import describe_totals
from toolwise.training.trackers.console import format_duration
from toolwise.training.trackers.observers import describe_observer_errors
from toolwise.view.comparison import MetricChange, describe_budgets, headline, rows_by_kind
from toolwise.view.rollout_store import RunStore
from toolwise.view.router_page import price_list, run_settings

QUANTILES = (0.1, 0.5, 0.9)
SPREAD_COLUMNS = ("score", "cost", "tokens")
FAULTS, STOP = "faults/", "stop/"
"""Prefixes of metrics."""
MAX_SERIES = 64
MAX_POINTS = 2000
"""Points of a curve; longer ones are thinned out."""


def overview_page(store: RunStore) -> dict[str, Any]:
    run = store.folder
    summary = {"faults": fault_totals(run.metrics), **run.summary}
    return {
        "name": run.name,
        "finished": run.finished,
        "step": summary.get("steps"),
        "total_steps": summary.get("total_steps") or _planned_steps(store),
        "facts": _facts(summary),
        "diagnosis": run.diagnosis,
        "updated": summary.get("updated"),
        "headline": [_change(change) for change in headline(summary)],
        "kinds": [
            {"label": row.label, "n": row.n, "changes": [_change(change) for change in row.changes]}
            for row in rows_by_kind(summary)
        ],
        "metric_names": sorted(run.metric_names - {"step"}),
        "spreads": spreads(store),
        "stops": stop_reasons(store),
        "faults": summary.get("faults") or {},
        "prices": price_list(store),
        "rollouts": store.table.num_rows,
        "files": store.files(),
    }


def _planned_steps(store: RunStore) -> int | None:
    """What the settings say, while the run has no summary."""
    trainer = run_settings(store).get("trainer")
    steps = trainer.get("total_steps") if isinstance(trainer, dict) else None
    return steps if isinstance(steps, int) else None


def _change(change: MetricChange) -> dict[str, Any]:
    return asdict(change) | {"tone": change.tone}


def _facts(summary: Mapping[str, Any]) -> list[str]:
    seconds, memory = summary.get("seconds"), summary.get("peak_rss_mb")
    faults = describe_totals(summary.get("faults") or {})
    facts = [
        format_duration(seconds) if isinstance(seconds, int | float) else "",
        f"{memory:,.0f} MB peak memory" if isinstance(memory, int | float) else "",
        f"seed {summary['seed']}" if summary.get("seed") is not None else "",
        f"faults: {faults}" if faults else "",
        f"stopped: {summary['stopped']}" if summary.get("stopped") else "",
        *describe_observer_errors(summary.get("observers") or []),
        *describe_budgets(summary),
    ]
    return [fact for fact in facts if fact]


def series(store: RunStore, names: Sequence[str]) -> dict[str, Any]:
    """Steps and values of metrics, evenly thinned out if there are too many."""
    found = {}
    for name in names[:MAX_SERIES]:
        steps, values = store.folder.series(name)
        stride = -(-len(steps) // MAX_POINTS) or 1
        # counted from the end: the latest value is always there
        found[name] = {"steps": steps[::-1][::stride][::-1], "values": values[::-1][::stride][::-1]}
    return found


def spreads(store: RunStore) -> dict[str, Any]:
    """For each training step the 10th, 50th and 90th percentile and the mean of what its rollouts scored and cost."""
    import numpy as np
    import pyarrow.compute as pc

    table = store.table.filter(pc.equal(store.table["phase"], "train"))
    steps = table["step"].to_numpy()
    found: dict[str, Any] = {"steps": np.unique(steps).tolist()}
    edges = np.searchsorted(steps, [*found["steps"], np.inf])
    for name in SPREAD_COLUMNS:
        values = pc.cast(table[name], "float64").to_numpy(zero_copy_only=False)
        rows: list[list[float | None]] = []
        for begin, end in pairwise(edges.tolist()):
            known = values[begin:end][np.isfinite(values[begin:end])]
            quantiles: list[float | None] = [None] * len(QUANTILES)
            rows.append(
                [*np.quantile(known, QUANTILES).tolist(), float(known.mean())] if len(known) else [*quantiles, None]
            )
        found[name] = {key: [row[i] for row in rows] for i, key in enumerate(("low", "median", "high", "mean"))}
    return found


def stop_reasons(store: RunStore) -> dict[str, Any]:
    """How many rollouts of each training step ended for each reason; as logged if no rollouts are stored."""
    import pyarrow.compute as pc

    table = store.table.filter(pc.equal(store.table["phase"], "train"))
    if not table.num_rows:
        return _logged_stop_reasons(store.folder.metrics)
    counts = table.group_by(["step", "stop_reason"]).aggregate([("stop_reason", "count")]).to_pylist()
    steps = sorted({row["step"] for row in counts})
    totals = Counter[str]()
    for row in counts:
        totals[row["stop_reason"] or ""] += row["stop_reason_count"]
    place = {step: index for index, step in enumerate(steps)}
    reasons = {reason: [0] * len(steps) for reason, _ in totals.most_common()}
    for row in counts:
        reasons[row["stop_reason"] or ""][place[row["step"]]] = row["stop_reason_count"]
    return {"steps": steps, "reasons": reasons}


def _logged_stop_reasons(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    by_step = _training_steps(rows)
    names = sorted({name for row in by_step.values() for name in row if name.startswith(STOP)})
    reasons = {
        name.removeprefix(STOP): [round(_number(row, name) * _number(row, "rollouts")) for row in by_step.values()]
        for name in names
    }
    ordered = sorted(reasons.items(), key=lambda reason: -sum(reason[1]))
    return {"steps": list(by_step), "reasons": dict(ordered)}


def fault_totals(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """What a summary says about faults, for a run that has none yet: counts by class, of rollouts and of calls."""
    totals: Counter[str] = Counter()
    for row in _training_steps(rows).values():
        names = [
            name for name in row if name.startswith(FAULTS) and name.count("/") == 1 and name != f"{FAULTS}rollouts"
        ]
        totals.update({name.removeprefix(FAULTS): round(_number(row, name)) for name in names})
        rollouts = _number(row, "rollouts")
        calls = max(_number(row, "calls/mean"), _number(row, "calls/failed")) * rollouts
        totals.update({"rollouts": round(rollouts), "calls": round(calls)})
    return dict(totals)


def _training_steps(rows: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    """The latest line of each training step."""
    found = {row["step"]: row for row in rows if "rollouts" in row and isinstance(row.get("step"), int)}
    return dict(sorted(found.items()))


def _number(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
