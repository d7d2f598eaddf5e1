"""The example with five routes: real tools, an MCP server, a second model on loopback, and a frontier."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import Cli

FOLDER = Path(__file__).parents[2] / "examples" / "five_routes"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    yield importlib.import_module("run")
    for name in ("run", "tasks"):
        sys.modules.pop(name, None)


def test_every_route_is_the_cheapest_right_one_of_some_kind(example: Any) -> None:
    tasks = sys.modules["tasks"]
    assert set(tasks.CHEAPEST.values()) == set(tasks.ROUTES)
    rows = list(tasks.make_rows(60, seed=0, split="train"))
    assert set(Counter(row["extra_info"]["kind"] for row in rows).values()) == {10}
    assert rows == list(tasks.make_rows(60, seed=0, split="train"))


def test_times_are_those_of_the_zones(example: Any) -> None:
    from datetime import datetime
    from zoneinfo import ZoneInfo

    tasks, rng = sys.modules["tasks"], Random(3)
    for _ in range(20):
        question = tasks.make_question("clock", rng)
        arguments = question.calls[0][1]
        there = datetime.fromisoformat(f"2026-03-01T{arguments['time']}").replace(
            tzinfo=ZoneInfo(arguments["source_timezone"])
        )
        assert there.astimezone(ZoneInfo(arguments["target_timezone"])).strftime("%H:%M") == question.answer


def check_demonstration(conversation: dict[str, Any]) -> None:
    """What a tool answered is the answer, and it was offered."""
    *_, last = messages = conversation["messages"]
    results = [m["content"] for m in messages if m["role"] == "tool"]
    offered = {tool["function"]["name"] for tool in conversation["tools"]}
    called = {call["function"]["name"] for m in messages for call in m.get("tool_calls", ())}
    assert called <= offered
    assert not results or last["content"].removeprefix("Answer: ") in results[0]


@pytest.mark.long
def test_the_example_runs_end_to_end(example: Any, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def command(*words: object, log: Path) -> None:
        done = cli(*words)
        assert done.status == 0, done.out + done.err

    monkeypatch.setattr(example, "toolwise", command)
    settings = ("trainer.total_steps=1", "data.batch_size=2", "trainer.console=false", "rollout.max_new_tokens=24")
    example.main(
        [
            *("--out", str(tmp_path / "five"), "--small", "builtin:small", "--expert", "builtin:small"),
            *("--conversations", "30", "--repeats", "1", "--train", "12", "--heldout", "6", "--draws", "1"),
            *(word for setting in settings for word in ("--set", setting)),
        ]
    )
    for line in (tmp_path / "five" / "sft.jsonl").read_text().splitlines():
        check_demonstration(json.loads(line))
    found = json.loads((tmp_path / "five" / "results.json").read_text())
    assert found["heldout"]["n"] == 6
    assert found["heldout"]["errors"] == 0
    assert {"router", "random", "oracle"} <= found["curves"].keys()
    assert found["fixed"]["always ask-expert"][0] == pytest.approx(3.0)


@pytest.mark.long
def test_the_router_finds_the_cheapest_routes(example: Any, tmp_path: Path) -> None:
    example.main(["--out", str(tmp_path / "five")])
    found = json.loads((tmp_path / "five" / "results.json").read_text())
    assert found["heldout"]["cost"] < 1.5  # of 1.35, on 180 questions
    assert found["heldout"]["score"] > 0.6
    shares = [found["heldout"].get(f"route/{name}/share", 0.0) for name in sys.modules["tasks"].ROUTES]
    assert sum(share > 0.1 for share in shares) >= 4
    for (_, _, router), (_, _, mixture) in zip(
        found["curves"]["router"], found["curves"]["best fixed mixture"], strict=True
    ):
        assert router >= mixture - 0.05
