"""Printed output of rewards is kept within bounds and is safe to show in a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import pytest

from toolwise.messages import Message
from toolwise.rewards import Reward, printed_output
from toolwise.rewards.executor import InProcessExecutor
from toolwise.rewards.printed_output import CALL_CHARS, PrintLog, PrintPreview, capture_prints, format_lines
from toolwise.types import Rollout, StopReason, Task, Usage


def rollout(name: str) -> Rollout:
    task = Task(task_id="t", prompt=[Message(role="user", content="?")], ground_truth=name)
    return Rollout(name, "g", 0, 0, task, None, (), task.prompt, StopReason.ANSWERED, Usage())


def test_lines_have_their_label_and_no_control_characters() -> None:
    assert format_lines("step 1, a", "one\n\x1b[31mred\x07\n") == ["[step 1, a] one", "[step 1, a] \\x1b[31mred\\x07"]
    assert format_lines("", "tab\tstays\r\n") == ["tab\tstays\\r"]


def test_a_log_appears_with_the_first_line_and_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(printed_output, "FILE_BYTES", 1000)
    log = PrintLog(tmp_path / "logs" / "reward.log")
    assert not (tmp_path / "logs").exists()
    for number in range(200):
        log("step 1, r", f"line {number} \ud800")
    log.close()
    files = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert files == ["reward.log", "reward.log.1"]
    assert sum(path.stat().st_size for path in (tmp_path / "logs").iterdir()) <= 2000
    assert "line 199" in (tmp_path / "logs" / "reward.log").read_text()


def test_a_log_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file in its place")
    PrintLog(tmp_path / "logs" / "reward.log")("", "text")


def test_the_first_lines_are_shown_and_the_rest_counted() -> None:
    lines = PrintPreview(3)
    lines("a", "1\n2\n")
    lines("b", "3\n4\n5\n")
    assert (lines.lines, lines.omitted) == (["[a] 1", "[a] 2", "[b] 3"], 2)


def test_rewards_in_this_process_are_heard_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    async def chatty(messages: Any, ground_truth: Any) -> float:
        print("begin", ground_truth)
        await asyncio.sleep(0.01)
        print("end", ground_truth, file=sys.stderr)
        return 1.0

    told: dict[str, str] = {}
    before = sys.stdout, sys.stderr
    executor = InProcessExecutor(told.__setitem__)
    asyncio.run(executor.evaluate(Reward.of(chatty), [rollout("a"), rollout("b")], step=3))
    assert told == {"step 3, a": "begin a\nend a\n", "step 3, b": "begin b\nend b\n"}
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr().out == "begin a\nbegin b\n"  # the terminal still gets the output


def test_what_one_call_prints_is_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    def endless(messages: Any, ground_truth: Any) -> float:
        for _ in range(100):
            print("x" * 1000)
        return 1.0

    told: dict[str, str] = {}
    asyncio.run(InProcessExecutor(told.__setitem__).evaluate(Reward.of(endless), [rollout("a")], step=0))
    assert len(told["step 0, a"]) < CALL_CHARS + 100
    assert "more characters" in told["step 0, a"]


def test_calls_that_overlap_wrap_the_streams_once(capsys: pytest.CaptureFixture[str]) -> None:
    async def wait(count: int) -> None:
        with capture_prints("", print):
            for _ in range(count):
                await asyncio.sleep(0)
            assert sys.stdout.stream is before[0]  # type: ignore[attr-defined]

    async def overlap() -> None:
        for _ in range(3):
            first, second = asyncio.create_task(wait(1)), asyncio.create_task(wait(3))  # first in, first out
            await asyncio.gather(first, second)
            assert (sys.stdout, sys.stderr) == before

    before = sys.stdout, sys.stderr
    asyncio.run(overlap())


def test_a_stream_that_is_put_back_late_is_wrapped_no_deeper(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    for _ in range(3):
        redirected = contextlib.redirect_stdout(io.StringIO())
        with capture_prints("", print):
            redirected.__enter__()
        redirected.__exit__(None, None, None)  # restores our wrapper
        with capture_prints("", print):
            assert sys.stdout.stream is before  # type: ignore[attr-defined]
        assert sys.stdout is before
