"""Statistics of task files, as values and on the command line."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from toolwise.cli.data import app
from toolwise.data import load_tasks
from toolwise.data.prepare import prepare_gsm8k
from toolwise.data.stats import describe_tasks, stats_table
from toolwise.errors import ConfigError, DataError

DATA = Path(__file__).parents[1] / "fixtures"
RLLA = DATA / "rlla_test.parquet"


def test_the_test_split_is_described() -> None:
    found = describe_tasks(RLLA)
    assert found["rows"] == 80
    assert found["data_sources"] == {"rlla": 80}
    assert found["abilities"] == {"math": 80}
    assert found["ground_truth_types"] == {"str": 80}
    tools = found["tools_per_row"]
    assert (tools["min"], tools["p50"], tools["max"], tools["mean"]) == (1, 3, 7, 3.3375)
    assert found["rlla"] == pytest.approx(
        {
            "rows": 80,
            "share_tool_only": 0.8875,
            "share_response_only": 0.1125,
            "calls_per_row": 123 / 80,
            "calls_per_tool_row": 123 / 71,
        }
    )
    assert len(found["tool_names"]) == 10
    assert found["missing"] == {}
    assert json.loads(json.dumps(found)) == found


def test_quantiles_are_lengths_that_occur() -> None:
    spread = describe_tasks(RLLA)["prompt_characters"]
    lengths = [sum(len(m.content or "") for m in task.prompt) for task in load_tasks(RLLA)]
    shares = {"min": 0.0, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "max": 1.0}
    for name, share in shares.items():
        below, above = (np.quantile(lengths, share, method=method) for method in ("lower", "higher"))
        assert spread[name] in (below, above)
    assert spread["mean"] == pytest.approx(np.mean(lengths))


def test_tools_named_by_a_row_are_counted(tmp_path: Path) -> None:
    prepare_gsm8k(DATA / "gsm8k.jsonl", tmp_path / "x.parquet")
    found = describe_tasks(tmp_path / "x.parquet")
    assert found["tool_names"] == {"calculator": 60}
    assert found["rows_without_own_tools"] == 0
    assert found["rlla"] is None


def test_missing_fields_are_counted(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "a"}\n{"prompt_ids": [1, 2], "ability": "math"}\n')
    found = describe_tasks(tmp_path / "x.jsonl")
    assert found["missing"] == {
        "prompt": 1,
        "data_source": 2,
        "ability": 1,
        "reward_model.ground_truth": 2,
        "extra_info.index": 2,
        "extra_info.split": 2,
    }
    assert found["prompt_tokens"]["max"] == 2
    assert found["rows_without_own_tools"] == 2


def test_a_bad_gold_answer_is_named_by_row(tmp_path: Path) -> None:
    row = {"prompt": "a", "data_source": "rlla", "ground_truth": "<tool_call>\nnot json\n</tool_call>"}
    (tmp_path / "x.jsonl").write_text(json.dumps(row))
    with pytest.raises(DataError, match=r"row 0 \(0-based\), field reward_model.ground_truth: gold call"):
        describe_tasks(tmp_path / "x.jsonl")


def test_the_table_shows_the_numbers() -> None:
    text = io.StringIO()
    Console(file=text, width=100).print(stats_table(describe_tasks(RLLA)))
    assert "share tool only 88.75%" in text.getvalue()
    assert "mean 3.34" in text.getvalue()
    assert "is_valid_parentheses (2)" in text.getvalue()


def test_names_with_brackets_are_shown_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "a", "data_source": "[bold]x[/nothing]"}\n')
    text = io.StringIO()
    Console(file=text, width=100).print(stats_table(describe_tasks(tmp_path / "x.jsonl")))
    assert "[bold]x[/nothing] (1)" in text.getvalue()


def test_stats_on_the_command_line() -> None:
    result = CliRunner().invoke(app, ["stats", str(RLLA)])
    assert result.exit_code == 0
    assert "11.25%" in result.output


def test_stats_as_json() -> None:
    result = CliRunner().invoke(app, ["stats", str(RLLA), "--json"])
    assert json.loads(result.output) == describe_tasks(RLLA)


def test_prepare_on_the_command_line(tmp_path: Path) -> None:
    out = tmp_path / "train.parquet"
    args = ["prepare", "gsm8k", str(DATA / "gsm8k.jsonl"), "--out", str(out), "--oracle-tool"]
    result = CliRunner().invoke(app, args)
    assert result.output == f"wrote 60 rows to {out}\n"
    assert load_tasks(out)[0].tools == ["calc_gsm8k_reward"]


def test_prepare_writes_into_data_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["prepare", "rlla", str(DATA / "rlla_sft.json")])
    assert result.exit_code == 0
    assert len(load_tasks(tmp_path / "data" / "rlla" / "rlla_sft.parquet")) == 400


def test_errors_reach_the_caller_as_they_are() -> None:
    result = CliRunner().invoke(app, ["stats", "nowhere.parquet"])
    assert isinstance(result.exception, DataError)


def test_the_oracle_is_for_gsm8k_alone() -> None:
    result = CliRunner().invoke(app, ["prepare", "rlla", str(DATA / "rlla_sft.json"), "--oracle-tool"])
    assert isinstance(result.exception, ConfigError)


def test_an_unknown_dataset_is_a_usage_error() -> None:
    assert CliRunner().invoke(app, ["prepare", "alpaca", "x.json"]).exit_code == 2
