"""The syscall tables: no number twice per architecture, none beyond what the filter knows."""

from __future__ import annotations

import pytest

from toolwise.sandbox.layers import syscalls


@pytest.mark.parametrize("column", [0, 1])
def test_numbers_are_used_once(column: int) -> None:
    tables = (syscalls.ALWAYS_REFUSED, syscalls.NETWORK, syscalls.PROCESSES, syscalls.ARGUMENT_CHECKED)
    numbers = [n[column] for table in tables for n in table.values() if n[column] is not None]
    assert len(numbers) == len(set(numbers))
    assert max(n for n in numbers if n is not None) <= syscalls.LAST_KNOWN
