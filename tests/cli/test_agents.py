"""The commands take an agent folder, a run folder or a plain model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., Any]
SUM = "What is 4321 - 1234?"
SHORT = ("--set", "rollout.max_new_tokens=48")


@pytest.fixture(scope="module")
def exported(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory, cli: Cli) -> Path:
    out = tmp_path_factory.mktemp("agents") / "exported"
    ended = cli("export", tiny_run, "--out", out)
    assert ended.status == 0, ended.err
    return out


@pytest.mark.long
def test_run_asks_an_agent_a_run_and_a_model(exported: Path, tiny_run: Path, cli: Cli) -> None:
    said = [cli("run", source, SUM, "--json", *SHORT) for source in (exported, tiny_run)]
    assert [ended.status for ended in said] == [0, 0], said[0].err + said[1].err
    first, second = (json.loads(ended.out) for ended in said)
    assert first["text"] == second["text"] == "Answer: 3087"
    assert (first["route"], first["odds"]) == ("", {})
    plain = cli("run", "builtin:small", SUM, "--tools", "calculator", *SHORT)
    assert (plain.status, "Answer: 3087" in plain.out, "route" in plain.out) == (0, True, False), plain.err
    refused = cli("run", exported, SUM, "--budget", 1)
    assert (refused.status, "has no router" in refused.err) == (2, True)


def test_eval_and_rollout_take_an_agent(exported: Path, tiny_run: Path, tmp_path: Path, cli: Cli) -> None:
    rows = tiny_run.parent / "heldout.jsonl"
    missing = cli("eval", exported)
    assert (missing.status, "add --data FILE" in missing.err) == (2, True)
    scores = [cli("eval", source, "--data", rows, "--json", *SHORT) for source in (exported, tiny_run)]
    assert [ended.status for ended in scores] == [0, 0], scores[0].err + scores[1].err
    first, second = (json.loads(ended.out) for ended in scores)
    assert first["score"] == second["score"]
    ended = cli("rollout", exported, "--data", rows, "-n", 2, "--out", tmp_path / "out", "--greedy", *SHORT)
    assert ended.status == 0, ended.err
    assert (tmp_path / "out" / "rollouts.jsonl").is_file()


def test_a_changed_agent_is_refused_in_one_line(exported: Path, tmp_path: Path, cli: Cli) -> None:
    import shutil

    folder = shutil.copytree(exported, tmp_path / "copy")
    (folder / "tokenizer.json").write_text("{}")
    for command in (("run", folder, SUM), ("eval", folder, "--data", "x.jsonl")):
        ended = cli(*command)
        assert (ended.status, len(ended.err.splitlines())) == (2, 1)
        assert "tokenizer.json is not what was exported" in ended.err
