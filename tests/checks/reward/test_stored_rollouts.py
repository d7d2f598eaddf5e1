"""Rollouts are read from a run, its files and user rows; errors name the bad row."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolwise.checks.reward import stored_rollouts
from toolwise.checks.reward.stored_rollouts import StoredRollout, read_rollouts
from toolwise.data.files import write_rows
from toolwise.errors import CheckpointError, DataError

MakeStored = Callable[..., list[StoredRollout]]

ASKED = {"role": "user", "content": "2 + 2?"}
SAID = {"role": "assistant", "content": "4"}


def record(name: str = "r", steps: int = 1, **more: Any) -> dict[str, Any]:
    """As a run writes one."""
    return {
        "rollout_id": name,
        "group_id": "g",
        "task_id": "t",
        "kind": "sum",
        "messages": [ASKED, SAID],
        "ground_truth": "4",
        "score": 1.0,
        "trained_on": True,
        "steps": [{"advantage": 0.5, "base_reward": 0.25, "tokens": 3}] * steps,
        **more,
    }


def write_run(folder: Path, **files: list[dict[str, Any]]) -> Path:
    (folder / "rollouts").mkdir(parents=True)
    for name, rows in files.items():
        write_rows(rows, folder / "rollouts" / f"{name.replace('_', '-')}.jsonl")
    return folder


def test_a_run_gives_its_training_rollouts_in_order(tmp_path: Path) -> None:
    run = write_run(
        tmp_path, step_000002=[record("c")], step_000001=[record("a"), record("b")], eval_000000=[record("e")]
    )
    stored = read_rollouts(run)
    assert [one.rollout.rollout_id for one in stored] == ["a", "b", "c"]
    assert [one.step for one in stored] == [1, 1, 2]
    assert stored[0].group != stored[2].group  # the same group's name in another step


def test_a_file_that_is_compressed_or_deleted_while_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path, step_000002=[record("b")], step_000001=[record("a")])
    older = run / "rollouts" / "step-000001.jsonl"
    real = stored_rollouts.read_rows

    def meanwhile(file: Path) -> Any:
        if file.name == "step-000002.jsonl" and older.exists():
            with gzip.open(f"{older}.gz", "wb") as packed:
                packed.write(older.read_bytes())
            older.unlink()
        return real(file)

    monkeypatch.setattr(stored_rollouts, "read_rows", meanwhile)
    assert [one.rollout.rollout_id for one in read_rollouts(run)] == ["a", "b"]
    monkeypatch.setattr(stored_rollouts, "read_rows", lambda file: (Path(f"{older}.gz").unlink(), real(file))[1])
    with pytest.raises(CheckpointError, match=r"step-000001\.jsonl\.gz: was there a moment ago"):
        read_rollouts(run)


def test_validation_can_be_asked_for(tmp_path: Path) -> None:
    run = write_run(tmp_path, step_000001=[record("a")], eval_000000=[record("e")])
    assert [one.rollout.rollout_id for one in read_rollouts(run, validation=True)] == ["e"]


def test_one_step_can_be_asked_for(tmp_path: Path) -> None:
    run = write_run(tmp_path, step_000001=[record("a")], step_000002=[record("b")])
    assert [one.rollout.rollout_id for one in read_rollouts(run, step=2)] == ["b"]
    with pytest.raises(CheckpointError, match="no rollouts of step 7; it has steps from 1 to 2"):
        read_rollouts(run, step=7)


def test_a_limit_takes_the_latest_of_a_run_and_the_first_of_a_file(tmp_path: Path) -> None:
    run = write_run(tmp_path, step_000001=[record("a"), record("b")], step_000002=[record("c"), record("d")])
    assert [one.rollout.rollout_id for one in read_rollouts(run, limit=3)] == ["b", "c", "d"]
    file = run / "rollouts" / "step-000002.jsonl"
    assert [one.rollout.rollout_id for one in read_rollouts(file, limit=1)] == ["c"]


def test_a_record_says_what_happened_and_not_what_the_reward_was_given(make_stored: MakeStored) -> None:
    (one,) = make_stored([record(reward_kwargs={"rubric": "strict"})])
    assert one.rollout.task.reward_kwargs == {"rubric": "strict"}
    assert [step.base_reward for step in one.rollout.steps] == [0.25]


def test_what_rewards_may_name_of_a_task_comes_back(make_stored: MakeStored) -> None:
    for more in ({}, {"trained_on": True}):
        given = {"messages": [ASKED, SAID], "extra_info": {"index": 3}, "data_source": "math", **more}
        (one,) = make_stored([given])
        task = one.rollout.task
        assert (task.extra_info, task.data_source, task.reward_kwargs) == ({"index": 3}, "math", {})


def test_further_columns_of_other_rows_are_arguments(make_stored: MakeStored) -> None:
    given = {"messages": [ASKED, SAID], "ground_truth": "4", "rubric": "strict", "gold": "4"}
    (one,) = make_stored([{**given, "step": 7, "prompt_length": 99}])  # the run gives these two
    assert one.rollout.task.reward_kwargs == {"rubric": "strict"}
    assert one.gold == "4"


def test_rows_without_names_are_grouped_by_their_prompt(make_stored: MakeStored) -> None:
    other = {"role": "user", "content": "3 + 3?"}
    rows = [{"messages": [asked, SAID], "ground_truth": "4"} for asked in (ASKED, other, ASKED)]
    a, b, c = (one.rollout for one in make_stored(rows))
    assert a.task.task_id == c.task.task_id != b.task.task_id
    assert a.group_id == c.group_id
    assert len({a.rollout_id, b.rollout_id, c.rollout_id}) == 3


def test_the_ground_truth_of_the_verl_layout_is_found(make_stored: MakeStored) -> None:
    (one,) = make_stored([{"messages": [ASKED, SAID], "reward_model": {"ground_truth": "4", "style": "rule"}}])
    assert one.rollout.task.ground_truth == "4"
    assert one.rollout.task.reward_kwargs == {}


def test_parquet_is_read_too(tmp_path: Path) -> None:
    write_rows([{"messages": [ASKED, SAID], "ground_truth": "4"}], tmp_path / "rows.parquet")
    (one,) = read_rollouts(tmp_path / "rows.parquet")
    assert [m.content for m in one.rollout.messages] == ["2 + 2?", "4"]


def test_the_prompt_ends_where_the_policy_began(make_stored: MakeStored) -> None:
    """A reply in the prompt is no step; a user who speaks between two steps is no end of the prompt."""
    history = [ASKED, SAID, {"role": "user", "content": "and 3 + 3?"}]
    talk = [*history, SAID, {"role": "user", "content": "sure?"}, SAID]
    (one,) = make_stored([record(steps=2, messages=talk)])
    assert len(one.rollout.task.prompt) == 3
    (plain,) = make_stored([{"messages": talk}], "plain.jsonl")
    assert len(plain.rollout.task.prompt) == 5
    (told,) = make_stored([{"messages": talk, "prompt": history}], "told.jsonl")
    assert len(told.rollout.task.prompt) == 3


def test_the_step_stands_in_the_row_or_in_the_name_of_the_file(make_stored: MakeStored) -> None:
    assert make_stored([record()], "step-000012.jsonl")[0].step == 12
    assert make_stored([record(step=3)], "step-000013.jsonl")[0].step == 3


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "2 + 2?"}, "field messages: missing.*a task file"),
        ({"messages": []}, "field messages: missing"),
        ({"messages": "hello"}, "field messages: .*not a list"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "field messages: role"),
        ({"messages": [ASKED, SAID], "reward_kwargs": [1]}, "field reward_kwargs: not an object"),
        ({"messages": [ASKED, SAID], "extra_info": "{"}, "field extra_info: not an object"),
    ],
)
def test_a_bad_row_is_named(row: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(record())}\n{json.dumps(row)}\n")
    with pytest.raises(DataError, match=f"rows.jsonl: row 1 .0-based., {words}"):
        read_rollouts(path)


def test_a_folder_without_rollouts_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no step-"):
        read_rollouts(tmp_path)


def test_a_file_without_that_step_says_so(tmp_path: Path) -> None:
    write_rows([record(step=1)], tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match="no rollouts of step 4"):
        read_rollouts(tmp_path / "rows.jsonl", step=4)
