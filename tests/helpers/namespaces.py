"""Marks tests of the tier `namespaced`: skipped where bubblewrap does not work, run by `make test-namespaced`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from toolwise.sandbox.layers.bubblewrap import unavailable_reason

Test = TypeVar("Test", bound=Callable[..., Any])
NAMESPACED = pytest.param("namespaced", marks=pytest.mark.namespaced)
"""The tier as a parameter of a fixture or a test."""


def needs_namespaces(test: Test) -> Test:
    missing = unavailable_reason()
    marked: Test = pytest.mark.namespaced(pytest.mark.skipif(bool(missing), reason=f"no namespaces: {missing}")(test))
    return marked
