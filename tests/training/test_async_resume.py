"""Asynchronous runs from the command line: checkpoints hold what is under way, and a resumed run learns from each group
once."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from async_cases import FEATURES, async_run, train
from safetensors.torch import load_file

from toolwise.errors import CheckpointError
from toolwise.messages import Message
from toolwise.rollout.queue import RolloutQueue, Ticket
from toolwise.training.stored_groups import FinishedPrompt
from toolwise.training.ticket_book import TicketBook, packed_state
from toolwise.training.trainer import Training
from toolwise.types import Task


def test_a_run_trains_validates_saves_and_resumes(
    tmp_path: Path, cli: Callable[..., Any], make_config: Callable[..., Path]
) -> None:
    changes = {
        "trainer": {"mode": "async", "max_staleness": 1, "total_steps": 3},
        "validation": {"every": 2, "before": False},
    }
    config = make_config(tmp_path, changes)
    ended = cli("train", config, "--out", tmp_path / "run", "--set", "trainer.total_steps=2")
    assert ended.status == 0, ended.err
    ended = cli("train", config, "--out", tmp_path / "run", "--resume")
    assert ended.status == 0, ended.err
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "staleness/max" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert max(line["staleness/max"] for line in steps) <= 1.0
    rollouts = Counter(
        json.loads(line)["rollout_id"]
        for path in sorted((tmp_path / "run" / "rollouts").glob("step-*.jsonl"))
        for line in path.read_text().splitlines()
    )
    assert len(rollouts) == 3 * 2 * 2
    assert set(rollouts.values()) == {1}


def test_groups_under_way_are_rolled_out_again_and_none_is_learned_from_twice() -> None:
    """The first process dies after two of four steps, with the next step's groups under way."""
    keep = {"algorithm": {"zero_std_groups": "keep"}}
    first = async_run(1, steps=4, **keep)
    learned = [s.rollout.rollout_id for result in train(first, 2) for s in result.scored]
    state = first.registry().state_dict()
    under_way = [batch["tickets"] for batch in state["tickets"]["open"]]
    assert sum(map(len, under_way)) == 2
    second = async_run(1, steps=4, **keep)
    second.registry().load_state_dict(state)
    second.policy.version = second.learner.version
    learned += [s.rollout.rollout_id for result in train(second, 2) for s in result.scored]
    whole = async_run(1, steps=4, **keep)
    expected = [s.rollout.rollout_id for result in train(whole, 4) for s in result.scored]
    assert len(learned) == len(set(learned)) == 4 * 2 * 2
    assert sorted(learned) == sorted(expected)
    assert second.batches.state_dict() == whole.batches.state_dict()
    assert second.queue.state_dict() == whole.queue.state_dict()


@pytest.mark.parametrize("staleness", [1, pytest.param(2, marks=pytest.mark.long)])
def test_with_a_fixed_schedule_a_resumed_run_ends_like_one_that_was_never_interrupted(staleness: int) -> None:
    """Bit for bit: the schedule is a function of the settings, and finished groups are in the checkpoint."""
    sections: Any = {"algorithm": {"zero_std_groups": "keep"}, "deterministic": True, "steps": 4}
    whole = async_run(staleness, **sections)
    expected = train(whole, 4)
    assert [result.metrics["staleness/max"] for result in expected] == [min(s, staleness) for s in range(4)]
    assert [result.metrics["staleness/mean"] for result in expected] == [min(s, staleness) for s in range(4)]
    assert [result.metrics["canary/compared"] for result in expected] == [1.0, 0.0, 0.0, 0.0]
    assert ["canary/logprob_gap_max" in result.metrics for result in expected] == [True, False, False, False]
    first = async_run(staleness, **sections)
    train(first, 2)
    state = first.registry().state_dict()
    state["tickets"] = packed_state(state["tickets"])
    stored = [len(batch["finished"]) for batch in state["tickets"]["open"]]
    assert sum(stored) >= 2 * (staleness - 1)
    second = async_run(staleness, **sections)
    second.learner.model.load_state_dict(first.learner.model.state_dict())
    second.registry().load_state_dict(state)
    assert second.weights is not None
    second.weights.copy()
    second.policy.version = second.learner.version
    found = train(second, 2)
    assert second.learner.weights_checksum() == whole.learner.weights_checksum()
    for left, right in zip(expected[2:], found, strict=True):
        assert [s.rollout.rollout_id for s in left.scored] == [s.rollout.rollout_id for s in right.scored]
        assert [s.score for s in left.scored] == [s.score for s in right.scored]
        assert left.metrics["actor/loss"] == right.metrics["actor/loss"]


MORE: dict[str, dict[str, Any]] = {
    "curriculum": {"data": {"sampler": "difficulty", "sampler_kwargs": {"highest": 6.0}}},
    "validations": {"validation": {"every": 2, "before": False}},
    "kept cache": {"trainer": {"keep_cache": True}},
    "recomputed": {"actor": {"lr": 1e-3, "policy_loss": "decoupled"}},
    "interpolated": {"actor": {"lr": 1e-3, "policy_loss": "interpolated"}},
    "measured concurrency": {"rollout": {"n": 2, "max_new_tokens": 12, "max_concurrent": "auto"}},
}
CLOCKS = ("time/", "async/", "engine/", "checkpoint/", "rollout/", "memory/")


@pytest.mark.long
@pytest.mark.parametrize("staleness", [1, 3])
@pytest.mark.parametrize("feature", [*FEATURES, *MORE])
def test_every_feature_resumes_from_any_checkpoint_as_if_nothing_had_happened(
    feature: str, staleness: int, tmp_path: Path
) -> None:
    """Bit for bit with a fixed schedule, whole runs: the weights at the end, and the metrics of each step."""
    whole = trained_to_the_end(tmp_path / "whole", feature, staleness)
    for step in (1, 3):
        part = tmp_path / f"from {step}"
        shutil.copytree(tmp_path / "whole", part)
        for later in (part / "checkpoints").glob("step-??????"):
            if int(later.name.partition("-")[2]) > step:
                shutil.rmtree(later)
        assert trained_to_the_end(part, feature, staleness) == whole


def trained_to_the_end(out: Path, feature: str, staleness: int) -> tuple[dict[str, bytes], dict[int, str]]:
    sections: dict[str, Any] = {"validation": {"before": False}, **{**FEATURES, **MORE}[feature]}
    trainer = {
        "mode": "async",
        "max_staleness": staleness,
        "total_steps": 5,
        "save_every": 1,
        "keep_best": False,
        "keep_checkpoints": 9,
        "console": False,
        **sections.pop("trainer", {}),
    }
    held_out = 2 * ("every" in sections["validation"])
    run = async_run(staleness, held_out=held_out, deterministic=True, trainer=trainer, **sections)
    asyncio.run(Training(run, out, resume=out.exists()).run_training())
    weights = load_file(out / "checkpoints" / "step-000005" / "model" / "model.safetensors")
    metrics: dict[int, dict[str, Any]] = defaultdict(dict)
    for line in (out / "metrics.jsonl").read_text().splitlines():
        found = json.loads(line)
        metrics[found["step"]] |= {name: value for name, value in found.items() if not name.startswith(CLOCKS)}
    return (
        {name: tensor.numpy().tobytes() for name, tensor in weights.items()},
        {step: json.dumps(values, sort_keys=True) for step, values in metrics.items()},
    )


def test_a_finished_group_is_not_rolled_out_again() -> None:
    tickets, queue, tasks = book(2)
    issued = [queue._issue(0), queue._issue(0)]
    batch = tickets.draw(tasks, issued, 0)
    group = FinishedPrompt([], [], {})
    tickets.finish(issued[1], group)
    assert list(batch.unfinished) == [0]
    loaded, fresh, _ = book(2)
    loaded.load_state_dict(packed_state(tickets.state_dict()))
    [again] = loaded.reissue(fresh, tasks)
    assert list(again.unfinished) == [0]
    assert (fresh.in_progress, fresh.waiting) == (1, 1)
    tickets.close([issued[1]])
    assert not batch.finished


def test_a_stored_group_that_cannot_be_read_is_rolled_out_again(caplog: pytest.LogCaptureFixture) -> None:
    tickets, queue, tasks = book(2)
    issued = [queue._issue(0), queue._issue(0)]
    tickets.draw(tasks, issued, 0)
    tickets.finish(issued[1], FinishedPrompt([], [], {}))
    state = packed_state(tickets.state_dict())
    state["open"][0]["finished"][0][1] = np.frombuffer(b'[{"$unheard": 1}, []]', np.uint8)
    loaded, fresh, _ = book(2)
    loaded.load_state_dict(state)
    [again] = loaded.reissue(fresh, tasks)
    assert list(again.unfinished) == [0, 1]
    assert "rolled out again (KeyError: '$unheard')" in caplog.text


def book(count: int, staleness: int = 1) -> tuple[TicketBook, RolloutQueue[str], list[Task]]:
    tasks = [Task(task_id=f"t{index}", prompt=[Message(role="user", content="?")]) for index in range(count)]
    return TicketBook(staleness), RolloutQueue(per_update=2, max_staleness=staleness, order="finished"), tasks


def test_a_batch_beyond_the_next_step_is_a_refill() -> None:
    tickets, _, tasks = book(2)
    labels = [(b.step, b.label) for b in (tickets.draw(tasks, [], version) for version in (0, 0, 0, 0, 1))]
    assert labels == [(0, "step"), (1, "step"), (1, "step-more"), (1, "step-more-more"), (2, "step")]


def test_tickets_are_issued_again_in_their_order_with_their_versions() -> None:
    tickets, _, tasks = book(4)
    tickets.draw(tasks[:2], [Ticket(4, 1), Ticket(7, 2)], 1)
    tickets.draw(tasks[2:], [Ticket(5, 2), Ticket(6, 2)], 2)
    tickets.close([Ticket(5, 2)])
    loaded, queue, _ = book(4)
    loaded.load_state_dict(tickets.state_dict())
    again = loaded.reissue(queue, tasks)
    issued = {batch.tasks[index].task_id: t for batch in again for index, t in batch.tickets.items()}
    assert issued == {"t0": Ticket(0, 1), "t1": Ticket(2, 2), "t3": Ticket(1, 2)}
    assert queue.in_progress == 3


def test_another_batch_size_or_other_data_is_refused() -> None:
    tickets, queue, tasks = book(2)
    tickets.reissue(queue, tasks)
    tickets.draw(tasks, [Ticket(0, 0), Ticket(1, 0)], 0)
    state = tickets.state_dict()
    for known, per_update, told in ((tasks, 3, "resume with data.batch_size = 2"), (tasks[:1], 2, "task 't1'")):
        loaded, _, _ = book(0)
        loaded.load_state_dict(state)
        with pytest.raises(CheckpointError, match=told):
            loaded.reissue(RolloutQueue[str](per_update=per_update), known)
