"""What a resumed run says of rewards and validation rows that were edited."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from toolwise.rewards.combine import CompositeReward, WeightedReward
from toolwise.rewards.executor import episode_reward
from toolwise.rewards.function import Reward
from toolwise.training.input_digests import changed_inputs, input_digests
from toolwise.types import Task


def run_with(file: Path, truths: Sequence[Any]) -> Any:
    parts = (WeightedReward(Reward.of(f"{file}:score"), name="score"), WeightedReward(episode_reward("env")))
    tasks = [
        Task(task_id=str(i), prompt=[{"role": "user", "content": "?"}], ground_truth=t) for i, t in enumerate(truths)
    ]  # type: ignore[list-item]
    return SimpleNamespace(scoring=SimpleNamespace(rewards=CompositeReward(parts)), validation_tasks=tasks)


def changed(before: dict[str, str], file: Path, truths: Sequence[Any]) -> list[str]:
    return [change.key for change in changed_inputs(before, input_digests(run_with(file, truths)))]


def test_an_edited_reward_a_module_beside_it_and_validation_rows_are_changes(tmp_path: Path) -> None:
    file, beside, other = tmp_path / "rw.py", tmp_path / "helpers.py", tmp_path / "other.py"
    beside.write_text("SIGN = 1\n")
    file.write_text("from helpers import SIGN\ndef score(messages, ground_truth):\n    return SIGN\n")
    before = input_digests(run_with(file, ["4"]))
    assert sorted(before) == ["contents of data.val", "source of the reward score"]
    other.write_text("")  # not imported
    assert changed(before, file, ["4"]) == []
    beside.write_text("SIGN = -1\n")
    assert changed(before, file, ["4"]) == ["source of the reward score"]
    beside.write_text("SIGN = 1\n")
    file.write_text(file.read_text().replace("return SIGN", "return -SIGN"))
    assert changed(before, file, ["4", "5"]) == ["contents of data.val", "source of the reward score"]


def test_a_moved_file_is_the_same_and_older_checkpoints_know_no_inputs(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / "rw.py"
    file.write_text("def score(messages, ground_truth):\n    return 1\n")
    before = input_digests(run_with(file, ["4"]))
    moved = (tmp_path / "a").rename(tmp_path / "b") / "rw.py"
    assert changed(before, moved, ["4"]) == []
    assert changed_inputs(None, before) == []


def test_rows_of_python_with_any_values_have_the_same_digest_in_every_process(tmp_path: Path) -> None:
    file = tmp_path / "rw.py"
    file.write_text("def score(messages, ground_truth):\n    return 1.0\n")
    mixed = [{1: "a", "b": {(1, 2): 3}}, {"a", "bb", "ccc"}, object()]
    reordered = [{"b": {(1, 2): 3}, 1: "a"}, {"ccc", "bb", "a"}, object()]
    before = input_digests(run_with(file, mixed))
    assert changed(before, file, reordered) == []
    assert changed(before, file, [{1: "a", "b": {(1, 2): 4}}, *mixed[1:]]) == ["contents of data.val"]
    assert changed(before, file, [mixed[0], {"a", "bb"}, mixed[2]]) == ["contents of data.val"]
