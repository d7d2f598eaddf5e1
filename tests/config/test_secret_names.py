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
        ("whatever", "sk-live-123456", True),
        ("key", "a8Fh2kPq09sLmN4x", True),
        ("key", "answer", False),
        ("eos_token", "<|endoftext|>", False),
        ("max_tokens", 64, False),
        ("api_key", "", False),
        ("api_key", None, False),
        ("api_key_env", "OPENAI_API_KEY", False),
        ("tokenizer", "gpt2", False),
        ("monkey", "a8Fh2kPq09sLmN4x", False),
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
