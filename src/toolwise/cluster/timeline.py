"""Who did what when, and who waited: cluster.jsonl of a run folder as a trace for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from toolwise.errors import ConfigError


def trace_of(run: Path) -> dict[str, Any]:
    """One row for each process; what a process does at the same time is in lanes of it. A gap is waiting."""
    path = run / "cluster.jsonl"
    if not path.is_file():
        raise ConfigError(f"{run} has no cluster.jsonl: it is no folder of a run on a cluster")
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    events = [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be half written
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
