"""One worker process: requests and answers, invalid data on its channel, and its end."""

from __future__ import annotations

import asyncio
import os
import queue
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from toolwise.tools.isolation.code_location import ModuleRef
from toolwise.tools.isolation.tool_worker import ToolDied, ToolFault, ToolWorker

T = TypeVar("T")
SOURCE = """
import os
def echo(x: int = 0) -> int:
    return x
def scribble(frame: str) -> str:
    for descriptor in range(3, 4096):
        try: os.write(descriptor, bytes.fromhex(frame))
        except OSError: pass
    return ""
def order() -> list[str]:
    return list({str(i) for i in range(100)})
def close() -> str:
    os.closerange(3, 4096)
    return ""
NOT_A_TOOL = 3
"""
Start = Callable[[], ToolWorker]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    (tmp_path / "tools.py").write_text(SOURCE)
    workers: list[ToolWorker] = []

    def up() -> ToolWorker:
        come: queue.Queue[ToolWorker] = queue.Queue()
        workers.append(ToolWorker(ModuleRef(None, str(tmp_path / "tools.py")), come.put, lambda worker, fault: None))
        return come.get(timeout=60)

    yield up
    for worker in workers:
        worker.kill()
        worker.thread.join(20)
        assert not worker.thread.is_alive()
        assert not Path(f"/proc/{worker.pid}").exists()


def run(work: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(work, 60)

    return asyncio.run(limited())


def call(name: str, **parameters: Any) -> dict[str, Any]:
    return {"call": name, "parameters": parameters}


def test_questions_are_answered_one_after_the_other(start: Start) -> None:
    worker = start()
    for number in range(3):
        assert run(worker.request(call("echo", x=number))) == [str(number), None, {"ok": True}]


def test_all_workers_order_a_set_alike(start: Start) -> None:
    assert run(start().request(call("order"))) == run(start().request(call("order")))


def test_a_question_about_nothing_is_a_fault_and_no_death(start: Start) -> None:
    worker = start()
    for name, kind in (("no_such", "AttributeError"), ("NOT_A_TOOL", "ToolwiseError")):
        with pytest.raises(ToolFault) as caught:
            run(worker.request(call(name)))
        assert type(caught.value).__name__ == kind
        assert "Traceback" in caught.value.__notes__[0]
    assert run(worker.request(call("echo")))[0] == "0"


def test_arguments_without_json_never_reach_it(start: Start) -> None:
    worker = start()
    with pytest.raises(ToolFault, match="cannot be sent as JSON"):
        run(worker.request(call("echo", x=object())))
    assert run(worker.request(call("echo")))[0] == "0"


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        ("000000027b7d", "sent an unexpected reply"),
        ("000000025b5d", "invalid data: the worker sent a list instead of an object"),
        ("00000001ff", "invalid data: the worker sent something that is not valid JSON"),
        ("ffffffff", "invalid data: the result has 4,294,967,295 bytes"),
    ],
)
def test_nonsense_on_its_channel_is_a_death(start: Start, frame: str, reason: str) -> None:
    worker = start()
    with pytest.raises(ToolDied, match=reason):
        run(worker.request(call("scribble", frame=frame)))
    worker.thread.join(20)
    with pytest.raises(ToolDied, match="the tool's process was killed by SIGKILL"):
        run(worker.request(call("echo")))


def test_a_channel_that_the_tool_closes_is_a_death(start: Start) -> None:
    with pytest.raises(ToolDied, match="the tool's process"):
        run(start().request(call("close")))


def test_who_kills_it_twice_kills_nobody_else(start: Start) -> None:
    worker = start()
    worker.kill()
    worker.thread.join(20)
    worker.kill()
    assert not worker.thread.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whatever_happens_to_its_thread_the_pool_hears_that_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(code: int | None) -> str:
        raise RuntimeError("nobody foresaw this")

    monkeypatch.setattr("toolwise.tools.isolation.tool_worker.describe_exit", fail)
    gone: queue.Queue[ToolWorker] = queue.Queue()
    (tmp_path / "tools.py").write_text(SOURCE)
    worker = ToolWorker(
        ModuleRef(None, str(tmp_path / "tools.py")), ToolWorker.kill, lambda worker, fault: gone.put(worker)
    )
    assert gone.get(timeout=30) is worker
    worker.thread.join(20)
    worker.close_after_fork()


def test_a_worker_leaves_no_descriptors(start: Start) -> None:
    def one() -> None:
        worker = start()
        run(worker.request(call("echo")))
        worker.kill()
        worker.thread.join(20)

    one()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        one()
    assert len(os.listdir("/proc/self/fd")) <= before
