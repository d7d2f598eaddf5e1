"""What looks like a secret, and what only has such a name."""

from __future__ import annotations

from typing import Any

import pytest

from toolwise.config.secret_names import is_secret, mask_secrets, secret_keys


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("api_key", "x", True),
        ("apiKey", "x", True),
        ("OPENAI-API-KEY", "x", True),
        ("db_password", "hunter2", True),
        ("client_secret", "x", True),
        ("access_token", "x", True),
        ("db_pw", "x", True),
        ("creds", "x", True),
        ("whatever", "sk-live-123456", True),
        ("key", "a8Fh2kPq09sLmN4x", True),
        ("url", "https://user:hunter2@host/mcp", True),
        ("DATABASE_URL", "postgres://u:p4ssw0rd@h/db", True),
        ("args", "DATABASE_URL=redis://:p4ssw0rd@h/0", True),
        ("url", "https://glpat_abcdefghij0123456789@host/x.git", True),
        ("url", "https://h/mcp?a=1&api_key=abcdef", True),
        ("url", "https://h/mcp?token=abcdef", True),
        ("command", "--api-key=abcdef", True),
        ("command", "--token=abcdef", True),
        ("command", "serve --db-password=abcdef --verbose", True),
        ("command", "API_KEY=abcdef", True),
        ("args", "Authorization: Bearer abcdef", True),
        ("url", "https://host:8000/mcp?page=2&key=title", False),
        ("url", "ssh://git@host/x.git", False),
        ("url", "https://user:{password}@host/?api_key=%s", False),
        ("usage", "serve --api-key=KEY --token=<token>", False),
        ("text", "Password: ask the user. Is a=b? Use --token to sign in.", False),
        ("command", "--max-tokens=64", False),
        ("key", "answer", False),
        ("eos_token", "<|endoftext|>", False),
        ("max_tokens", 64, False),
        ("api_key", "", False),
        ("api_key", None, False),
        ("api_key_env", "OPENAI_API_KEY", False),
        ("tokenizer", "gpt2", False),
        ("monkey", "a8Fh2kPq09sLmN4x", False),
        ("mpw", "x", False),
    ],
)
def test_a_value_under_a_name(name: str, value: Any, secret: bool) -> None:
    assert is_secret(name, value) is secret


def test_tables_and_lists() -> None:
    table = {"reward": {"kwargs": {"api_key": "x", "n": 1}}, "parts": [{"passwords": 1}, {"password": "y"}, "z"]}
    assert list(secret_keys(table)) == ["reward.kwargs.api_key", "parts[1].password"]
    assert mask_secrets(table) == {
        "reward": {"kwargs": {"api_key": "***", "n": 1}},
        "parts": [{"passwords": 1}, {"password": "***"}, "z"],
    }


def test_the_value_of_an_option_is_named_by_the_option() -> None:
    command = ["serve", "--api-key", "abcdef", "--verbose", "x", "--password=y"]
    assert list(secret_keys({"command": command})) == ["command[2]", "command[5]"]
    assert mask_secrets(command) == ["serve", "--api-key", "***", "--verbose", "x", "***"]
