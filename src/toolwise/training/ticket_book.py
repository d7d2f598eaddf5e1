"""The batches of tasks whose groups have not been learned from in asynchronous training: what a checkpoint must hold so
that a resumed run learns from each of them once. Finished groups are stored; the others are rolled out again, with the
same seeds."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolwise.data.task_set import find_tasks
from toolwise.errors import CheckpointError
from toolwise.rollout.queue import RolloutQueue, Ticket
from toolwise.training.stored_groups import FinishedPrompt, pack_group, unpack_group
from toolwise.types import Task

log = logging.getLogger("toolwise.training.checkpoint")


@dataclass(eq=False, slots=True)
class OpenBatch:
    """Tasks drawn together, some of whose groups have not been learned from."""

    step: int
    label: str
    """With `step`, what the router derives seeds and group ids from."""
    tasks: list[Task]
    tickets: dict[int, Ticket]
    """Index of the task -> ticket; without those that have been learned from."""
    finished: dict[int, FinishedPrompt] = field(default_factory=dict)
    """Index of the task -> its rollouts, in the order in which they were completed."""

    @property
    def unfinished(self) -> dict[int, Ticket]:
        return {index: ticket for index, ticket in self.tickets.items() if index not in self.finished}


@dataclass(eq=False, slots=True)
class TicketBook:
    """Every ticket that was issued and not learned from, with its task."""

    max_staleness: int
    next_step: int = 0
    """The step that the next batch is for, if it is no refill."""
    refills: int = 0
    """Batches drawn since then to replace groups without signal."""
    open: list[OpenBatch] = field(default_factory=list)
    _loaded: list[dict[str, Any]] = field(default_factory=list)
    """Batches of a checkpoint, whose tickets are to be issued again."""
    _per_update: int | None = None

    def draw(self, tasks: Sequence[Task], tickets: Sequence[Ticket], version: int) -> OpenBatch:
        """Enter a batch of as many tasks as tickets. It is for the next step, or if that is too far ahead of `version`
        it replaces groups of the step before it."""
        if self.next_step <= version + self.max_staleness:
            self.next_step, self.refills = self.next_step + 1, 0
        else:
            self.refills += 1
        label = "step" + "-more" * self.refills
        batch = OpenBatch(self.next_step - 1, label, list(tasks), dict(enumerate(tickets)))
        self.open.append(batch)
        return batch

    def finish(self, ticket: Ticket, group: FinishedPrompt) -> None:
        """The group of this ticket is complete."""
        for batch in self.open:
            for index, known in batch.tickets.items():
                if known.number == ticket.number:
                    batch.finished[index] = group

    def close(self, tickets: Sequence[Ticket]) -> None:
        """The groups of these tickets have been learned from, or dropped by the learner."""
        numbers = {ticket.number for ticket in tickets}
        for batch in self.open:
            batch.tickets = {index: t for index, t in batch.tickets.items() if t.number not in numbers}
            batch.finished = {index: group for index, group in batch.finished.items() if index in batch.tickets}
        self.open = [batch for batch in self.open if batch.tickets]

    def reissue(self, queue: RolloutQueue[Any], tasks: Sequence[Task]) -> list[OpenBatch]:
        """Issue the tickets of a loaded checkpoint again, in their order, and return their batches. Groups that were
        complete go to the queue."""
        loaded, self._loaded = self._loaded, []
        by_id = find_tasks(tasks, (task_id for row in loaded for task_id in row["tasks"]))
        if loaded and self._per_update not in (None, queue.per_update):
            raise CheckpointError(
                f"the checkpoint has groups of batches of {self._per_update} under way: resume with data.batch_size = "
                f"{self._per_update}"
            )
        self._per_update = queue.per_update
        batches = [
            OpenBatch(row["step"], row["label"], [_task(by_id, task_id) for task_id in row["tasks"]], {})
            for row in loaded
        ]
        entries = [
            (number, version, batch, index)
            for row, batch in zip(loaded, batches, strict=True)
            for index, number, version in row["tickets"]
        ]
        for _, version, batch, index in sorted(entries, key=lambda entry: entry[0]):
            batch.tickets[index] = queue.reissue(version)
        for row, batch in zip(loaded, batches, strict=True):
            for index, group in row.get("finished", ()):
                known = group if isinstance(group, FinishedPrompt) else _unpacked(group, by_id)
                if known is not None:
                    batch.finished[index] = known
                    queue.put(batch.tickets[index], known)
        self.open = [*batches, *self.open]
        return batches

    def state_dict(self) -> dict[str, Any]:
        batches = self._loaded or [
            {
                "step": batch.step,
                "label": batch.label,
                "tasks": [task.task_id for task in batch.tasks],
                "tickets": [[index, t.number, t.version] for index, t in batch.tickets.items()],
                "finished": [[index, group] for index, group in batch.finished.items()],
            }
            for batch in self.open
        ]
        return {"next_step": self.next_step, "refills": self.refills, "open": batches, "per_update": self._per_update}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Also one whose groups are packed."""
        self.next_step, self.refills = state["next_step"], state["refills"]
        self.open, self._loaded, self._per_update = [], list(state["open"]), state["per_update"]


def packed_state(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a `TicketBook` as checkpoints save it: groups as bytes, without those that cannot be stored."""
    rows = []
    for row in state["open"]:
        groups = [(i, pack_group(g) if isinstance(g, FinishedPrompt) else g) for i, g in row.get("finished", ())]
        rows.append({**row, "finished": [[index, group] for index, group in groups if group is not None]})
    return {**state, "open": rows}


def _unpacked(packed: Any, by_id: Mapping[str, Task]) -> FinishedPrompt | None:
    """None if the group cannot be read, for example because another version has stored it."""
    try:
        return unpack_group(packed, by_id)
    except Exception as fault:
        log.warning("a stored group cannot be read and is rolled out again (%s: %.200s)", type(fault).__name__, fault)
        return None


def _task(by_id: dict[str, Task], task_id: str) -> Task:
    if task_id not in by_id:
        raise CheckpointError(
            f"the checkpoint has rollouts of task {task_id!r} under way, which the data does not have"
        )
    return by_id[task_id]
