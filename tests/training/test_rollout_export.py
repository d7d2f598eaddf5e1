"""Rollouts of a run in the formats of other programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from jsonschema import Draft202012Validator
from run_folders import make_rollout, write_lines

from toolwise.data.files import read_rows
from toolwise.errors import CheckpointError, ConfigError
from toolwise.training.record_filter import parse_condition
from toolwise.training.rollout_export import export_rollouts
from toolwise.training.sft_data import read_conversation

Cli = Callable[..., Any]
FUNCTION = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}},
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
CALL = {
    "type": "object",
    "properties": {"id": {"type": "string"}, "type": {"const": "function"}, "function": FUNCTION},
    "required": ["id", "type", "function"],
    "additionalProperties": False,
}
PLAIN = {
    "type": "object",
    "properties": {"role": {"enum": ["system", "developer", "user"]}, "content": {"type": "string"}},
    "required": ["role", "content"],
    "additionalProperties": False,
}
ASSISTANT = {
    "type": "object",
    "properties": {
        "role": {"const": "assistant"},
        "content": {"type": ["string", "null"]},
        "tool_calls": {"type": "array", "items": CALL, "minItems": 1},
    },
    "required": ["role"],
    "anyOf": [{"properties": {"content": {"type": "string"}}, "required": ["content"]}, {"required": ["tool_calls"]}],
    "additionalProperties": False,
}
RESULT = {
    "type": "object",
    "properties": {"role": {"const": "tool"}, "content": {"type": "string"}, "tool_call_id": {"type": "string"}},
    "required": ["role", "content", "tool_call_id"],
    "additionalProperties": False,
}
TOOL = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "required": ["name"], "properties": {"parameters": {"type": "object"}}},
    },
    "required": ["type", "function"],
    "additionalProperties": False,
}
CHAT = Draft202012Validator(
    {
        "type": "object",
        "properties": {
            "messages": {"type": "array", "minItems": 2, "items": {"oneOf": [PLAIN, ASSISTANT, RESULT]}},
            "tools": {"type": "array", "items": TOOL},
        },
        "required": ["messages"],
        "additionalProperties": False,
    }
)
"""The messages that OpenAI's chat completions take, strictly."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps: a group of different scores, one of equal scores, and rollouts that cannot be used."""
    broken = make_rollout("t3", None, True, group_id="g3")
    broken["messages"][2]["tool_calls"][0]["function"]["arguments"] = '{"name": '
    fault = make_rollout("t4", None, False, group_id="g4") | {"infrastructure_fault": True}
    thought = make_rollout("t1", "lookup", True, group_id="g1")
    thought["messages"][-1]["reasoning_content"] = "hm"
    thought["messages"][3]["name"] = "lookup"
    write_lines(
        tmp_path / "run" / "rollouts" / "step-000001.jsonl",
        [make_rollout("t1", "lookup", False, group_id="g1"), thought, broken, fault],
    )
    unscored = make_rollout("t5", None, False, group_id="g5") | {"score": None, "metrics": {}}
    equal = [make_rollout("t2", None, False, group_id="g2", say=say) for say in ("1", "2")]
    write_lines(tmp_path / "run" / "rollouts" / "step-000002.jsonl", [*equal, unscored])
    write_lines(tmp_path / "run" / "rollouts" / "eval-000002.jsonl", [make_rollout("v", None, True)])
    return tmp_path / "run"


def export(run: Path, form: Any, *where: str, **options: Any) -> tuple[list[dict[str, Any]], dict[str, int]]:
    out = run.parent / f"{form}.{'parquet' if form == 'parquet' else 'jsonl'}"
    conditions = [parse_condition(text) for text in where]
    result = export_rollouts(run, out, form, where=conditions, overwrite=True, **options)
    rows = read_rows(out)
    assert len(rows) == result.rows
    return rows, dict(result.skipped)


def test_openai_chats_are_valid_and_have_no_thoughts(run: Path) -> None:
    rows, skipped = export(run, "openai")
    assert len(rows) == 6
    assert skipped == {"ended by an infrastructure fault": 1}
    for row in rows:
        CHAT.validate(row)
    assert [message["role"] for message in rows[1]["messages"]] == ["system", "user", "assistant", "tool", "assistant"]


def test_sft_conversations_are_those_that_sft_reads(run: Path) -> None:
    rows, skipped = export(run, "sft", "step=1")
    for number, row in enumerate(rows):
        read_conversation(Path("x"), number, row)
    assert [row["messages"][-1].get("reasoning_content") for row in rows] == [None, "hm"]
    assert skipped == {"with a tool call that is not JSON": 1, "ended by an infrastructure fault": 1}
    assert len(export(run, "sft", "score>=1")[0]) == 1
    assert export(run, "sft")[1]["without a score"] == 1


def test_a_pair_is_the_best_against_the_worst_of_a_group(run: Path) -> None:
    rows, skipped = export(run, "preferences")
    (pair,) = rows
    assert [message["role"] for message in pair["prompt"]] == ["system", "user"]
    assert [message["role"] for message in pair["chosen"]] == ["assistant", "tool", "assistant"]
    assert pair["rejected"] == [{"role": "assistant", "content": "I believe 900 m."}]
    assert (pair["score_chosen"], pair["score_rejected"], pair["group_id"], pair["step"]) == (1.0, 0.0, "g1", 1)
    assert skipped["groups of equal scores"] == 2


def test_examples_in_the_prompt_are_no_replies(run: Path) -> None:
    example = [{"role": "user", "content": "1 + 1?", "name": "ann"}, {"role": "assistant", "content": "2"}]
    rollouts = [make_rollout("t", None, ok, group_id="g") for ok in (True, False, False)]
    for rollout in rollouts:
        rollout["messages"][1:1] = example
    silent = rollouts[2] | {"messages": rollouts[2]["messages"][:-1], "steps": [], "score": -1.0}
    write_lines(run / "rollouts" / "step-000001.jsonl", [*rollouts[:2], silent])
    ((pair,), skipped) = export(run, "preferences", "step=1")
    assert [message["role"] for message in pair["prompt"]] == ["system", "user", "assistant", "user"]
    assert pair["rejected"] == [{"role": "assistant", "content": "I believe 900 m."}]
    assert skipped == {"without a reply": 1}
    rows, skipped = export(run, "openai", "step=1")
    assert (len(rows), skipped) == (2, {"without a reply": 1})
    assert rows[0]["messages"][1] == example[0]


def test_a_pair_has_the_prompt_from_before_the_route_changed_it(run: Path) -> None:
    right, wrong = (make_rollout("t", None, ok, group_id="g") for ok in (True, False))
    original = right["messages"][0]
    right["messages"] = [{"role": "system", "content": "SEARCH"}, *right["messages"][1:]]
    right["unrouted"] = [[0, original]]
    write_lines(run / "rollouts" / "step-000001.jsonl", [right, wrong])
    rows, _ = export(run, "preferences", "step=1")
    assert rows[0]["prompt"][0] == original


def test_groups_of_different_prompts_are_left_out(run: Path) -> None:
    rollouts = [make_rollout(task, None, ok, group_id="g") for task, ok in (("t1", True), ("t2", False))]
    write_lines(run / "rollouts" / "step-000001.jsonl", rollouts)
    with pytest.raises(ConfigError, match=r"no rollout is left to export \(.*1 groups of different prompts"):
        export(run, "preferences", "step=1")


def test_parquet_has_one_row_per_rollout_and_nested_values_as_json(run: Path) -> None:
    rows, skipped = export(run, "parquet")
    assert (len(rows), skipped) == (7, {})
    assert (rows[1]["step"], rows[1]["score"], rows[1]["correct"], rows[1]["kind"]) == (1, 1.0, True, "lookup")
    assert json.loads(rows[1]["messages"])[-1]["content"] == "1,204 m"
    assert json.loads(rows[1]["steps"])[0]["tokens"] == 12
    assert pq.read_schema(run.parent / "parquet.parquet").field("score").type == "double"


def test_validations_are_exported_on_request(run: Path) -> None:
    rows, _ = export(run, "parquet", validation=True)
    assert [row["task_id"] for row in rows] == ["v"]


def test_an_empty_export_writes_nothing(run: Path) -> None:
    with pytest.raises(ConfigError, match="no rollout is left to export; change --where"):
        export(run, "openai", "score>5")
    assert not list(run.parent.glob("*openai*"))


def test_a_wrong_suffix_and_a_folder_without_rollouts_are_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"sft is written as \.jsonl"):
        export_rollouts(run, run / "x.parquet", "sft")
    with pytest.raises(CheckpointError, match=r"has no step-\*\.jsonl"):
        export_rollouts(run.parent, run / "x.jsonl", "sft")


@pytest.mark.parametrize("name", ["rollouts/step-000001.jsonl", "metrics.jsonl"])
def test_a_file_of_the_run_is_not_overwritten(run: Path, name: str) -> None:
    (run / "metrics.jsonl").write_text("{}\n")
    before = (run / name).read_bytes()
    with pytest.raises(ConfigError, match="is a file of the run, which would be lost"):
        export_rollouts(run, run / name, "sft")
    assert (run / name).read_bytes() == before


def test_another_file_is_overwritten_only_if_asked_for(run: Path, tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "notes.jsonl"
    out.write_text("mine\n")
    refused = cli("rollouts", "export", run, "--format", "openai", "--out", out)
    assert refused.status != 0
    assert "replace it with --overwrite" in " ".join(refused.err.split())
    assert out.read_text() == "mine\n"
    with pytest.raises(ConfigError, match=r"or replace it with --overwrite \(overwrite=True\)"):
        export_rollouts(run, out, "openai")
    assert cli("rollouts", "export", run, "--format", "openai", "--out", out, "--overwrite").status == 0
    assert read_rows(out)


def test_an_export_of_a_real_run_has_its_tools_and_trains(tiny_run: Path, tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "sft.jsonl"
    assert cli("rollouts", "export", tiny_run, "--format", "openai", "--out", tmp_path / "o.jsonl").status == 0
    for row in read_rows(tmp_path / "o.jsonl"):
        CHAT.validate(row)
    ended = cli("rollouts", "export", tiny_run, "--format", "sft", "--where", "score!=none", "--out", out)
    assert ended.status == 0, ended.err
    assert f"rows to {out}" in ended.out
    assert {tool["function"]["name"] for tool in read_rows(out)[0]["tools"]} == {"calculator", "search"}
    trained = cli("sft", "builtin:small", out, "--out", tmp_path / "model", "--steps", "1")
    assert trained.status == 0, trained.err
