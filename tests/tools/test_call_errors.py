"""Failed calls: the text for the model, the counters, and whether the infrastructure was to blame."""

from __future__ import annotations

import pytest

from toolwise.tools.call_errors import SERVER_DOWN, ToolCallError


@pytest.mark.parametrize(("failure", "ours"), [("tool_error", False), ("timeout", False), (SERVER_DOWN, True)])
def test_only_a_server_that_is_down_is_the_infrastructures_fault(failure: str, ours: bool) -> None:
    fault = ToolCallError("no luck", failure)
    assert (str(fault), fault.failure, fault.infrastructure) == ("no luck", failure, ours)


def test_a_tool_that_refuses_is_the_plain_case() -> None:
    assert ToolCallError("no").failure == "tool_error"
