"""Metrics of scored rollouts, for training steps and validations."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from toolwise.protocols import Metrics
from toolwise.training.fault_rates import fault_metrics, is_faulty
from toolwise.types import ScoredRollout, StopReason
from toolwise.untrusted.bounds import MAX_DISTINCT_NAMES, MAX_METRICS, MAX_NAME_CHARS, truncate_text


def summarize(scored: Sequence[ScoredRollout]) -> Metrics:
    """Metrics of one training step's rollouts."""
    if not scored:
        return {}
    counted = [s for s in scored if s.result.has_valid_score]
    metrics: Metrics = {
        "rollouts": float(len(scored)),
        "cost/mean": mean([s.rollout.usage.cost for s in scored]),
        "calls/mean": mean([float(sum(s.rollout.usage.calls.values())) for s in scored]),
        "calls/failed": mean([float(sum(s.rollout.usage.failed_calls.values())) for s in scored]),
        "tools/queue_s": sum(s.rollout.usage.queue_s for s in scored)
        / max(1, sum(sum(s.rollout.usage.calls.values()) for s in scored)),
        "tools/queue_s_max": max(s.rollout.usage.longest_queue_s for s in scored),
        "turns/mean": mean([float(len(s.steps)) for s in scored]),
        "tokens/sampled": float(sum(s.rollout.usage.sampled_tokens for s in scored)),
        "reward/error_rate": mean([float(s.result.error is not None) for s in scored]),
        "reward/invalid_rate": mean([float(s.result.error is None and not s.result.has_valid_score) for s in scored]),
        "reward/misaligned": float(sum(bool(s.warnings) for s in scored)),
    }
    if counted:
        scores = [s.score for s in counted]
        metrics |= {"score/mean": mean(scores), "score/std": std(scores)}
        by_name = reported_metrics(counted)
        for name in _most_common(by_name):
            metrics |= {f"reward/{name}/mean": mean(by_name[name]), f"reward/{name}/std": std(by_name[name])}
        if len(by_name) > MAX_METRICS:
            metrics["reward/metrics_left_out"] = float(len(by_name) - MAX_METRICS)
    for reason, count in Counter(s.rollout.stop_reason.value for s in scored).items():
        metrics[f"stop/{reason}"] = count / len(scored)
    turns = Counter(step.tokens.alignment for s in scored for step in s.steps)
    metrics |= {f"tokens/{alignment}": float(turns[alignment]) for alignment in ("clean", "realigned", "forked")}
    for kind, count in Counter(s.result.error.kind for s in scored if s.result.error).items():
        metrics[f"reward/errors/{kind}"] = float(count)
    return metrics | fault_metrics(scored) | route_metrics(scored)


def route_metrics(scored: Sequence[ScoredRollout]) -> Metrics:
    """For each route: the share of rollouts that took it, their mean score and cost."""
    routes: dict[str, list[ScoredRollout]] = defaultdict(list)
    for s in scored:
        if s.rollout.route is not None:
            routes[s.rollout.route].append(s)
    metrics: Metrics = {}
    for route, members in sorted(routes.items()):
        counted = [s.score for s in members if s.result.has_valid_score]
        metrics |= {
            f"route/{route}/share": len(members) / len(scored),
            f"route/{route}/cost": mean([s.rollout.usage.cost for s in members]),
        }
        metrics |= {f"route/{route}/score": mean(counted)} if counted else {}
    return metrics


def summarize_validation(scored: Sequence[ScoredRollout], held_out_tools: Collection[str] = ()) -> dict[str, Any]:
    """Metrics of a validation: overall, and per kind of task if tasks have a kind.

    With `held_out_tools`, there are two more kinds: tasks that name one of them ("unseen tools"), and the others.
    """
    kinds: dict[str, list[ScoredRollout]] = defaultdict(list)
    for s in scored:
        if held_out_tools:
            unseen = not set(held_out_tools).isdisjoint(s.rollout.task.tools or ())
            kinds["unseen tools" if unseen else "seen tools"].append(s)
        kind = s.rollout.task.extra_info.get("kind")
        if kind is not None:
            kinds[truncate_text(str(kind), MAX_NAME_CHARS)].append(s)
    by_kind = {kind: _group_metrics(kinds[kind]) for kind in _most_common(kinds, MAX_DISTINCT_NAMES)}
    return _group_metrics(scored) | route_metrics(scored) | {"by_kind": by_kind}


def validation_metrics(summary: Mapping[str, Any]) -> Metrics:
    """The result of `summarize_validation` as flat metrics: eval/correct, eval/lookup/correct, …"""
    metrics = {f"eval/{name}": float(v) for name, v in summary.items() if isinstance(v, int | float)}
    for kind, part in summary["by_kind"].items():
        metrics |= {f"eval/{kind}/{name}": float(v) for name, v in part.items()}
    return metrics


def _group_metrics(scored: Sequence[ScoredRollout]) -> dict[str, Any]:
    """Has no score if nothing could be scored: a 0 would suggest a bad model."""
    counted = [s for s in scored if s.result.has_valid_score]
    totals = {
        "cost": mean([s.rollout.usage.cost for s in scored]),
        "tokens": mean([float(s.rollout.usage.sampled_tokens) for s in scored]),
        "errors": sum(not s.result.has_valid_score or is_faulty(s) for s in scored),
    }
    too_long = sum(s.rollout.stop_reason is StopReason.PROMPT_TOO_LONG for s in scored)
    totals |= {StopReason.PROMPT_TOO_LONG.value: too_long} if too_long else {}
    head = {"n": len(scored)} | ({"score": mean([s.score for s in counted])} if counted else {})
    reserved = {"n", "score", "by_kind", *totals}
    by_name = reported_metrics(counted)
    return head | {name: mean(by_name[name]) for name in _most_common(by_name) if name not in reserved} | totals


def reported_metrics(counted: Sequence[ScoredRollout]) -> dict[str, list[float]]:
    """The values of each metric that the reward reported."""
    values: dict[str, list[float]] = defaultdict(list)
    for s in counted:
        for name, metric in s.result.metrics.items():
            if metric.is_score_valid:
                values[name].append(metric.score)
    return dict(sorted(values.items()))


def _most_common(by_name: Mapping[str, Sequence[object]], limit: int = MAX_METRICS) -> list[str]:
    """The names with the most values, sorted. Limited because a reward may report different metrics per rollout."""
    return sorted(sorted(by_name, key=lambda name: (-len(by_name[name]), name))[:limit])


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def std(values: Sequence[float]) -> float:
    center = mean(values)
    return math.sqrt(mean([(x - center) ** 2 for x in values]))
