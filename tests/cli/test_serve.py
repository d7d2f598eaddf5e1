"""`toolwise serve`: what is refused before anything is loaded, in one line. How it serves: tests/serve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], "give a key with --api-key-env NAME, or use 127.0.0.1"),
        (["--api-key-env", "NO_SUCH_KEY"], "the environment variable NO_SUCH_KEY is not set"),
        (["--api-key-env", "WEAK_KEY"], "at least 16 printable ASCII characters"),
        (["--mode", "model", "--budget", "1"], "need --mode agent"),
        (["--mode", "chat"], "--mode"),
        (["--port", "70000"], "--port"),
    ],
)
def test_bad_options_are_one_line(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.setenv("WEAK_KEY", "swordfish")
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    ended = cli("serve", "builtin:small", *arguments)
    assert (ended.status, ended.out) == (2, "")
    assert said in ended.err
    assert ended.err.count("\n") == 1
    assert "swordfish" not in ended.err


def test_a_budget_needs_a_router(cli: Callable[..., Any]) -> None:
    ended = cli("serve", "builtin:small", "--tools", "calculator", "--budget", "1", "--port", "0")
    assert ended.status == 2
    assert "no router" in ended.err
