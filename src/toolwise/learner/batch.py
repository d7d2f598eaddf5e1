"""Rollouts as the learner sees them: rows of tokens, and beside them flat columns over all sampled tokens.

The sampled tokens of all rows, row after row, are those of all steps, step after step: one order for every column.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from toolwise.errors import ToolwiseError
from toolwise.learner.packing import Packed, micro_batches
from toolwise.learner.rows import Row, build_rows
from toolwise.types import AnnotatedRollout, CreditedRollout, ScoredRollout, StepData

if TYPE_CHECKING:
    from toolwise.types import Floats


@dataclass(frozen=True, slots=True)
class MicroBatchSettings:
    """How rows are cut into what is computed at a time: it changes speed and memory, never a result."""

    max_tokens: int = 16_384
    share_prefixes: bool = True
    chunk_tokens: int | None = None
    """Whose logits exist at a time; None leaves it to the device."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Columns are [tokens]; `None` where nobody gave such a thing."""

    rows: list[Row]
    rollout_ids: list[str]
    """Rollout ids, by rollout."""
    rollout_of_row: list[int]
    group_of_rollout: list[str]
    row: Tensor
    step: Tensor
    """The number of the token's step, counted through the whole batch."""
    rollout: Tensor
    first: Tensor
    """Whether it is the first token of its step."""
    has_context: Tensor
    """Whether something stands before it in its row."""
    version: Tensor
    """Of the policy that drew it; −1 where it did not say."""
    advantages: Tensor
    rollout_logprobs: Tensor
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    values: Tensor | None
    returns: Tensor | None
    sampled_index: Tensor
    """For each position of each row, end to end: which sampled token stands there."""
    row_starts: Tensor
    """Where each row begins in `sampled_index`."""

    def __len__(self) -> int:
        return len(self.row)

    @property
    def device(self) -> torch.device:
        return self.row.device

    def trainable_rows(self) -> list[int]:
        """Rows with a token to learn: one that something stands before."""
        return [number for number, row in enumerate(self.rows) if any(row.sampled[1:])]

    def predicted_tokens(self, rows: Sequence[int]) -> Tensor:
        """Which tokens are predicted in these rows. The first of a row never is: nothing stands before it."""
        chosen = torch.zeros(len(self.rows), dtype=torch.bool, device=self.device)
        chosen[list(rows)] = True
        return torch.nonzero(chosen[self.row] & self.has_context).squeeze(-1)

    def packed(
        self, rows: Sequence[int], micro_batch: MicroBatchSettings, *, nodes: bool = False
    ) -> Iterator[tuple[Packed, Tensor]]:
        """These rows in micro-batches, each with the places that its sampled tokens have in the columns."""
        if not rows:
            return
        chosen = torch.tensor(list(rows), device=self.device)
        parts = micro_batches(
            [self.rows[number] for number in rows],
            micro_batch.max_tokens,
            share_prefixes=micro_batch.share_prefixes,
            device=self.device,
            nodes=nodes,
        )
        for part in parts:
            yield part, self.sampled_index[self.row_starts[chosen[part.row]] + part.at]

    def per_step(self, column: Tensor, steps: Sequence[Sequence[StepData]]) -> list[tuple[Floats, ...]]:
        """A column cut up again, one array a step, for each rollout."""
        flat, at = column.float().cpu().numpy(), 0
        found = []
        for of_rollout in steps:
            ends = at + np.cumsum([0, *(_count(step) for step in of_rollout)])
            found.append(tuple(flat[begin:end] for begin, end in pairwise(ends)))
            at = int(ends[-1])
        return found


def with_zero_advantages(scored: Sequence[ScoredRollout]) -> list[CreditedRollout]:
    """Scored rollouts in the form that rows are built from."""
    return [
        CreditedRollout(AnnotatedRollout(s), s.steps, tuple(np.zeros(_count(step), np.float32) for step in s.steps))
        for s in scored
    ]


def build_batch(credited: Sequence[CreditedRollout], device: Any = "cpu") -> Batch:
    """All columns that every rollout has."""
    rows_of = [build_rows([rollout]) for rollout in credited]
    rows = [row for found in rows_of for row in found]
    steps = [step for rollout in credited for step in rollout.steps]
    counts = np.array([_count(step) for step in steps], dtype=np.int64)
    of_step = np.repeat([i for i, rollout in enumerate(credited) for _ in rollout.steps] or [0], counts if steps else 0)
    sampled = np.concatenate([np.array(row.sampled, dtype=bool) for row in rows]) if rows else np.zeros(0, bool)
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    row_starts = np.cumsum(lengths) - lengths
    positions = np.arange(lengths.sum()) - np.repeat(row_starts, lengths)

    def place(values: Any, dtype: torch.dtype = torch.long) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(values)).to(device=device, dtype=dtype)

    def column(name: str, arrays: Sequence[Any]) -> Tensor | None:
        return place(_concatenate_column(name, credited, arrays), torch.float32) if _all_present(arrays) else None

    annotated = [rollout.annotated for rollout in credited]
    starts = np.concatenate([np.arange(count) == 0 for count in counts]) if len(counts) else np.zeros(0, bool)
    return Batch(
        rows=rows,
        rollout_ids=[rollout.rollout.rollout_id for rollout in credited],
        rollout_of_row=[number for number, found in enumerate(rows_of) for _ in found],
        group_of_rollout=[rollout.rollout.group_id for rollout in credited],
        row=place(np.repeat(np.arange(len(rows)), lengths)[sampled]),
        step=place(np.repeat(np.arange(len(steps)), counts)),
        rollout=place(of_step),
        first=place(starts, torch.bool),
        has_context=place(positions[sampled] > 0, torch.bool),
        version=place(np.repeat([_version(step) for step in steps], counts) if steps else np.zeros(0)),
        advantages=place(_concatenate_column("advantages", credited, [r.advantages for r in credited]), torch.float32),
        rollout_logprobs=place(_rollout_logprobs(steps), torch.float32),
        old_logprobs=column("old log-probs", [a.old_logprobs for a in annotated]),
        ref_logprobs=column("reference log-probs", [a.ref_logprobs for a in annotated]),
        values=column("values", [a.values for a in annotated]),
        returns=column("returns", [r.returns for r in credited]),
        sampled_index=place(np.cumsum(sampled) - 1),
        row_starts=place(row_starts),
    )


def _count(step: StepData) -> int:
    return len((step.policy_logprobs or {}).get("token_ids", ()))


def _version(step: StepData) -> int:
    found = (step.policy_logprobs or {}).get("policy_version")
    return -1 if found is None else int(found)


def _rollout_logprobs(steps: Sequence[StepData]) -> Any:
    parts = [np.asarray(step.policy_logprobs["logprobs"], dtype=np.float32) for step in steps if step.policy_logprobs]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def _all_present(arrays: Sequence[Any]) -> bool:
    return all(array is not None for array in arrays)


def _concatenate_column(name: str, credited: Sequence[CreditedRollout], arrays: Sequence[Any]) -> Any:
    """One flat array, checked: a column that is off by one would teach every later token something else."""
    for rollout, of_rollout in zip(credited, arrays, strict=True):
        for step, array in zip(rollout.steps, of_rollout, strict=True):
            if len(array) != _count(step):
                raise ToolwiseError(
                    f"rollout {rollout.rollout.rollout_id}, step {step.system_step_index}: {len(array)} {name} for "
                    f"{_count(step)} sampled tokens; give one for each"
                )
    parts = [np.asarray(array, dtype=np.float32) for of_rollout in arrays for array in of_rollout]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)
