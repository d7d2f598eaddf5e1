"""Shares the time of `make fuzz` out among the targets."""

from __future__ import annotations

import pytest
from fuzzing import time_each


def pytest_collection_finish(session: pytest.Session) -> None:
    time_each(len(session.items))
