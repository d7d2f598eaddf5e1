"""Columns under other names and a system message, on the whole path: dry run, training, resuming, evaluating."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.conftest import Cli, MakeConfig

SYSTEM = "Say only the answer."


def test_a_run_reads_other_columns_from_beginning_to_end(tmp_path: Path, cli: Cli, make_config: MakeConfig) -> None:
    changes = {
        "data": {"columns": {"prompt": "question", "ground_truth": "answer"}, "system_prompt": SYSTEM},
        "trainer": {"total_steps": 1},
    }
    config, run = make_config(tmp_path, changes), tmp_path / "run"
    for name in ("train", "heldout"):
        path = tmp_path / f"{name}.jsonl"
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for row in rows:
            row |= {"question": row.pop("prompt"), "answer": row.pop("reward_model")["ground_truth"]}
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    for arguments in (
        ("train", config, "--dry-run"),
        ("train", config, "--out", run),
        ("resume", run, "--set", "trainer.total_steps=2"),
        ("eval", run),
        ("data", "stats", tmp_path / "train.jsonl", "--column", "prompt=question", "--column", "ground_truth=answer"),
    ):
        ended = cli(*arguments)
        assert ended.status in (0, 3), (arguments, ended.err)  # 3: so short a run may not update its actor
        assert "no_ground_truth" not in ended.out
    for step in (1, 2):
        for line in (run / "rollouts" / f"step-{step:06d}.jsonl").read_text(encoding="utf-8").splitlines():
            assert json.loads(line)["messages"][0] == {"role": "system", "content": SYSTEM}
    ended = cli("train", config, "--set", "data.columns.prompt=qestion", "--dry-run")
    assert ended.status == 2
    assert "no column 'qestion'" in ended.err
    assert "question" in ended.err.partition("the columns are: ")[2]
