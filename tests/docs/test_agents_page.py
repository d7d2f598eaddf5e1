"""docs/agents.md: every snippet runs as it is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.docs.pages import Reader

pytestmark = pytest.mark.docs


def test_every_snippet_runs(reader: Callable[..., Reader]) -> None:
    reader("docs/agents.md").read()
