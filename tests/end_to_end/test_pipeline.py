"""docs/pipeline.md: every step from data to update is there, and what it names exists."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "pipeline.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([A-Z]\d?) \| .* \| `([\w.]+):([\w.]+)` \| `([\w/]+\.py)::(\w+)` \|$", PAGE, re.MULTILINE)


def test_every_step_from_a_to_n_has_its_row() -> None:
    assert {row[0] for row in ROWS} == {*"ABCDEFGHIJKLN", "M1", "M2"}


@pytest.mark.parametrize(("module", "name"), sorted({(row[1], row[2]) for row in ROWS}))
def test_the_function_is_there(module: str, name: str) -> None:
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    assert callable(found)


@pytest.mark.parametrize(("file", "name"), sorted({(row[3], row[4]) for row in ROWS}))
def test_the_test_is_there(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_setting_the_page_names_is_one() -> None:
    from setting_keys import setting_keys

    from toolwise.config.schema import RunConfig

    named = set(re.findall(r"`((?:actor|algorithm|critic)\.\w+)(?: = [^`]*)?`", PAGE))
    assert named
    assert named <= set(setting_keys(RunConfig))
