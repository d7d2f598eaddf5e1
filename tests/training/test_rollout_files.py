"""The files of rollouts: lines, tokens with the parts of their advantages, and an index."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rlvcr_cases import random_batch
from safetensors.numpy import save_file

import toolwise.models
from toolwise.advantages import Gigpo, Grpo, Rlvcr
from toolwise.config.records import RecordsConfig
from toolwise.errors import CheckpointError
from toolwise.messages import Message
from toolwise.serialization.gzip_blocks import open_text
from toolwise.training import rollout_index
from toolwise.training.records import read_records
from toolwise.training.rollout_files import RolloutFiles, compress_old_files, write_records
from toolwise.training.rollout_index import build_index, index_path, index_table, load_index, read_index
from toolwise.training.rollout_paths import rollout_file, rollout_files
from toolwise.training.token_records import ROLLOUTS_PER_GROUP, keeps_tokens, read_old_tokens, read_tokens
from toolwise.training.vocabulary_file import VocabularyFile, read_vocabulary
from toolwise.types import (
    AnnotatedRollout,
    CreditedRollout,
    EvaluateResult,
    Rollout,
    ScoredRollout,
    StepData,
    StepEvent,
    StopReason,
    Task,
    UpdatedTokens,
    Usage,
)


def step(index: int, prompt: list[int], ids: list[int], state: str = "s") -> StepData:
    return StepData(
        system_step_index=index,
        observation_data=None,
        action_taken={"type": "text"},
        resulting_messages_history=[],
        policy_logprobs={
            "prompt_ids": prompt,
            "token_ids": ids,
            "logprobs": [-0.5 * n for n in range(len(ids))],
            "policy_version": 3,
        },
        step_info={"state_key": state},
    )


def scored(name: str, score: float, group: str = "g", steps: tuple[StepData, ...] | None = None) -> ScoredRollout:
    task = Task(task_id="t1", prompt=[Message(role="user", content="How  many\nwells?")], extra_info={"kind": "lookup"})
    messages = (*task.prompt, Message(role="assistant", content="31"))
    made = (step(0, [5, 6], [7]), step(1, [5, 6, 7, 8], [9, 10], "t")) if steps is None else steps
    rollout = Rollout(
        name, group, 0, 0, task, "SEARCH", made, messages, StopReason.ANSWERED, Usage(calls={"search": 2}, cost=1.0)
    )
    return ScoredRollout(rollout, EvaluateResult(score=score), made)


def write(folder: Path, rollouts: list[ScoredRollout], estimator: Any = None, **options: Any) -> list[CreditedRollout]:
    credited = list((estimator or Grpo())([AnnotatedRollout(s) for s in rollouts]).rollouts)
    updated = {
        c.rollout.rollout_id: UpdatedTokens(
            np.full(3, 0.25, np.float32), np.full(3, 1.5, np.float32), np.array([True, False, False])
        )
        for c in credited
    }
    write_records(folder, "step-000001", rollouts, credited, updated, **options)
    return credited


def test_tokens_come_back_with_prompts_advantages_and_parts(tmp_path: Path) -> None:
    pair = [scored("g/0", 1.0), scored("g/1", 0.0)]
    credited = write(tmp_path, pair)
    rows = read_tokens(tmp_path / "step-000001.tokens.parquet")
    assert [(row.rollout_id, row.step) for row in rows] == [("g/0", 0), ("g/0", 1), ("g/1", 0), ("g/1", 1)]
    second = rows[1]
    assert second.prompt_ids is not None
    assert second.prompt_ids.tolist() == [5, 6, 7, 8]
    assert second.token_ids.tolist() == [9, 10]
    assert second.logprobs.tolist() == [0.0, -0.5]
    for name, expected in (("versions", [3, 3]), ("gaps", [0.25, 0.25]), ("entropies", [1.5, 1.5])):
        assert getattr(second, name).tolist() == expected
    assert rows[0].clipped is not None
    assert rows[0].clipped.tolist() == [True]
    assert second.advantages is not None
    assert second.advantages.tolist() == credited[0].advantages[1].tolist()
    total = second.parts["trajectory"] * second.factors["group_scale"]
    assert np.abs(total - second.advantages).max() < 1e-6


def test_rollouts_that_were_not_trained_on_have_no_advantages(tmp_path: Path) -> None:
    write_records(tmp_path, "eval-000000", [scored("g/0", 1.0)], [])
    (row, _) = read_tokens(tmp_path / "eval-000000.tokens.parquet")
    assert (row.advantages, row.gaps, row.parts) == (None, None, {})


def test_only_the_row_groups_of_a_rollout_are_read(tmp_path: Path) -> None:
    many = [scored(f"g/{i}", float(i % 2)) for i in range(2 * ROLLOUTS_PER_GROUP + 3)]
    write(tmp_path, many)
    index = load_index(tmp_path / "step-000001.jsonl")
    for number in (0, ROLLOUTS_PER_GROUP, len(many) - 1):
        first = index["token_row"][number].as_py()
        rows = read_tokens(tmp_path / "step-000001.tokens.parquet", first, 2)
        assert [(row.rollout_id, row.step) for row in rows] == [(f"g/{number}", 0), (f"g/{number}", 1)]
        assert rows[1].prompt_ids is not None
        assert rows[1].prompt_ids.tolist() == [5, 6, 7, 8]


def test_the_index_says_where_each_line_is(tmp_path: Path) -> None:
    write(tmp_path, [scored("g/0", 1.0), scored("g/1", 0.0)])
    file = tmp_path / "step-000001.jsonl"
    table = read_index(file)
    assert table is not None
    rows = table.to_pylist()
    raw = file.read_bytes()
    for row in rows:
        line = json.loads(raw[row["offset"] : row["offset"] + row["length"]])
        assert line["rollout_id"] == row["rollout_id"]
        assert line["score"] == row["score"]
    assert rows[0]["question"] == "How many wells?"
    assert rows[0]["tools"] == ["search"]
    assert (rows[0]["kind"], rows[0]["route"], rows[0]["tokens"], rows[0]["calls"]) == ("lookup", "SEARCH", 3, 2)


def test_an_index_is_built_for_files_without_one(tmp_path: Path) -> None:
    write(tmp_path, [scored("g/0", 1.0), scored("g/1", 0.0)])
    file = tmp_path / "step-000001.jsonl"
    stored = read_index(file)
    index_path(file).unlink()
    assert read_index(file) is None
    assert load_index(file).equals(stored)
    assert read_index(file) is not None


def test_an_index_of_another_file_is_not_used(tmp_path: Path) -> None:
    write(tmp_path, [scored("g/0", 1.0), scored("g/1", 0.0)])
    file = tmp_path / "step-000001.jsonl"
    file.write_bytes(file.read_bytes().splitlines(keepends=True)[0])
    assert read_index(file) is None
    assert load_index(file).num_rows == 1


def test_an_index_is_built_again_for_a_file_edited_at_equal_size(tmp_path: Path) -> None:
    write(tmp_path, [scored("g/0", 1.0)])
    file = tmp_path / "step-000001.jsonl"
    assert read_index(file) is not None
    before = file.stat()
    file.write_bytes(file.read_bytes().replace(b'"g/0"', b'"g/9"'))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert file.stat().st_size == before.st_size
    assert load_index(file)["rollout_id"].to_pylist() == ["g/9"]


def test_the_index_of_a_copied_run_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "run", [scored("g/0", 1.0), scored("g/1", 0.0)])
    shutil.copytree(tmp_path / "run", tmp_path / "copy", copy_function=shutil.copyfile)
    file = tmp_path / "copy" / "step-000001.jsonl"
    os.utime(file, ns=(1, 1))
    monkeypatch.setattr(rollout_index, "build_index", lambda _: pytest.fail("the index was built again"))
    assert load_index(file).num_rows == 2


def test_a_damaged_index_is_built_again(tmp_path: Path) -> None:
    write(tmp_path, [scored("g/0", 1.0), scored("g/1", 0.0)])
    index_path(tmp_path / "step-000001.jsonl").write_bytes(b"PAR1 not really")
    assert load_index(tmp_path / "step-000001.jsonl").num_rows == 2


def test_lines_of_other_versions_and_broken_ones_are_no_obstacle(tmp_path: Path) -> None:
    lines = [b'{"task_id": 7, "messages": [{"role": "user", "content": ["x", {"text": "y"}]}]}', b"not JSON", b"[1]"]
    (tmp_path / "x.jsonl").write_bytes(b"\n".join(lines) + b'\n{"torn')
    table = build_index(tmp_path / "x.jsonl")
    assert table["question"].to_pylist() == ["xy"]
    assert table["offset"].to_pylist() == [0]


def test_values_too_large_for_the_index_and_lone_surrogates_are_no_obstacle(tmp_path: Path) -> None:
    odd: list[dict[str, Any]] = [
        {"steps": [{"tokens": 2**40}]},
        {"calls": {"\ud800": 2**70}},
        {"rollout_id": "a\ud800", "group_id": "\udfff", "route": "\ud800", "kind": "\ud800", "stop_reason": "\ud800"},
    ]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in odd))
    table = build_index(tmp_path / "x.jsonl")
    assert table["tokens"].to_pylist() == [2**31 - 1, 0, 0]
    assert table["calls"].to_pylist() == [0, 2**31 - 1, 0]
    assert (table["tools"].to_pylist()[1], table["rollout_id"].to_pylist()[2]) == (["?"], "a?")
    write(tmp_path, [scored("a\ud800", 1.0)])
    stored = read_index(tmp_path / "step-000001.jsonl")
    assert stored is not None
    assert stored.equals(build_index(tmp_path / "step-000001.jsonl"))
    assert stored["token_row"].to_pylist() == [0]


def test_a_kind_that_cannot_be_printed_does_not_stop_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rollouts = [scored("g/0", 1.0), scored("g/1", 0.0)]
    rollouts[0].rollout.task.extra_info["kind"] = 10**5000
    write(tmp_path, rollouts)
    assert load_index(tmp_path / "step-000001.jsonl")["rollout_id"].to_pylist() == ["g/1"]
    assert len(read_records(tmp_path / "step-000001.jsonl")) == 2
    assert "not shown: 1" in caplog.text


def test_lines_that_cannot_be_indexed_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rollout_index, "MAX_LINE_BYTES", 64)
    lines = [b'{"task_id": "a"}', b'{"task_id": "' + b"x" * 500 + b'"}', b"[1]", b'{"task_id": "b"}', b'{"torn']
    (tmp_path / "x.jsonl").write_bytes(b"\n".join(lines))
    table = build_index(tmp_path / "x.jsonl")
    assert table["task_id"].to_pylist() == ["a", "b"]
    assert table["offset"].to_pylist() == [0, (tmp_path / "x.jsonl").read_bytes().index(lines[3])]
    assert "not shown: 2" in caplog.text
    rows = table.to_pylist()
    assert index_table([rows[0], rows[1] | {"tokens": 2**40}, rows[1]]).to_pylist() == rows


def test_steps_in_the_same_state_have_the_same_anchor(tmp_path: Path) -> None:
    write(tmp_path, [scored("g/0", 1.0), scored("g/1", 0.0)], Gigpo())
    first, second = (json.loads(line)["steps"] for line in (tmp_path / "step-000001.jsonl").read_bytes().splitlines())
    assert first[0]["anchor"] == second[0]["anchor"]
    assert first[0]["anchor"] != first[1]["anchor"]
    assert first[0]["return_to_go"] > first[1]["return_to_go"] - 1


def test_a_share_of_the_groups_keeps_its_tokens(tmp_path: Path) -> None:
    rollouts = [scored(f"{group}/{i}", float(i), f"g{group}") for group in range(40) for i in range(2)]
    write(tmp_path, rollouts, token_share=0.5)
    kept = {row.rollout_id.partition("/")[0] for row in read_tokens(tmp_path / "step-000001.tokens.parquet")}
    assert kept == {str(group) for group in range(40) if keeps_tokens(f"g{group}", 0.5)}
    assert 10 < len(kept) < 30
    assert len((tmp_path / "step-000001.jsonl").read_bytes().splitlines()) == 80
    assert [keeps_tokens("g", share) for share in (0.0, 1.0)] == [False, True]


def test_tokens_of_the_last_steps_are_kept(tmp_path: Path) -> None:
    files = RolloutFiles(RecordsConfig(token_steps=2))
    for number in range(1, 5):
        files.on_step(StepEvent(tmp_path, number, {}, (scored("g/0", 1.0),), ()))
    names = sorted(path.name for path in (tmp_path / "rollouts").glob("*.tokens.parquet"))
    assert names == ["step-000003.tokens.parquet", "step-000004.tokens.parquet"]
    assert len(list((tmp_path / "rollouts").glob("*.jsonl"))) == 4


def event_of(folder: Path, step: int) -> StepEvent:
    pair = [scored(f"step-{step}/0/{n}", float(n), f"step-{step}/0") for n in (0, 1)]
    credited = list(Grpo()([AnnotatedRollout(s) for s in pair]).rollouts)
    return StepEvent(folder, step, {}, pair, credited)


def test_messages_of_older_steps_are_compressed_and_read_as_before(tmp_path: Path) -> None:
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    for folder, keep in ((plain, None), (packed, 2)):
        files = RolloutFiles(RecordsConfig(plain_steps=keep))
        for step in range(1, 5):
            files.on_step(event_of(folder, step))
    found = rollout_files(packed / "rollouts", "step-*")
    assert [path.name for path in found.values()] == [
        "step-000001.jsonl.gz",
        "step-000002.jsonl.gz",
        "step-000003.jsonl",
        "step-000004.jsonl",
    ]
    for name, path in rollout_files(plain / "rollouts", "step-*").items():
        assert read_records(found[name]) == read_records(path)
        table = read_index(found[name])  # that of the plain file, not built again
        assert table is not None
        assert table.equals(read_index(path))
        for row in table.to_pylist():
            with open_text(found[name]) as lines:
                lines.seek(row["offset"])
                assert json.loads(lines.read(row["length"]))["rollout_id"] == row["rollout_id"]
        assert build_index(found[name]).equals(table)


def test_a_step_that_is_repeated_replaces_its_compressed_file(tmp_path: Path) -> None:
    files = RolloutFiles(RecordsConfig(plain_steps=1))
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step-mine.jsonl").touch()  # a file of the user's
    for step in (1, 2, 1):
        files.on_step(event_of(tmp_path, step))
    assert {path.name for path in (tmp_path / "rollouts").glob("*.jsonl*")} == {
        "step-000001.jsonl.gz",
        "step-000002.jsonl",
        "step-mine.jsonl",
    }
    # A process killed between writing the compressed file and deleting the plain one: the plain one counts.
    (tmp_path / "rollouts" / "step-000002.jsonl.gz").write_bytes(b"half")
    assert rollout_files(tmp_path / "rollouts", "*")["step-000002"].suffix == ".jsonl"
    assert rollout_file(tmp_path / "rollouts", "step-000003") is None


def test_a_damaged_compressed_file_shows_what_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, files = tmp_path / "rollouts", RolloutFiles(RecordsConfig(plain_steps=1))
    for step in (1, 2):
        files.on_step(event_of(tmp_path, step))
    path = folder / "step-000001.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-9])
    assert load_index(path).num_rows <= 2
    assert "cannot be decompressed to its end" in caplog.text
    with pytest.raises(CheckpointError, match="cannot be decompressed"):
        read_records(path)


def test_rollouts_without_tokens_have_no_token_file(tmp_path: Path) -> None:
    write_records(tmp_path, "eval-000000", [scored("g/0", 1.0, steps=())], [])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["eval-000000.index.parquet", "eval-000000.jsonl"]


def test_tokens_of_a_killed_attempt_do_not_survive_one_that_stores_none(tmp_path: Path) -> None:
    write(tmp_path, [scored("g/0", 1.0)])
    write(tmp_path, [scored("g/0", 0.0)], token_share=0.0)
    index_path(tmp_path / "step-000001.jsonl").unlink()
    assert load_index(tmp_path / "step-000001.jsonl")["token_row"].to_pylist() == [-1]
    assert not (tmp_path / "step-000001.tokens.parquet").exists()


def test_tokens_of_earlier_versions_are_read(tmp_path: Path) -> None:
    arrays = {
        "token_ids": np.array([1, 2, 3], np.int32),
        "token_ids.offsets": np.array([0, 1, 3]),
        "logprobs": np.array([-1.0, -2.0, -3.0], np.float32),
    }
    save_file(arrays, tmp_path / "x.safetensors", metadata={"steps": json.dumps([["a", 0], ["b", 0]])})
    (row,) = read_old_tokens(tmp_path / "x.safetensors", "b")
    assert (row.token_ids.tolist(), row.logprobs.tolist(), row.prompt_ids) == ([2, 3], [-2.0, -3.0], None)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(Path(toolwise.models.__file__).parent / "small")


def test_the_vocabulary_says_what_tokens_are(tmp_path: Path, tokenizer: Any) -> None:
    text = "How many wells, Zoë? 水 🙂"
    ids = tokenizer.encode(text, add_special_tokens=False)
    file = VocabularyFile(tmp_path / "vocabulary.ndjson", tokenizer)
    file.add([*ids, tokenizer.all_special_ids[0]])
    known = read_vocabulary(tmp_path / "vocabulary.ndjson")
    assert b"".join(known[i] for i in ids).decode() == text
    size = (tmp_path / "vocabulary.ndjson").stat().st_size
    VocabularyFile(tmp_path / "vocabulary.ndjson", tokenizer).add(ids)
    assert (tmp_path / "vocabulary.ndjson").stat().st_size == size


def test_a_torn_line_of_the_vocabulary_costs_one_token(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "vocabulary.ndjson"
    path.write_bytes(b'{"id": 1, "text": "a"}\n{"id": 2, "te')
    VocabularyFile(path, tokenizer).add([3])
    assert {1, 3} <= set(read_vocabulary(path))


def test_an_earlier_run_has_an_index(tmp_path: Path) -> None:
    shutil.unpack_archive(Path(__file__).parents[1] / "fixtures" / "frozen_run.tar.gz", tmp_path)
    files = sorted(tmp_path.rglob("rollouts/*.jsonl"))
    assert files
    for file in files:
        assert load_index(file).num_rows == len(file.read_bytes().splitlines())


def test_compared_thinking_levels_are_stored(tmp_path: Path) -> None:
    thinking = [a for a in random_batch(0) if a.thinking and any(s.group for s in a.thinking.steps)]
    credited = Rlvcr()(thinking).rollouts
    write_records(tmp_path, "step-000001", [a.scored for a in thinking], list(credited))
    lines = [json.loads(line) for line in (tmp_path / "step-000001.jsonl").read_bytes().splitlines()]
    for line, rollout in zip(lines, credited, strict=True):
        assert rollout.annotated.thinking is not None
        grouped = {i: s.group for i, s in enumerate(rollout.annotated.thinking.steps) if s.group is not None}
        assert [(step["step"], step["level"]) for step in line["thinking"]] == [
            (i, g.level) for i, g in grouped.items()
        ]
        for step in line["thinking"]:
            scores = {score.level: score for score in grouped[step["step"]].scores}
            assert [level["level"] for level in step["levels"]] == sorted(scores)
            centred = sum(level["advantage"] for level in step["levels"])
            assert centred == pytest.approx(0.0, abs=1e-9)
            for level in step["levels"]:
                assert level["action_logprob"] == scores[level["level"]].action_logprob
    assert read_records(tmp_path / "step-000001.jsonl")[0].thinking == lines[0]["thinking"]


def test_a_file_that_is_compressed_after_it_was_found_is_read(tmp_path: Path) -> None:
    folder, files = tmp_path / "rollouts", RolloutFiles(RecordsConfig(plain_steps=None))
    for step in (1, 2):
        files.on_step(event_of(tmp_path, step))
    found = rollout_files(folder, "step-*")["step-000001"]
    before = read_records(found)
    compress_old_files(folder, "step", 1)
    assert not found.exists()
    assert read_records(found) == before != []
    (folder / "step-000001.jsonl.gz").unlink()
    with pytest.raises(CheckpointError, match=r"step-000001\.jsonl is gone"):
        read_records(found)


def test_a_disk_that_is_full_leaves_older_files_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("toolwise.training.rollout_files.compress_old_files", full)
    files = RolloutFiles(RecordsConfig(plain_steps=1))
    for step in (1, 2):
        files.on_step(event_of(tmp_path, step))
    assert list(rollout_files(tmp_path / "rollouts", "step-*")) == ["step-000001", "step-000002"]
    assert "older rollouts stay uncompressed (records.plain_steps)" in caplog.text
