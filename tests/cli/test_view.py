"""`toolwise view`: what it is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_a_folder_that_is_no_run_is_refused(name: str, tmp_path: Path, cli: Any) -> None:
    (tmp_path / "empty").mkdir()
    ended = cli("view", tmp_path / name, "--no-browser")
    assert ended.status == 2
    assert "run folder" in ended.err
    assert ended.err.count("\n") == 1
