"""Tools in worker processes: results, errors, deadlines, and that no process is left running."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from process_state import is_running

from toolwise.concurrency.deadlines import run_with_deadline
from toolwise.config.imports import load_reference
from toolwise.envs.tool_env import ToolEnv
from toolwise.errors import ToolwiseError
from toolwise.messages import Message, ToolCall
from toolwise.tools import isolation
from toolwise.tools.function import FunctionTool, as_tool, tool
from toolwise.tools.isolation.tool_worker import ToolDied, ToolFault
from toolwise.types import Task

T = TypeVar("T")
FILE = Path(__file__).with_name("isolated_tools.py")
LATE = TimeoutError("late")
DEATHS = {
    "exit": "exited with status 3",
    "segfault": "killed by SIGSEGV",
    "fork and exit": "exited with status 4",
    "kill": "killed by SIGKILL",
}


@pytest.fixture(autouse=True, scope="module")
def _none_is_left() -> Iterator[None]:
    yield
    pids = isolation.shared_pool().pids()
    isolation.close()
    assert all(map(is_gone, pids))


def load(name: str) -> FunctionTool[..., Any]:
    found: FunctionTool[..., Any] = load_reference(f"{FILE}:{name}", what="tool")
    return found


def run(work: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(work, 60)

    return asyncio.run(limited())


def call(name: str, **parameters: Any) -> tuple[str, float | None, dict[str, Any]]:
    return run(load(name).execute("i", parameters))


def is_gone(pid: int) -> bool:
    return waits_for(lambda: not is_running(pid))


def waits_for(condition: Callable[[], bool], limit_s: float = 20.0) -> bool:
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


async def begun(pids: Path) -> None:
    while not (pids.exists() and pids.read_text()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def test_a_function_runs_in_another_process_with_its_own_types() -> None:
    assert call("weather", city="Oslo", unit="c") == ("Oslo 1 CELSIUS", 0.5, {"ok": True, "seen": [1]})
    assert int(call("where")[0]) != os.getpid()
    assert int(call("here")[0]) == os.getpid()


def test_the_answer_is_the_same_in_a_thread_and_in_a_process() -> None:
    there, here = load("weather"), FunctionTool(load("weather").function, isolate=False)
    for parameters in ({"city": "Oslo"}, {}, {"city": "Oslo", "days": "many"}, {"town": "Oslo"}):
        assert run(there.execute("i", parameters)) == run(here.execute("i", parameters))


def test_a_plain_function_runs_in_a_process_too() -> None:
    assert run(as_tool(load_reference(f"{FILE}:plain", what="tool")).execute("i", {"x": 4}))[0] == "8"


def test_an_async_function_runs_in_a_process_where_that_is_asked_for() -> None:
    assert call("async_nap", seconds=0)[0] == "rested in a worker"


def test_a_module_keeps_its_globals_in_the_worker() -> None:
    module = sys.modules[load("count").function.__module__]
    assert int(call("count")[0]) >= 1
    assert vars(module)["CALLS"] == 0


def test_each_event_loop_finds_the_same_warm_workers() -> None:
    call("where")
    assert len({call("where")[0] for _ in range(3)}) == 1


@pytest.mark.parametrize(
    "name", ["hang_in_python", "hang_in_sleep", "hang_in_c", "hang_in_regex", "hang_deaf", "hang_with_children"]
)
def test_whatever_hangs_ends_at_its_deadline_with_its_processes(name: str, tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    async def hang() -> float:
        await load("where").execute("i", {})
        work = load(name).execute("i", {"pids": str(pids)})
        waiting = asyncio.create_task(run_with_deadline(60, work, LATE))
        await begun(pids)
        began = time.monotonic()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return time.monotonic() - began

    assert run(hang()) < 5
    for pid in pids.read_text().split():
        assert is_gone(int(pid))
    assert int(call("where")[0]) > 0


def test_a_deadline_is_kept() -> None:
    call("where")
    began = time.monotonic()
    with pytest.raises(TimeoutError) as caught:
        run(run_with_deadline(0.3, load("nap").execute("i", {"seconds": 1000}), LATE))
    assert caught.value is LATE
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("how", DEATHS)
def test_a_dead_worker_is_the_outcome_of_its_call_alone(how: str) -> None:
    async def both() -> list[Any]:
        dying, living = load("die").execute("i", {"how": how}), load("nap").execute("i", {"seconds": 0.2})
        return await asyncio.gather(dying, living, return_exceptions=True)

    died, lived = run(both())
    assert isinstance(died, ToolDied)
    assert DEATHS[how] in str(died)
    assert (died.failure, died.infrastructure) == ("died", True)
    assert lived[0] == "rested"


def test_what_a_function_raises_is_told_by_its_name() -> None:
    before = call("where")[0]
    for how, name, text in [
        ("key", "KeyError", "'mine'"),
        ("exit", "SystemExit", "7"),
        ("json", "ToolwiseError", "returned a value that is not JSON"),
        ("text", "MuteError", "its text could not be had"),
        ("big", "ValueError", "9,437,"),
    ]:
        with pytest.raises(ToolFault) as caught:
            call("fail", how=how)
        assert type(caught.value).__name__ == name
        assert text in str(caught.value)
    assert call("where")[0] == before


def test_what_a_tool_prints_is_logged(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    with caplog.at_level(logging.INFO, logger="toolwise.tools"):
        call("talk", lines=2)
        assert waits_for(lambda: "and no more" in caplog.text)
        call("talk", lines=5000)
        assert waits_for(lambda: "the rest is dropped" in caplog.text)
    assert "line 1 of the tool" in caplog.text
    assert caplog.text.count("of the tool") <= 102
    assert "of the tool" not in capfd.readouterr().out


def test_many_calls_share_few_workers() -> None:
    async def many() -> list[Any]:
        return await asyncio.gather(*(load("where").execute("i", {}) for _ in range(200)))

    assert len({text for text, _, _ in run(many())}) <= isolation.shared_pool().limit


def test_the_loop_is_not_blocked_while_workers_start_and_end() -> None:
    async def longest_pause() -> float:
        longest, running = 0.0, asyncio.gather(*(killed() for _ in range(4)))
        while not running.done():
            began = time.monotonic()
            await asyncio.sleep(0.005)
            longest = max(longest, time.monotonic() - began)
        return longest

    async def killed() -> None:
        with pytest.raises(TimeoutError):
            await run_with_deadline(0.3, load("nap").execute("i", {"seconds": 1000}), LATE)

    pauses: list[float] = []
    while len(pauses) < 3 and not any(pause < 0.5 for pause in pauses):  # what blocks a loop does so every time
        isolation.close()
        pauses.append(run(longest_pause()))
    assert min(pauses) < 0.5


def test_without_a_process_to_be_had_it_is_said_once_and_runs_in_a_thread(caplog: pytest.LogCaptureFixture) -> None:
    double = FunctionTool(lambda: os.getpid(), name="double")
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "tool double runs in a thread, where a call that hangs can only be abandoned: a lambda" in caplog.text
    assert int(run(double.execute("i", {}))[0]) == os.getpid()


def test_isolation_that_is_asked_for_and_cannot_be_had_is_an_error() -> None:
    def inner() -> int:
        return 0

    for function, reason in [(inner, "defined inside a function"), (lambda: 0, "a lambda")]:
        with pytest.raises(ToolwiseError, match=f"tool x: isolate=True .* {reason}"):
            tool(name="x", isolate=True)(function)


def test_a_name_that_leads_to_another_function_runs_in_a_thread(caplog: pytest.LogCaptureFixture) -> None:
    def weather() -> int:
        return os.getpid()

    weather.__qualname__, weather.__module__ = "weather", load("weather").function.__module__
    weather.__code__ = weather.__code__.replace(co_filename=str(FILE))
    assert int(run(FunctionTool(weather).execute("i", {}))[0]) == os.getpid()
    assert "weather in" in caplog.text


def test_the_terms_of_a_tool_keep_its_isolation() -> None:
    assert load("here").with_options(price=2.0).isolate is False
    assert load("async_nap").with_options(price=2.0).isolate is True


def test_a_virtual_clock_gets_no_processes() -> None:
    class Virtual(asyncio.SelectorEventLoop):
        virtual_time = True

    with asyncio.Runner(loop_factory=Virtual) as runner:
        assert int(runner.run(load("where").execute("i", {}))[0]) == os.getpid()


def test_an_isolation_that_is_neither_is_refused() -> None:
    with pytest.raises(ToolwiseError, match="tool x: isolate must be true or false, got 'yes'"):
        tool(name="x", isolate="yes")(lambda: 0)  # type: ignore[call-overload]


def test_in_an_episode_a_late_call_and_a_dead_one_are_told_apart(tmp_path: Path) -> None:
    tools = {name: load(name) for name in ("hang_in_c", "die", "fail", "weather")}
    calls = [
        ToolCall(id="1", name="hang_in_c", arguments={"pids": str(tmp_path / "pids")}),
        ToolCall(id="2", name="die", arguments={"how": "segfault"}),
        ToolCall(id="3", name="fail", arguments={"how": "key"}),
        ToolCall(id="4", name="weather", arguments={"city": "Oslo"}),
    ]

    async def episode() -> tuple[list[Message], Any]:
        task = Task(task_id="t", prompt=[Message(role="user", content="?")])
        env = ToolEnv(task, tools, tool_timeout_s=3.0)
        await env.reset()
        await asyncio.gather(*(load("nap").execute("i", {"seconds": 0.2}) for _ in range(5)))  # these are warm now
        messages, _, _, info = await env.step({"tool_calls": calls})
        await env.close()
        return messages, info

    messages, info = run(episode())
    assert [message.content for message in messages] == [
        "error: hang_in_c took longer than 3 s",
        "error: the tool's process was killed by SIGSEGV",
        "error: fail failed: KeyError: 'mine'",
        "Oslo 1 CELSIUS",
    ]
    assert info["failed_calls"] == {"timeout": 1, "died": 1, "exception": 1}
    assert info["infrastructure_fault"] == "error: the tool's process was killed by SIGSEGV"
    assert is_gone(int((tmp_path / "pids").read_text()))


SCRIPT = """
    import asyncio, os, sys, time
    from toolwise import tool
    from toolwise.tools import isolation
    {before}
    @tool
    def where() -> int:
        return os.getpid()

    def main():
        text, _, _ = asyncio.run(where.execute("i", {{}}))
        print("here" if int(text) == os.getpid() else "there")
    {call}
"""


def script(folder: Path, **parts: str) -> subprocess.CompletedProcess[str]:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(SCRIPT.format(**{"before": "", **parts})))
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=60, check=False)


def test_a_scripts_own_tools_run_in_processes_where_it_is_guarded(tmp_path: Path) -> None:
    done = script(tmp_path, call='if __name__ == "__main__": main()')
    assert (done.stdout, done.stderr) == ("there\n", "")


def test_a_script_without_a_guard_is_not_run_again(tmp_path: Path) -> None:
    done = script(tmp_path, call="main()")
    assert done.stdout == "here\n"
    assert 'put the code to run under `if __name__ == "__main__":`' in done.stderr


def test_a_module_that_does_not_load_in_a_worker_runs_in_a_thread(tmp_path: Path) -> None:
    before = "if os.environ.get('TOOLWISE_WORKER'): raise ValueError('not here')"
    done = script(tmp_path, before=before, call='if __name__ == "__main__": main()')
    assert done.stdout == "here\n"
    assert "does not load in a worker process: ConfigError" in done.stderr
    assert "ValueError: not here" in done.stderr


def test_a_module_that_hangs_in_a_worker_keeps_nobody_waiting_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("toolwise.tools.isolation.tool_worker.LOAD_TIMEOUT_S", 0.5)
    hangs = "import os, time\nif os.environ.get('TOOLWISE_WORKER'): time.sleep(1000)\n"
    (tmp_path / "hangs.py").write_text(hangs + "def where() -> int:\n    return os.getpid()\n")
    where = as_tool(load_reference(f"{tmp_path}/hangs.py:where", what="tool"))
    calls = [ToolCall(id=str(number), name="where", arguments={}) for number in range(8)]

    async def turn() -> list[Message]:
        env = ToolEnv(Task(task_id="t", prompt=[]), {"where": where}, tool_timeout_s=5.0)
        await env.reset()
        messages, _, _, _ = await env.step({"tool_calls": calls})
        await env.close()
        return messages

    assert [message.content for message in run(turn())] == [str(os.getpid())] * 8
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "took longer than 0.5 s to load in a worker process" in warnings[0]


@pytest.mark.long
def test_starting_a_run_while_a_worker_loads_is_refused(tmp_path: Path) -> None:
    before = "import toolwise\n    if __name__ != '__main__': toolwise.train()"
    done = script(tmp_path, before=before, call='if __name__ == "__main__": main()')
    assert done.stdout == "here\n"
    assert "toolwise.train was called while a worker process imported this file" in done.stderr


def test_nothing_is_left_when_the_trainer_is_killed(tmp_path: Path) -> None:
    program = f"""
        import asyncio
        from toolwise.config.imports import load_reference
        load = lambda name: load_reference("{FILE}:" + name, what="tool")
        async def main():
            await load("where").execute("i", {{}})
            pids = "{tmp_path}/%s"
            names = ["hang_in_c", "hang_with_children"]
            await asyncio.gather(*(load(n).execute("i", {{"pids": pids % n}}) for n in names))
        asyncio.run(main())
    """
    trainer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    try:
        notes = [tmp_path / name for name in ("hang_in_c", "hang_with_children")]
        assert waits_for(lambda: all(note.exists() and note.read_text() for note in notes), 60)
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    (alone,), (worker, child, away, forked) = (map(int, note.read_text().split()) for note in notes)
    assert all(map(is_gone, (alone, worker, child, forked, away)))


def test_a_trainer_that_ends_leaves_nothing_behind(tmp_path: Path) -> None:
    program = f"""
        import asyncio
        from toolwise.config.imports import load_reference
        hang = load_reference("{FILE}:hang_with_children", what="tool")
        async def main():
            task = asyncio.ensure_future(hang.execute("i", {{"pids": "{tmp_path}/pids"}}))
            while not task.done() and not __import__("os").path.exists("{tmp_path}/pids"):
                await asyncio.sleep(0.01)
        asyncio.run(main())
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=60, check=True)
    assert all(is_gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())


def test_the_child_of_a_fork_brings_up_workers_of_its_own() -> None:
    program = f"""
        import asyncio, os
        from toolwise.config.imports import load_reference
        where = load_reference("{FILE}:where", what="tool")
        ask = lambda: int(asyncio.run(where.execute("i", {{}}))[0])
        first = ask()
        child = os.fork()
        if child == 0:
            os._exit(0 if ask() not in (first, os.getpid()) else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert ask() == first
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=60, check=True)
