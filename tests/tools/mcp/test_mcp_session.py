"""The thread of MCP sessions, and error messages about a server. Whole sessions are tested in test_mcp.py."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from pathlib import Path

import pytest

from toolwise.tools.call_errors import ToolCallError
from toolwise.tools.mcp.session import Address, Session, find_program, loop_thread


def test_one_thread_serves_all() -> None:
    found = []
    threads = [threading.Thread(target=lambda: found.append(loop_thread())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1


def test_a_fork_knows_that_the_thread_is_not_its_own() -> None:
    thread = loop_thread()
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(writing, b"ours" if thread.in_creator_process else b"not ours")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reading, 100) == b"not ours"
    os.close(reading)
    os.close(writing)
    assert thread.in_creator_process


def test_a_session_that_cannot_begin_says_why_and_is_over() -> None:
    thread = loop_thread()

    async def begin() -> tuple[str, Session]:
        session = Session(Address(command=("no-such-server",)), thread)
        with pytest.raises(ToolCallError) as caught:
            await session.ready
        await asyncio.wait({session.end()})
        return str(caught.value), session

    says, session = thread.submit(begin()).result(30)
    assert says == "there is no command 'no-such-server': install it, or give its full path"
    assert session.closed
    assert session not in thread.sessions


def test_servers_beside_this_python_are_found(tmp_path: Path) -> None:
    assert find_program("mcp-server-time", {"PATH": str(tmp_path)}) == str(
        Path(sys.executable).parent / "mcp-server-time"
    )
    assert find_program("sh", {}) in ("/bin/sh", "/usr/bin/sh")
    assert find_program("./here", {}) == "./here"
    assert find_program("no-such-server", {}) == "no-such-server"


@pytest.mark.parametrize(
    ("address", "name"),
    [
        (Address(command=("server", "--token", "s3cret")), "server"),
        (Address(url="https://user:s3cret@host:1/mcp?key=s3cret"), "host:1/mcp"),
        (Address(url="http://host/mcp"), "http://host/mcp"),
    ],
)
def test_names_have_no_secrets_in_them(address: Address, name: str) -> None:
    assert address.name == name
