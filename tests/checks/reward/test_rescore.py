"""Rescoring: changed scores, fixed errors, and new rows that never overwrite a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sample_rollouts import sample_rows

from toolwise.checks.reward.rescore import compare, load_run_reward, rescore, unused_path, write_rescored
from toolwise.checks.reward.stored_rollouts import StoredRollout, read_rollouts
from toolwise.config.schema import RewardConfig, SandboxConfig
from toolwise.errors import DataError
from toolwise.types import EvaluateResult

MakeStored = Callable[..., list[StoredRollout]]
MakeReward = Callable[[str], str]

FAULT = {"kind": "exception", "message": "boom", "traceback": ""}


def stored_with(make_stored: MakeStored, *old: float | None) -> list[StoredRollout]:
    rows = [{**row, "score": score} for row, score in zip(sample_rows(), old, strict=False)]
    return make_stored(row if row["score"] is not None else {**row, "error": FAULT} for row in rows)


def results(*scores: float) -> list[EvaluateResult | None]:
    return [EvaluateResult(score=score) for score in scores]


def test_means_changes_and_faults_then_and_now(make_stored: MakeStored) -> None:
    found = compare("judge", stored_with(make_stored, 0.0, 1.0, None, 0.5), results(0.0, 1.0, 1.0, 1.0))
    assert (found.old_mean, found.new_mean) == (0.5, 0.75)
    assert found.changed == 2
    assert (found.old_errors, found.new_errors) == ({"exception": 1}, {})
    assert found.largest == ({"rollout_id": "task-0/rollout-3", "old": 0.5, "new": 1.0},)


@pytest.mark.parametrize(
    ("new", "correlation", "turned"),
    [((0.0, 1.0, 2.0, 3.0), 1.0, 0), ((3.0, 2.0, 1.0, 0.0), -1.0, 6), ((1.0, 1.0, 1.0, 1.0), None, 0)],
)
def test_correlation_and_pairs_that_turned(
    new: tuple[float, ...], correlation: float | None, turned: int, make_stored: MakeStored
) -> None:
    found = compare("judge", stored_with(make_stored, 0.0, 1.0, 2.0, 3.0), results(*new))
    assert found.correlation == (None if correlation is None else pytest.approx(correlation))
    assert (found.pairs, found.pairs_turned) == (6, turned)


def test_new_rows_have_the_new_word_and_keep_the_old_score(make_stored: MakeStored, make_reward: MakeReward) -> None:
    reference = make_reward(
        "from toolwise import EvaluateResult, StepOutput\ndef judge(messages, ground_truth, bonus=0.0):\n"
        "    return EvaluateResult(score=2.0 + bonus, reason='because', "
        "step_outputs=[StepOutput(step_index=0, base_reward=0.5)])"
    )
    stored = stored_with(make_stored, 1.0, None)
    config = RewardConfig(function=reference, kwargs={"bonus": 1.0}, sandbox=SandboxConfig(workers=1))
    found, rows = rescore(config, stored)
    assert found.new_mean == 3.0
    assert [row["score"] for row in rows] == [3.0, 3.0]
    assert [row["reason"] for row in rows] == ["because"] * 2
    assert [row["rescored"]["old_score"] for row in rows] == [1.0, None]
    assert rows[1]["rescored"]["old_error"] == "exception"
    assert rows[1]["error"] is None
    assert rows[0]["steps"] == [{"advantage": None, "base_reward": 0.5}]
    assert rows[0]["messages"] == stored[0].row["messages"]


def test_new_rows_can_be_read_and_scored_again(make_stored: MakeStored, tmp_path: Path) -> None:
    config = RewardConfig(function="toolwise.rewards.library.shaping:length_reward", sandbox=SandboxConfig(workers=1))
    _, rows = rescore(config, make_stored([{**row, "score": 0.0, "trained_on": True} for row in sample_rows()]))
    write_rescored(tmp_path / "new.jsonl", rows)
    again, _ = rescore(config, read_rollouts(tmp_path / "new.jsonl"))
    assert again.changed == 0
    assert again.correlation is None or again.correlation == pytest.approx(1.0)


def test_text_that_is_no_unicode_is_written_as_it_was(tmp_path: Path) -> None:
    write_rescored(tmp_path / "new.jsonl", [{"reason": "\udc80"}])
    assert json.loads((tmp_path / "new.jsonl").read_bytes()) == {"reason": "\udc80"}


def test_no_file_is_ever_overwritten(tmp_path: Path) -> None:
    first = unused_path(tmp_path, "rewards.py:judge")
    assert first == tmp_path / "rescored-judge.jsonl"
    first.touch()
    assert unused_path(tmp_path, "rewards.py:judge") == tmp_path / "rescored-judge-2.jsonl"
    assert unused_path(tmp_path / "step-000001.jsonl", "a:b + c:d").name == "step-000001-rescored-d.jsonl"
    assert unused_path(tmp_path, "some/where/honest.py") == tmp_path / "rescored-honest.jsonl"
    with pytest.raises(DataError, match="already exists"):
        unused_path(tmp_path, "", first)
    with pytest.raises(DataError, match=r"ends in \.jsonl"):
        unused_path(tmp_path, "", tmp_path / "new.txt")


def run_with(folder: Path, reward: str) -> Path:
    (folder / "config.toml").write_text(reward)
    return folder


def test_a_function_keeps_the_arguments_that_it_had_in_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_with(
        tmp_path,
        f'[reward]\nfunction = "{tmp_path}/judge.py:judge"\nkwargs = {{a = 1, b = 2}}\n[reward.sandbox]\ntimeout_s = 3',
    )
    monkeypatch.chdir(tmp_path)
    config = load_run_reward(run, "judge.py:judge", {"b": 5})
    assert config.kwargs == {"a": 1, "b": 5}
    assert config.sandbox.timeout_s == 3
    assert load_run_reward(run, "judge.py:other", {"b": 5}).kwargs == {"b": 5}


def test_the_reward_of_the_run_is_the_default(tmp_path: Path) -> None:
    run = run_with(tmp_path, '[reward]\nfunction = "some.module:judge"\nkwargs = {a = 1}')
    config = load_run_reward(run, None, {"a": 2})
    assert (config.function, config.kwargs) == ("some.module:judge", {"a": 2})


def test_arguments_for_several_rewards_are_refused(tmp_path: Path) -> None:
    parts = '[[reward.parts]]\nfunction = "a:b"\nkwargs = {x = 1}\n[[reward.parts]]\nfunction = "c:d"\n'
    run = run_with(tmp_path, parts)
    assert len(load_run_reward(run, None, {}).parts) == 2
    assert load_run_reward(run, "a:b", {}).kwargs == {"x": 1}
    with pytest.raises(DataError, match="several rewards"):
        load_run_reward(run, None, {"x": 2})


def test_a_file_has_no_reward_of_its_own(tmp_path: Path) -> None:
    config: Any = load_run_reward(tmp_path / "rows.jsonl", "a:b", {})
    assert (config.function, config.sandbox.tier) == ("a:b", "standard")
