"""The walks in docs/architecture.md: every hop is called, in that order, when the code runs."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from reciting import THINKING_TASKS, recite

import toolwise
from toolwise.config.schema import RunConfig
from toolwise.data.files import read_rows
from toolwise.training.loop import train_step
from toolwise.training.run import assemble

ROOT = Path(__file__).parents[2]
SOURCES = str(Path(toolwise.__file__).parent)
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
MAX_HOPS = {"A Parquet row becomes a checkpoint": 30, "A routed question": 15, "One thinking step": 15}


def walk(title: str) -> list[str]:
    """The hops of a walk as `file:function`."""
    section = PAGE.split(f"### {title}\n", 1)[1].split("\n#", 1)[0]
    return [f"{file}:{name}" for file, name in re.findall(r"^\| \d+ \| `([\w/.]+)` \| `([\w.]+)` \|", section, re.M)]


@contextmanager
def calls() -> Iterator[list[str]]:
    """Every function of the package in the order of first calls, in all threads that start meanwhile."""
    order: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCES):
            order.setdefault(f"{code.co_filename[len(SOURCES) + 1 :]}:{code.co_qualname}")

    found: list[str] = []
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        found += order


def follow(title: str, go: Callable[[], object]) -> None:
    hops = walk(title)
    assert 5 < len(hops) <= MAX_HOPS[title]
    with calls() as made:
        go()
    assert [hop for hop in hops if hop not in made] == []
    assert sorted(hops, key=made.index) == hops


def test_a_row_becomes_a_checkpoint(
    tmp_path: Path, make_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(
        tmp_path,
        {
            "data": {"train": "train.parquet"},
            "trainer": {"total_steps": 1, "console": False},
            "validation": {"before": False},
        },
    )
    pq.write_table(pa.Table.from_pylist(list(read_rows(tmp_path / "train.jsonl"))), tmp_path / "train.parquet")
    monkeypatch.setattr(
        "toolwise.training.run.require_model", lambda *_: None
    )  # a rehearsal, which calls the parser too
    follow("A Parquet row becomes a checkpoint", lambda: toolwise.train(config, out=tmp_path / "run"))


def test_a_routed_question(tmp_path: Path) -> None:
    shutil.unpack_archive(ROOT / "tests" / "fixtures" / "frozen_run.tar.gz", tmp_path)
    exported = next(tmp_path.rglob("exported"))
    agent = toolwise.RoutedAgent.load(exported, tools=["calculator", "search"], documents=["Alder has 12 mills."])
    follow("A routed question", lambda: agent.ask("How many mills does Alder have?"))


def test_a_thinking_step() -> None:
    settings = {
        "model": {"device": "cpu"},
        "data": {"batch_size": 2},
        "rollout": {"n": 4, "max_new_tokens": 24, "tool_parser": "none"},
        "multi_turn": {"enable": False},
        "reward": {"sandbox": {"tier": "off"}},
        "algorithm": {"adv_estimator": "rlvcr", "rlvcr": {"enable": True, "max_thought_tokens": 12}},
    }
    by_place = lambda rollouts_messages, ground_truths: [float(i % 2) for i in range(len(rollouts_messages))]  # noqa: E731
    run = recite(
        assemble(RunConfig.model_validate(settings), tasks=THINKING_TASKS, validation_tasks=[], reward=by_place)
    )
    try:
        follow("One thinking step", lambda: asyncio.run(train_step(run)))
    finally:
        run.close()


def test_the_page_has_these_walks() -> None:
    assert re.findall(r"^### (.*)", PAGE.split("## Three walks", 1)[1].split("\n## ", 1)[0], re.M) == list(MAX_HOPS)
    with pytest.raises(AssertionError):
        follow("A routed question", lambda: None)
