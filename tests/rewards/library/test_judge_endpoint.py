"""Retries of judge requests: which errors are retried, and the delays. See test_judge.py for whole exchanges."""

from __future__ import annotations

import pytest

from toolwise.rewards.library.judge_endpoint import RetryPolicy, connection_failure, retry_after_s


def test_a_network_that_is_not_allowed_is_said_to_be_so() -> None:
    try:
        try:
            raise PermissionError(1, "Operation not permitted")
        except OSError as refused:
            raise OSError("All connection attempts failed") from refused
    except OSError as fault:
        failure = connection_failure(fault)
    assert (failure.kind, failure.retryable) == ("denied", False)
    assert "permissions=('network',)" in str(failure)
    assert connection_failure(OSError("reset")).retryable


@pytest.mark.parametrize(
    ("header", "low", "high"),
    [("3", 3, 3), ("Wed, 21 Oct 2015 07:28:00 GMT", 0, 0), ("Fri, 01 Jan 2100 00:00:00 GMT", 1e9, 1e10)],
)
def test_what_retry_after_asks_for(header: str, low: float, high: float) -> None:
    seconds = retry_after_s(header)
    assert seconds is not None
    assert low <= seconds <= high


@pytest.mark.parametrize("header", [None, "", "soon", "-3", "²", "inf"])
def test_a_retry_after_that_says_nothing(header: str | None) -> None:
    assert retry_after_s(header) is None


def test_waits_grow_up_to_a_limit() -> None:
    retries = RetryPolicy(backoff_s=1, max_backoff_s=5)
    waits = [retries.wait_s(tried, None) for tried in range(1, 8)]
    assert all(limit / 2 <= wait <= limit for wait, limit in zip(waits, [1, 2, 4, 5, 5, 5, 5], strict=True))
    assert retries.wait_s(1, 3600) == 5
    assert retries.wait_s(1, 0) == 0
