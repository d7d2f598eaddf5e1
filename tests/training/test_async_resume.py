"""Asynchronous runs from the command line: checkpoints hold what is under way, and a resumed run learns from each group
once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from async_cases import async_run, train

from toolwise.errors import CheckpointError
from toolwise.messages import Message
from toolwise.rollout.queue import RolloutQueue, Ticket
from toolwise.training.ticket_book import TicketBook
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
