"""docs/cluster.md: its configuration is tried, and its commands are those of the tests on real Ray."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.docs.pages import Reader

pytestmark = pytest.mark.docs
MACHINES = "needs several machines"


def test_every_snippet_runs(reader: Callable[..., Reader]) -> None:
    reader(
        "docs/cluster.md",
        not_run={
            "pip install 'toolwise[ray]'": "needs an index",
            "ray start --head --port=6379 --dashboard-host=127.0.0.1": MACHINES,
            "ray start --address=10.0.0.1:6379": MACHINES,
            "toolwise doctor --cluster 10.0.0.1:6379": MACHINES,
            "toolwise train cluster.toml --cluster 10.0.0.1:6379 --out runs/big": MACHINES,
        },
    ).read()
