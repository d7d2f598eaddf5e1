"""What the page of a rollout's route shows: its odds, prices, and what each route cost and earned."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from toolwise.training.records import RolloutRecord
from toolwise.view.rollout_store import RunStore


def router_page(store: RunStore, file: str, rollout_id: str) -> dict[str, Any]:
    """The odds of each route, what it costs, and what the rollouts of the same task cost and earned by route."""
    row, facts = store.row(file, rollout_id), run_routes(store)
    record = store.record(row)
    task = task_routes(store, row["task_id"], file, offered_routes([record], facts["names"]))
    return {**facts, **rollout_routes(record, facts["names"]), "task": task}


def offered_routes(records: Iterable[RolloutRecord], names: Sequence[str]) -> Sequence[str]:
    """The routes that these rollouts could have taken: none if no router chose for them."""
    return names if any(record.route or record.turn_routes for record in records) else ()


def rollout_routes(record: RolloutRecord, names: Sequence[str]) -> dict[str, Any]:
    """What the router computed for one rollout."""
    once = not record.turn_routes  # else each turn has its own
    return {
        "chosen": record.route,
        "answered_by": record.answered_by,
        "log_prob": record.router_log_prob if once else None,
        "odds": _odds(names, record.router_logits) if once else [],
        "reward": record.router_token_level_rewards,
        "advantage": record.router_advantages if once else None,
        "turns": [{**turn, "odds": _odds(names, turn.get("logits")), "logits": None} for turn in record.turn_routes],
    }


def run_routes(store: RunStore) -> dict[str, Any]:
    """What is the same for all rollouts of the run."""
    everything = store.table.group_by("route").aggregate([("score", "mean"), ("cost", "mean"), ("route", "count")])
    return {
        "names": route_names(store),
        "run": [
            {"route": r["route"], "score": r["score_mean"], "cost": r["cost_mean"], "n": r["route_count"]}
            for r in everything.to_pylist()
            if r["route"] is not None
        ],
        "prices": price_list(store),
        "frontier": _frontier_curve(store),
    }


def task_routes(store: RunStore, task_id: str, file: str, offered: Sequence[str]) -> list[dict[str, Any]]:
    """What the rollouts of a task cost and earned by route, in the file and in the whole run. Of the routes on offer,
    those that were not tried are there too."""
    import pyarrow.compute as pc

    same = store.table.filter(pc.equal(store.table["task_id"], task_id))
    by_route: dict[str, list[dict[str, Any]]] = {name: [] for name in offered}
    for other in same.select(["route", "score", "cost", "file"]).to_pylist():
        by_route.setdefault(other["route"] or "", []).append(other)
    return [_route_row(name, rows, file) for name, rows in sorted(by_route.items())]


def _route_row(name: str, rows: Sequence[Mapping[str, Any]], file: str) -> dict[str, Any]:
    here = [row for row in rows if row["file"] == file]

    def mean(of: Sequence[Mapping[str, Any]], column: str) -> float | None:
        values = [row[column] for row in of if row[column] is not None]
        return sum(values) / len(values) if values else None

    return {
        "route": name,
        "n": len(here),
        "score": mean(here, "score"),
        "cost": mean(here, "cost"),
        "n_run": len(rows),
        "score_run": mean(rows, "score"),
        "cost_run": mean(rows, "cost"),
    }


def _odds(names: Sequence[str], logits: Any) -> list[dict[str, Any]]:
    """Probability of each route; None for one that does not apply to the task."""
    if not isinstance(logits, Sequence) or isinstance(logits, str):
        return []
    known = [value for value in logits if isinstance(value, int | float)]
    top = max(known, default=0.0)
    total = sum(math.exp(value - top) for value in known)
    labels = names if len(names) == len(logits) else [f"route {i + 1}" for i in range(len(logits))]
    return [
        {"route": label, "p": math.exp(value - top) / total if isinstance(value, int | float) else None}
        for label, value in zip(labels, logits, strict=True)
    ]


def route_names(store: RunStore) -> list[str]:
    """The routes in the order of the head, from the run's settings; else those that occur."""
    settings = run_settings(store)
    try:
        from toolwise.config.schema import RunConfig
        from toolwise.routing.routes import build_routes

        tools = [t if isinstance(t, str) else str(t.get("name")) for t in settings.get("tools", [])]
        config = RunConfig.model_validate({"router": settings.get("router", {})})
        return list(build_routes(config.router, tools).names)
    except Exception:  # settings of another version
        return sorted({name for name in store.table["route"].to_pylist() if name})


def price_list(store: RunStore) -> dict[str, Any]:
    """What the settings say about prices: of tools, of the router's cost, and its budgets."""
    settings = run_settings(store)
    router = settings.get("router", {}) if isinstance(settings.get("router"), dict) else {}
    tools = [t for t in settings.get("tools", []) if isinstance(t, dict) and "price" in t]
    return {
        "cost": router.get("cost"),
        "tools": {str(t.get("name")): t["price"] for t in tools},
        "prices": router.get("prices") or {},
        "routes": router.get("routes") or [],
        "budgets": router.get("budgets") or [],
    }


def run_settings(store: RunStore) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(store.folder.config_text or "")
    except (ValueError, RecursionError):
        return {}


def _frontier_curve(store: RunStore) -> Any:
    from toolwise.errors import CheckpointError
    from toolwise.view.frontier import read_frontier

    try:
        frontier = read_frontier(store.folder)
    except CheckpointError:
        return None
    return frontier and {"curves": frontier["curves"], "fixed": frontier["fixed"]}
