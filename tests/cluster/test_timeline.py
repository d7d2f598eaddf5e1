"""cluster.jsonl as a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toolwise.cluster.node_log import NodeLog
from toolwise.cluster.timeline import trace_of
from toolwise.errors import ConfigError

EVENTS = [
    {"time": 101.0, "event": "start", "process": "worker-0", "number": 1},
    {"time": 103.0, "event": "group", "process": "worker-0", "seconds": 2.0},
    {"time": 103.5, "event": "group", "process": "worker-0", "seconds": 2.0},
    {"time": 104.5, "event": "group", "process": "worker-0", "seconds": 1.0},
    {"time": 105.0, "event": "update", "process": "learner-1", "seconds": 0.5},
    {"time": 105.0, "event": "counters", "process": "worker-0", "engine/blocks": 3},
]


def test_each_process_has_a_row_and_what_overlaps_has_lanes(tmp_path: Path, cli: Any) -> None:
    lines = "".join(f"{json.dumps(event)}\n" for event in EVENTS)
    (tmp_path / "cluster.jsonl").write_text(lines + '{"time": 10')
    ended = cli("cluster", "timeline", tmp_path, tmp_path / "out.json")
    assert ended.status == 0, ended.err
    trace = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in trace if event["ph"] == "M"}
    spans = [(names[e["pid"]], e["name"], e["tid"], e["ts"], e["dur"]) for e in trace if e["ph"] == "X"]
    assert spans == [
        ("worker-0", "group", 1, 0, 2_000_000),
        ("worker-0", "group", 2, 500_000, 2_000_000),
        ("worker-0", "group", 1, 2_500_000, 1_000_000),
        ("learner-1", "update", 1, 3_500_000, 500_000),
    ]
    assert [(e["name"], e["args"]) for e in trace if e["ph"] in "iC"] == [
        ("start", {"number": 1}),
        ("counters", {"engine/blocks": 3}),
    ]


def test_what_a_node_log_writes_is_shown(tmp_path: Path) -> None:
    log = NodeLog(tmp_path)
    log.event("group", "worker-0", seconds=0.5)
    log.add("learner-0", b"a line\n", {})
    assert [event["ph"] for event in trace_of(tmp_path)["traceEvents"]] == ["M", "X"]
    assert (tmp_path / "logs" / "learner-0.log").read_text() == "a line\n"


def test_a_run_without_a_cluster_has_no_timeline(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no cluster.jsonl"):
        trace_of(tmp_path)


def test_damaged_lines_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    good = json.dumps(EVENTS[1]).encode()
    damaged = [b'{"time": 1', b"\xff\xfe", b"[1]", b'{"event": "group", "process": "worker-0"}', b'{"time": "1"}']
    (tmp_path / "cluster.jsonl").write_bytes(b"\n".join([*damaged, good, b""]))
    assert [event["ph"] for event in trace_of(tmp_path)["traceEvents"]] == ["M", "X"]
    assert "5 damaged lines are left out" in caplog.text
