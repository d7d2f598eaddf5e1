"""Which rollout uses which server, and retries of a server that fails to start. Crashes are in test_mcp.py."""

from __future__ import annotations

import asyncio

import pytest

from toolwise.tools.call_errors import ToolCallError
from toolwise.tools.mcp.server import FIRST_PAUSE_S, McpServer, RolloutServers
from toolwise.tools.mcp.session import Address

NOWHERE = Address(command=("no-such-server",))


def fault_of(server: McpServer) -> ToolCallError:
    with pytest.raises(ToolCallError) as caught:
        asyncio.run(server.call("tool", {}, 10))
    return caught.value


def wait_in_effect(server: McpServer, seconds: float) -> None:
    assert server._session is not None
    assert server._session.failed_at is not None
    server._session.failed_at -= seconds


def test_a_server_that_does_not_come_up_is_tried_again_after_a_pause_that_grows() -> None:
    server = McpServer(NOWHERE)
    assert "there is no command" in str(fault_of(server))
    assert "the next attempt is in" in str(fault_of(server))
    assert server.starts == 1
    for starts, pause_s in ((2, FIRST_PAUSE_S), (3, 2 * FIRST_PAUSE_S)):
        wait_in_effect(server, pause_s)
        assert "there is no command" in str(fault_of(server))
        assert server.starts == starts
        wait_in_effect(server, pause_s)
        assert "the next attempt is in" in str(fault_of(server))


def test_many_who_ask_at_once_wait_for_the_same_start() -> None:
    server = McpServer(NOWHERE)

    async def run() -> list[object]:
        return list(await asyncio.gather(*(server.call("x", {}, 10) for _ in range(100)), return_exceptions=True))

    assert all(isinstance(fault, ToolCallError) and fault.infrastructure for fault in asyncio.run(run()))
    assert server.starts == 1


def test_a_run_has_one_server_and_nothing_to_enter_or_leave() -> None:
    server = McpServer(NOWHERE)
    servers = RolloutServers(NOWHERE, server)
    asyncio.run(servers.attach("a"))
    assert servers.server_for("a") is servers.server_for("b") is server
    asyncio.run(servers.detach("a"))


def test_a_rollout_whose_server_does_not_start_leaves_nothing_behind() -> None:
    servers = RolloutServers(NOWHERE, None)
    with pytest.raises(ToolCallError, match="there is no command"):
        asyncio.run(servers.attach("a"))
    with pytest.raises(KeyError):
        servers.server_for("a")
    asyncio.run(servers.detach("a"))  # nothing to detach, and no error
