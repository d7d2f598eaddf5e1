"""What docs/data.md shows is true."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from toolwise.data import load_tasks
from toolwise.errors import DataError

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_both_example_rows_load(tmp_path: Path) -> None:
    rows = [json.loads(block) for block in blocks("json")]
    assert len(rows) == 2
    (tmp_path / "train.json").write_text(json.dumps(rows))
    assert [task.ground_truth for task in load_tasks(tmp_path / "train.json")] == ["72", "72"]


def test_the_comments_beside_the_task_are_its_values(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps(json.loads(blocks("json")[1])) + "\n")
    (task,) = load_tasks(tmp_path / "train.jsonl")
    shown = re.findall(r"^task\.(\w+) +# ([^:\n]+(?::[^\n]*\})?)", blocks("python")[0], re.MULTILINE)
    assert [name for name, _ in shown] == ["task_id", "tools", "ground_truth", "reward_kwargs"]
    for name, text in shown:
        assert repr(getattr(task, name)) == text


def test_the_error_shown_is_the_error_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bad = {"prompt": "a", "extra_info": {"tools_kwargs": {"search": {"excute_kwargs": {"k": 1}}}}}
    Path("train.jsonl").write_text('{"prompt": "a"}\n' * 2 + json.dumps(bad))
    with pytest.raises(DataError) as caught:
        load_tasks("train.jsonl")
    assert [str(caught.value) + "\n"] == blocks("text")


def test_the_batches_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.jsonl").write_text('{"prompt": "a"}\n' * 20)
    names: dict[str, object] = {}
    exec(blocks("python")[1], names)
    assert len(names["tasks"]) == 16  # type: ignore[arg-type]
    assert json.loads(json.dumps(names["place"])) == names["place"]
