"""All 480 RLLA rows as tasks: the 80 of the test file, and the 400 supervised ones as `data prepare` writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolwise.data import load_tasks
from toolwise.data.prepare import prepare_rlla
from toolwise.types import Task

DATA = Path(__file__).parents[1] / "fixtures"


@pytest.fixture(scope="session")
def rlla_tasks(tmp_path_factory: pytest.TempPathFactory) -> list[Task]:
    supervised = tmp_path_factory.mktemp("rlla") / "sft.jsonl"
    prepare_rlla(DATA / "rlla_sft.json", supervised)
    tasks = [*load_tasks(DATA / "rlla_test.parquet"), *load_tasks(supervised)]
    assert len(tasks) == 480
    return tasks
