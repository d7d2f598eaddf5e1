"""Which values of a parameter the usual run tries; the others are behind the `long` marker."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick_first(names: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.long) for name in names]
