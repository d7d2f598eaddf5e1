"""Counters of the server, in the text format of Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
MAX_LABELS = 256
"""Values of a label that are counted apart; a model may call tools by any name."""
OTHER = "other"


@dataclass(slots=True)
class Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    total: float = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(BUCKETS_S, value)] += 1
        self.total += value

    def lines(self, name: str) -> list[str]:
        lines, below = [], 0
        for bound, count in zip((*BUCKETS_S, "+Inf"), self.counts, strict=True):
            below += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {below}')
        return [*lines, f"{name}_sum {self.total:.6f}", f"{name}_count {below}"]


@dataclass(slots=True)
class ServerMetrics:
    """Belongs to one event loop."""

    responses: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(path, status) -> number"""
    tokens: Counter[str] = field(default_factory=Counter)
    tool_calls: Counter[str] = field(default_factory=Counter)
    routes: Counter[str] = field(default_factory=Counter)
    cost: float = 0.0
    reloads: Counter[str] = field(default_factory=Counter)
    answer_s: Histogram = field(default_factory=Histogram)
    first_token_s: Histogram = field(default_factory=Histogram)

    def count_usage(self, usage: Mapping[str, Any]) -> None:
        """Add the usage of one answer."""
        for kind in ("prompt", "completion"):
            self.tokens[kind] += int(usage.get(f"{kind}_tokens", 0))
        for name, count in (usage.get("calls") or {}).items():
            _count(self.tool_calls, name, count)
        if usage.get("route"):
            from toolwise.agent.turn_inference import ROUTE_SEPARATOR

            for route in usage["route"].split(ROUTE_SEPARATOR):
                _count(self.routes, route, 1)
        self.cost += float(usage.get("cost", 0.0))

    def text(self, gauges: Mapping[str, float]) -> str:
        """The exposition; `gauges` are values of this moment."""
        lines = _counter("responses_total", "HTTP responses", ("path", "status"), self.responses)
        lines += _counter("tokens_total", "Tokens read and sampled", ("kind",), self.tokens)
        lines += _counter("tool_calls_total", "Calls that the server ran", ("tool",), self.tool_calls)
        lines += _counter("routes_total", "Routes chosen: one per answer, or per turn", ("route",), self.routes)
        lines += _counter("cost_total", "Cost of all answers", (), {(): self.cost})
        lines += _counter("reloads_total", "Reloads of the weights", ("result",), self.reloads)
        for name, text, histogram in (
            ("answer_seconds", "Time to a complete answer", self.answer_s),
            ("first_token_seconds", "Time to the first event of a stream", self.first_token_s),
        ):
            lines += [f"# HELP toolwise_{name} {text}", f"# TYPE toolwise_{name} histogram"]
            lines += histogram.lines(f"toolwise_{name}")
        for name, value in gauges.items():
            metric = f"toolwise_{name.replace('/', '_')}"
            lines += [f"# TYPE {metric} gauge", f"{metric} {value:g}"]
        return "\n".join(lines) + "\n"


def _count(counter: Counter[str], label: str, count: int) -> None:
    counter[label if label in counter or len(counter) < MAX_LABELS else OTHER] += count


def _counter(name: str, text: str, labels: tuple[str, ...], values: Mapping[Any, float]) -> list[str]:
    lines = [f"# HELP toolwise_{name} {text}", f"# TYPE toolwise_{name} counter"]
    for key, value in values.items():
        keys = key if isinstance(key, tuple) else (key,)
        pairs = ",".join(f'{label}="{_escape(part)}"' for label, part in zip(labels, keys, strict=True))
        lines.append(f"toolwise_{name}{{{pairs}}} {value:.10g}" if pairs else f"toolwise_{name} {value:.10g}")
    return lines


def _escape(value: object) -> str:
    return str(value)[:120].replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
