"""Who did what when, and who waited: cluster.jsonl of a run folder as a trace for Perfetto."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

from toolwise.errors import ConfigError

log = logging.getLogger("toolwise.cluster")


def _read_event(line: bytes) -> dict[str, Any] | None:
    """None for a line that is not an event, such as a last one that is half written."""
    try:
        event = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not all(isinstance(event.get(name), str) for name in ("process", "event")):
        return None
    numbers = (event.get("time"), event.get("seconds", 0.0))
    return event if all(isinstance(n, int | float) and math.isfinite(n) for n in numbers) else None


def trace_of(run: Path) -> dict[str, Any]:
    """One row for each process; what a process does at the same time is in lanes of it. A gap is waiting."""
    path = run / "cluster.jsonl"
    if not path.is_file():
        raise ConfigError(f"{run} has no cluster.jsonl: it is no folder of a run on a cluster")
    lines = path.read_bytes().splitlines(keepends=True)
    events = [event for line in lines if (event := _read_event(line)) is not None]
    if damaged := sum(line.endswith(b"\n") for line in lines) - len(events):
        log.warning("%s: %d damaged lines are left out", path, damaged)
    begins = [event["time"] - event.get("seconds", 0.0) for event in events]
    first, lanes = min(begins, default=0.0), dict[str, list[float]]()
    numbers = {name: number for number, name in enumerate(sorted({event["process"] for event in events}), 1)}
    trace: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}} for name, number in numbers.items()
    ]
    for event, begin in sorted(zip(events, begins, strict=True), key=lambda pair: pair[1]):
        name, ends = event["process"], lanes.setdefault(event["process"], [])
        shown = {"name": event["event"], "pid": numbers[name], "ts": round(1e6 * (begin - first))}
        details = {key: value for key, value in event.items() if key not in ("time", "event", "process", "seconds")}
        if "seconds" not in event:
            kind: dict[str, Any] = {"ph": "C"} if event["event"] == "counters" else {"ph": "i", "s": "p"}
            trace.append({**shown, **kind, "tid": 0, "args": details})
            continue
        lane = next((index for index, end in enumerate(ends) if end <= begin), len(ends))
        ends[lane : lane + 1] = [event["time"]]
        duration = round(1e6 * event["seconds"])
        trace.append({**shown, "ph": "X", "tid": lane + 1, "dur": duration, "args": details})
    return {"traceEvents": trace}
