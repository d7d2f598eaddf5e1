"""docs/cluster.md: the commands of one machine run as they are written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.docs.pages import Reader

pytestmark = pytest.mark.docs
MACHINES = "needs several machines"


def test_every_snippet_runs(reader: Callable[..., Reader], learning_base: dict[str, Any], tmp_path: Path) -> None:
    reader(
        "docs/cluster.md",
        base=learning_base,
        not_run={
            "pip install 'toolwise[ray]'": "needs an index",
            "ray start --head --port=6379 --dashboard-host=127.0.0.1": MACHINES,
            "ray start --address=10.0.0.1:6379": MACHINES,
            "toolwise doctor --cluster 10.0.0.1:6379": MACHINES,
            "toolwise train cluster.toml --cluster 10.0.0.1:6379 --out runs/big": MACHINES,
        },
    ).read()
    assert (tmp_path / "trace.json").exists()
