"""Tools from MCP servers: a real one over stdio, a misbehaving one over both transports, and failures."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from process_state import is_running

from toolwise.envs.tool_env import ToolEnv
from toolwise.errors import ConfigError, MissingExtraError
from toolwise.messages import ToolCall
from toolwise.tools.call_errors import ToolCallError
from toolwise.tools.catalog import build_tools
from toolwise.tools.mcp import session as mcp_session
from toolwise.tools.mcp.tools import McpTool, mcp_tools
from toolwise.types import Task

ODD = str(Path(__file__).with_name("mcp_odd_server.py"))
STDIO = {"command": [sys.executable, ODD, "stdio"], "timeout_s": 20}


@pytest.fixture(scope="module")
def clock() -> dict[str, Any]:
    return build_tools([{"name": "mcp", "command": ["mcp-server-time"], "family": "SEARCH", "price": 0.5}])


@pytest.fixture(scope="module")
def http() -> Iterator[dict[str, Any]]:
    with http_server() as (url, _):
        yield by_name(mcp_tools({"url": url, "timeout_s": 20, "headers": {"X-Test": "1"}}))


@pytest.fixture(scope="module")
def stdio() -> dict[str, Any]:
    return by_name(mcp_tools(STDIO))


@pytest.fixture(params=["stdio", "http"])
def odd(request: pytest.FixtureRequest) -> dict[str, Any]:
    tools: dict[str, Any] = request.getfixturevalue(request.param)
    return tools


@contextmanager
def http_server(port: int = 0) -> Iterator[tuple[str, Callable[[], None]]]:
    """A server in a separate process; yields its URL and a function that kills it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, ODD, "http", str(port)], stderr=subprocess.DEVNULL)
    try:
        until(lambda: can_connect(port))
        yield f"http://127.0.0.1:{port}/mcp", process.kill
    finally:
        process.kill()
        process.wait()


def can_connect(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def until(true: Callable[[], bool], limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def by_name(tools: list[Any]) -> dict[str, Any]:
    return {tool.name: tool for tool in tools}


def call(tool: McpTool, **arguments: Any) -> str:
    """One call by one rollout, on its own event loop."""

    async def run() -> str:
        instance = await tool.create()
        try:
            return (await tool.execute(instance, arguments))[0]
        finally:
            await tool.release(instance)

    return asyncio.run(run())


def failure(tool: McpTool, **arguments: Any) -> ToolCallError:
    with pytest.raises(ToolCallError) as caught:
        call(tool, **arguments)
    return caught.value


# --- a published server


def test_every_tool_of_a_server_is_a_tool_with_terms(clock: dict[str, Any]) -> None:
    assert list(clock) == ["get_current_time", "convert_time"]
    assert {(tool.family, tool.price) for tool in clock.values()} == {("SEARCH", 0.5)}
    schema = clock["convert_time"].get_openai_tool_schema().function
    assert schema.description
    assert sorted(schema.parameters["required"]) == ["source_timezone", "target_timezone", "time"]


def test_a_call_gives_what_the_server_says(clock: dict[str, Any]) -> None:
    assert '"timezone": "Europe/Paris"' in call(clock["get_current_time"], timezone="Europe/Paris")


def test_a_trainer_with_more_than_1024_open_files_can_start_and_ask_a_server() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limits[1] < 2048:
        pytest.skip("no more files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, limits[1]))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert "heard" in call(by_name(mcp_tools(STDIO))["echo"], text="heard")
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_what_the_tool_refuses_is_its_own_words_and_a_typed_failure(clock: dict[str, Any]) -> None:
    fault = failure(clock["get_current_time"], timezone="Nowhere/Land")
    assert "Invalid timezone" in str(fault)
    assert (fault.failure, fault.infrastructure) == ("tool_error", False)


@pytest.mark.long
def test_two_hundred_calls_share_one_server_and_do_not_mix(clock: dict[str, Any]) -> None:
    zones = ["Europe/Paris", "Asia/Tokyo", "Etc/UTC", "America/Lima"] * 50
    tool = clock["get_current_time"]

    async def run() -> list[Any]:
        return await asyncio.gather(*(tool.execute("i", {"timezone": zone}) for zone in zones))

    texts = [text for text, _, _ in asyncio.run(run())]
    assert all(f'"{zone}"' in text for zone, text in zip(zones, texts, strict=True))
    assert tool.servers.server_for("i").starts == 1


def test_include_prefix_and_strange_names() -> None:
    config = {**STDIO, "include": ["echo", "odd/na.me"], "prefix": "odd_"}
    tools = by_name(mcp_tools(config))
    assert list(tools) == ["odd_echo", "odd_odd_na_me"]
    assert call(tools["odd_odd_na_me"]) == "found\nme"


# --- results and failures, over both transports


@pytest.mark.long
def test_two_hundred_calls_run_together(odd: dict[str, Any]) -> None:
    async def run() -> list[Any]:
        return await asyncio.gather(*(odd["echo"].execute("i", {"text": f"{n}", "wait_s": 0.2}) for n in range(200)))

    began = time.monotonic()
    assert [text for text, _, _ in asyncio.run(run())] == [f"{n}" for n in range(200)]
    assert time.monotonic() - began < 20  # in sequence they would take 40


def test_images_are_named_and_structured_content_is_json(odd: dict[str, Any]) -> None:
    assert call(odd["picture"]) == "look:\n[image]"
    assert call(odd["numbers"]) == '{"a": 1, "b": "é"}'


@pytest.mark.parametrize("text", ["\ud800", "\x00", "<|im_end|>", "é😀", "x" * 300_000, "line\nline", "\u2028"])
def test_no_text_of_a_models_can_break_the_session(odd: dict[str, Any], text: str) -> None:
    assert call(odd["echo"], text=text) == text.replace("\ud800", "?")
    assert odd["echo"].servers.server_for("i").restarts == 0


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 10**400])
def test_no_number_of_a_models_can_break_the_session(odd: dict[str, Any], number: Any) -> None:
    assert failure(odd["echo"], text="x", wait_s=number).failure == "tool_error"
    assert odd["echo"].servers.server_for("i").restarts == 0


def test_an_error_of_the_tool_is_read_by_the_model(odd: dict[str, Any]) -> None:
    fault = failure(odd["fail"], reason="the cat is out")
    assert "the cat is out" in str(fault)
    assert fault.failure == "tool_error"


def test_a_deadline_ends_the_work_too(odd: dict[str, Any]) -> None:
    async def run() -> None:
        hanging = mcp_hurry(odd["hang"], 0.3)
        with pytest.raises(ToolCallError) as caught:
            await hanging.execute("i", {"mark": "late"})
        assert (caught.value.failure, str(caught.value)) == ("timeout", "took longer than 0.3 s")

    asyncio.run(run())
    until(lambda: call(odd["was_cancelled"], mark="late") == "true")


def mcp_hurry(tool: McpTool, timeout_s: float) -> McpTool:
    return McpTool(
        tool.config, tool.tool_schema, servers=tool.servers, remote_name=tool.remote_name, timeout_s=timeout_s
    )


def test_cancelling_a_call_ends_the_work_and_no_other_call(odd: dict[str, Any]) -> None:
    async def run() -> None:
        other = asyncio.create_task(odd["echo"].execute("i", {"text": "still here", "wait_s": 1.0}))
        hanging = asyncio.create_task(odd["hang"].execute("i", {"mark": "called off"}))
        await asyncio.sleep(0.3)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        assert (await other)[0] == "still here"

    asyncio.run(run())
    until(lambda: call(odd["was_cancelled"], mark="called off") == "true")


def test_every_loop_and_every_thread_may_call(odd: dict[str, Any]) -> None:
    texts: list[str] = []
    threads = [threading.Thread(target=lambda n=n: texts.append(call(odd["echo"], text=f"{n}"))) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(texts) == ["0", "1", "2", "3"]


# --- servers that die


def test_a_server_that_dies_in_a_call_fails_the_calls_it_had_and_is_started_again() -> None:
    tools = by_name(mcp_tools(STDIO))
    server = tools["die"].servers.server_for("i")

    async def run() -> list[Any]:
        waiting = [asyncio.create_task(tools["echo"].execute("i", {"text": "x", "wait_s": 60})) for _ in range(5)]
        await asyncio.sleep(0.3)
        return await asyncio.gather(*waiting, tools["die"].execute("i", {}), return_exceptions=True)

    faults = asyncio.run(run())
    assert all(isinstance(fault, ToolCallError) and fault.infrastructure for fault in faults)
    assert "went away during the call" in str(faults[0])
    assert call(tools["echo"], text="back") == "back"
    assert server.restarts == 1


def test_a_server_killed_between_calls_costs_nobody_a_call() -> None:
    tools = by_name(mcp_tools(STDIO))
    pid = int(call(tools["pid"]))
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_running(pid))
    until(lambda: tools["pid"].servers.server_for("i")._session.closed)
    assert int(call(tools["pid"])) != pid


@pytest.mark.long
def test_a_server_that_hangs_altogether_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_session, "PROBE_S", 0.5)
    tools = by_name(mcp_tools({**STDIO, "timeout_s": 1}))
    pid = int(call(tools["pid"]))
    assert failure(tools["block"]).failure == "timeout"
    patient = mcp_hurry(tools["pid"], 20)
    until(lambda: tools["pid"].servers.server_for("i")._session.closed)
    assert int(call(patient)) != pid
    until(lambda: not is_running(pid))


@pytest.mark.long
def test_an_http_server_that_dies_fails_in_time_and_is_found_again() -> None:
    with http_server() as (url, kill):
        tools = by_name(mcp_tools({"url": url, "timeout_s": 20}))

        async def run() -> Any:
            hanging = asyncio.create_task(tools["hang"].execute("i", {}))
            await asyncio.sleep(0.3)
            kill()
            return await asyncio.gather(hanging, return_exceptions=True)

        assert asyncio.run(run())[0].infrastructure
        assert failure(tools["echo"], text="x").infrastructure
    with http_server(int(url.split(":")[2].split("/")[0])):

        def answers() -> bool:
            try:
                return call(tools["echo"], text="back") == "back"
            except ToolCallError:
                return False

        until(answers)


@pytest.mark.long
def test_a_server_that_cannot_start_again_is_not_asked_for_ever(tmp_path: Path) -> None:
    """It starts only once: every later call fails quickly with a typed error."""
    once = tmp_path / "once.sh"
    once.write_text(f"[ -e {tmp_path}/ran ] && exit 1\ntouch {tmp_path}/ran\nexec {sys.executable} {ODD} stdio\n")
    tools = by_name(mcp_tools({"command": ["sh", str(once)]}))
    failure(tools["die"])

    async def run() -> list[Any]:
        return await asyncio.gather(
            *(tools["echo"].execute("i", {"text": "x"}) for _ in range(50)), return_exceptions=True
        )

    assert all(fault.infrastructure for fault in asyncio.run(run()))
    assert "the next attempt is in" in str(failure(tools["echo"], text="x"))
    assert tools["echo"].servers.server_for("i").starts <= 3


@pytest.mark.long
def test_an_episode_notes_that_the_infrastructure_failed_and_not_the_model() -> None:
    tools = by_name(mcp_tools({**STDIO, "include": ["die", "echo"]}))

    async def run() -> tuple[dict[str, Any], dict[str, Any]]:
        env = ToolEnv(Task(task_id="t", prompt=[]), tools)
        await env.reset()
        *_, died = await env.step({"tool_calls": [ToolCall(id="a", name="die")]})
        *_, lived = await env.step({"tool_calls": [ToolCall(id="b", name="echo", arguments={"text": "x"})]})
        await env.close()
        return died, lived

    died, lived = asyncio.run(run())
    assert died["failed_calls"] == {"server_down": 1}
    assert "went away during the call" in died["infrastructure_fault"]
    assert lived["failed_calls"] == {}


# --- one server per rollout


@pytest.mark.long
def test_rollouts_with_servers_of_their_own_do_not_share_state() -> None:
    tools = by_name(mcp_tools({**STDIO, "scope": "rollout"}))

    async def rollout(word: str) -> tuple[str, int]:
        for name in ("keep", "recall", "pid"):
            assert await tools[name].create(f"rollout-{word}") == f"rollout-{word}"
        await tools["keep"].execute(f"rollout-{word}", {"word": word})
        recalled, _, _ = await tools["recall"].execute(f"rollout-{word}", {})
        pid, _, _ = await tools["pid"].execute(f"rollout-{word}", {})
        for name in ("keep", "recall", "pid"):
            await tools[name].release(f"rollout-{word}")
        return recalled, int(pid)

    async def run() -> list[Any]:
        return await asyncio.gather(rollout("a"), rollout("b"))

    (first, one), (second, two) = asyncio.run(run())
    assert (first, second) == ("a", "b")
    until(lambda: not is_running(one) and not is_running(two))


@pytest.mark.long
def test_a_rollouts_own_server_is_not_replaced_when_it_dies() -> None:
    tools = by_name(mcp_tools({**STDIO, "scope": "rollout"}))

    async def run() -> list[Any]:
        instance = await tools["die"].create("r")
        await tools["recall"].create("r")
        faults = [
            await asyncio.gather(tools[n].execute(instance, {}), return_exceptions=True) for n in ("die", "recall")
        ]
        await tools["die"].release("r")
        await tools["recall"].release("r")
        return [fault for (fault,) in faults]

    died, after = asyncio.run(run())
    assert died.infrastructure
    assert after.infrastructure
    assert "its state for this rollout is lost" in str(after)


@pytest.mark.long
def test_a_rollout_cancelled_while_its_server_starts_leaves_nothing_behind() -> None:
    tools = by_name(mcp_tools({**STDIO, "scope": "rollout"}))

    async def run() -> None:
        creating = asyncio.create_task(tools["echo"].create("r"))
        await asyncio.sleep(0.05)
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating

    asyncio.run(run())
    assert tools["echo"].servers._servers == {}


# --- shutdown


@pytest.mark.long
def test_a_server_nobody_remembers_is_ended() -> None:
    tools = by_name(mcp_tools(STDIO))
    pid = int(call(tools["pid"]))
    del tools
    gc.collect()
    until(lambda: not is_running(pid))


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        pytest.param("pass", 0, marks=pytest.mark.long),
        pytest.param("1 / 0", 1, marks=pytest.mark.long),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9),
    ],
)
def test_no_server_outlives_its_run(ending: str, status: int) -> None:
    program = f"""
import asyncio, os, signal, sys
from toolwise.tools.mcp.tools import mcp_tools
tools = {{t.name: t for t in mcp_tools({STDIO!r})}}
print(asyncio.run(tools["pid"].execute("i", {{}}))[0], flush=True)
{ending}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, done.stderr
    until(lambda: not is_running(int(done.stdout)))


# --- invalid configurations


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "needs either a command or a url"),
        ({"command": ["x"], "url": "http://x"}, "needs either a command or a url, not both"),
        ({"command": ["no-such-server"]}, "there is no command 'no-such-server': install it"),
        ({"command": ["false"]}, "false: it exited before it answered"),
        ({"command": ["echo", "hello"]}, "it wrote something that is not JSON-RPC: 'hello'"),
        (
            {"command": [sys.executable, "-c", "import nope"]},
            "last line of its stderr: ModuleNotFoundError: No module",
        ),
        ({"command": ["sleep", "60"], "start_timeout_s": 0.3}, "it did not answer within 0.3 s"),
        ({"url": "http://127.0.0.1:1/mcp"}, "http://127.0.0.1:1/mcp: ConnectError"),
        ({"url": "ftp://x"}, "url must begin with http:// or https://"),
        ({"command": ["x"], "headers": {"a": "b"}}, "headers needs a url"),
        ({"url": "http://x", "cwd": "."}, "cwd needs a command"),
        ({"command": ["x"], "cwd": "/no/such/folder"}, "cwd /no/such/folder is not a folder"),
        ({"command": ["x", 3]}, "command must be a list of strings"),
        ({"command": ["x"], "env": {"A": 1}}, "env must be a table of strings"),
        ({"command": ["x"], "env": {"A": "${NOT_SET_ANYWHERE}"}}, "env uses ${NOT_SET_ANYWHERE}, which is not set"),
        ({"command": ["x"], "timeout_s": 0}, "timeout_s must be a number of seconds above 0"),
        ({"command": ["x"], "scope": "step"}, "scope must be one of run, rollout"),
        ({"comand": ["x"]}, "mcp has no option 'comand'; did you mean 'command'?"),
        ({"command": ["x"], "price": -1}, "mcp: price must be a number ≥ 0"),
        ({"command": ["mcp-server-time"], "include": ["get_time"]}, "has no tool 'get_time'"),
    ],
)
def test_mistakes_are_named_in_one_line(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_tools([{"name": "mcp", **config}])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_the_extra_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'toolwise\[mcp\]'"):
        mcp_tools(STDIO)


def test_variables_stay_out_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    from toolwise.tools.mcp.tools import read_address

    monkeypatch.setenv("TOKEN_FOR_TEST", "s3cret")
    address = read_address(
        {"url": "https://me@host/mcp?key=1", "headers": {"Authorization": "Bearer ${TOKEN_FOR_TEST}"}}
    )
    assert address.headers == {"Authorization": "Bearer s3cret"}
    assert address.name == "host/mcp"
