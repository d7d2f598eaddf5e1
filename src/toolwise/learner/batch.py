"""A batch of rollouts for the learner: rows of tokens, plus flat columns with one entry per sampled token.

All columns share one order: sampled tokens row by row, which is also step by step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from toolwise.advantages.assign import sampled_tokens
from toolwise.config.schema import ActorConfig
from toolwise.errors import ToolwiseError
from toolwise.learner.forward import can_share_prefixes, prefers_node_layout
from toolwise.learner.packing import Packed, micro_batches
from toolwise.learner.router_columns import RouterColumns, router_columns
from toolwise.learner.rows import Row, build_rows
from toolwise.learner.sharding import equal_passes
from toolwise.types import AnnotatedRollout, CreditedRollout, ScoredRollout, StepData

if TYPE_CHECKING:
    from toolwise.types import Floats


@dataclass(frozen=True, slots=True)
class Batch:
    """Columns are [tokens]; None where the rollouts do not have that field."""

    rows: list[Row]
    rollout_ids: list[str]
    rollout_of_row: list[int]
    group_of_rollout: list[str]
    row: Tensor
    step: Tensor
    """Index of the token's step, counted over the whole batch."""
    rollout: Tensor
    first: Tensor
    """Whether the token is the first of its step."""
    has_context: Tensor
    """Whether another token precedes it in its row."""
    version: Tensor
    """Version of the policy that sampled it; −1 if unknown."""
    advantages: Tensor
    rollout_logprobs: Tensor
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    values: Tensor | None
    returns: Tensor | None
    sampled_index: Tensor
    """For each position of the concatenated rows: the index of the sampled token there."""
    row_starts: Tensor
    """Offset of each row in `sampled_index`."""
    router: RouterColumns | None = None
    """None unless the router learns from every rollout."""

    def __len__(self) -> int:
        return len(self.row)

    @property
    def device(self) -> torch.device:
        return self.row.device

    def trainable_rows(self) -> list[int]:
        """Rows with a token to learn from, i.e. a sampled token that has a predecessor."""
        return [index for index, row in enumerate(self.rows) if row.sampled[1:].any()]

    def predicted_tokens(self, rows: Sequence[int]) -> Tensor:
        """Indices of the tokens predicted in these rows. A row's first token has no context and is left out."""
        chosen = torch.zeros(len(self.rows), dtype=torch.bool, device=self.device)
        chosen[list(rows)] = True
        return torch.nonzero(chosen[self.row] & self.has_context).squeeze(-1)

    def lengths(self, rows: Sequence[int]) -> list[int]:
        return [len(self.rows[index]) for index in rows]

    def packed(
        self, rows: Sequence[int], model: Any, config: ActorConfig, max_tokens: int | None = None
    ) -> Iterator[tuple[Packed, Tensor | None]]:
        """Yield micro-batches of these rows for `model`, each with the column indices of its sampled tokens.
        `max_tokens` takes the place of `actor.micro_batch_tokens`. None in place of the indices: a filler, whose pass
        must be run and must add nothing (`sharding.equal_passes`)."""
        parts = self._packed(rows, model, config, max_tokens)
        for (part, columns), is_filler in equal_passes(model, parts, partial(self._filler, model, config)):
            yield part, None if is_filler else columns

    def _filler(self, model: Any, config: ActorConfig) -> tuple[Packed, Tensor]:
        row = Row("", np.zeros(2, np.int64), np.array([False, True]))
        [part] = micro_batches([row], config.pass_tokens, device=self.device, nodes=prefers_node_layout(model))
        return part, torch.zeros(1, dtype=torch.long, device=self.device)

    def _packed(
        self, rows: Sequence[int], model: Any, config: ActorConfig, max_tokens: int | None
    ) -> Iterator[tuple[Packed, Tensor]]:
        if not rows:
            return
        chosen = torch.tensor(list(rows), device=self.device)
        parts = micro_batches(
            [self.rows[index] for index in rows],
            max_tokens or config.pass_tokens,
            # On padded rows, shared prefixes would exceed the budget.
            share_prefixes=config.share_prefixes and can_share_prefixes(model),
            device=self.device,
            nodes=prefers_node_layout(model),
        )
        for part in parts:
            yield part, self.sampled_index[self.row_starts[chosen[part.row]] + part.at]

    def per_step(self, column: Tensor, steps: Sequence[Sequence[StepData]]) -> list[tuple[Floats, ...]]:
        """Split a column into one array per step, for each rollout."""
        flat, offset = column.float().cpu().numpy(), 0
        rollouts = []
        for rollout_steps in steps:
            ends = offset + np.cumsum([0, *(sampled_tokens(step) for step in rollout_steps)])
            rollouts.append(tuple(flat[begin:end] for begin, end in pairwise(ends)))
            offset = int(ends[-1])
        return rollouts


def with_zero_advantages(scored: Sequence[ScoredRollout]) -> list[CreditedRollout]:
    """Wrap scored rollouts so that rows can be built from them."""
    return [
        CreditedRollout(
            AnnotatedRollout(s), s.steps, tuple(np.zeros(sampled_tokens(step), np.float32) for step in s.steps)
        )
        for s in scored
    ]


def build_batch(credited: Sequence[CreditedRollout], device: Any = "cpu") -> Batch:
    """Build rows and columns. An optional column is None unless every rollout has it."""
    rows_of = [build_rows([rollout]) for rollout in credited]
    rows = [row for rollout_rows in rows_of for row in rollout_rows]
    steps = [step for rollout in credited for step in rollout.steps]
    counts = np.array([sampled_tokens(step) for step in steps], dtype=np.int64)
    rollout_of_token = np.repeat(
        [i for i, rollout in enumerate(credited) for _ in rollout.steps] or [0], counts if steps else 0
    )
    sampled = np.concatenate([row.sampled for row in rows]) if rows else np.zeros(0, bool)
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    row_starts = np.cumsum(lengths) - lengths
    positions = np.arange(lengths.sum()) - np.repeat(row_starts, lengths)

    def to_tensor(values: Any, dtype: torch.dtype = torch.long) -> Tensor:
        return torch.as_tensor(np.ascontiguousarray(values)).to(device=device, dtype=dtype)

    def column(name: str, arrays: Sequence[Any]) -> Tensor | None:
        if any(array is None for array in arrays):
            return None
        return to_tensor(_concatenate_column(name, credited, arrays), torch.float32)

    annotated = [rollout.annotated for rollout in credited]
    starts = np.concatenate([np.arange(count) == 0 for count in counts]) if len(counts) else np.zeros(0, bool)
    return Batch(
        rows=rows,
        rollout_ids=[rollout.rollout.rollout_id for rollout in credited],
        rollout_of_row=[index for index, rollout_rows in enumerate(rows_of) for _ in rollout_rows],
        group_of_rollout=[rollout.rollout.group_id for rollout in credited],
        row=to_tensor(np.repeat(np.arange(len(rows)), lengths)[sampled]),
        step=to_tensor(np.repeat(np.arange(len(steps)), counts)),
        rollout=to_tensor(rollout_of_token),
        first=to_tensor(starts, torch.bool),
        has_context=to_tensor(positions[sampled] > 0, torch.bool),
        version=to_tensor(np.concatenate([token_versions(step) for step in steps]) if steps else np.zeros(0)),
        advantages=to_tensor(
            _concatenate_column("advantages", credited, [r.advantages for r in credited]), torch.float32
        ),
        rollout_logprobs=to_tensor(_rollout_logprobs(steps), torch.float32),
        old_logprobs=column("old log-probs", [a.old_logprobs for a in annotated]),
        ref_logprobs=column("reference log-probs", [a.ref_logprobs for a in annotated]),
        values=column("values", [a.values for a in annotated]),
        returns=column("returns", [r.returns for r in credited]),
        sampled_index=to_tensor(np.cumsum(sampled) - 1),
        row_starts=to_tensor(row_starts),
        router=router_columns(credited, rollout_of_token, np.repeat(np.arange(len(steps)), counts), device),
    )


def token_versions(step: StepData) -> Any:
    """Version of the weights that sampled each token of a step; −1 if unknown."""
    tokens = step.tokens
    if tokens.token_versions is not None:
        return np.asarray(tokens.token_versions, dtype=np.int64)
    return np.full(sampled_tokens(step), -1 if tokens.policy_version is None else tokens.policy_version, dtype=np.int64)


def _rollout_logprobs(steps: Sequence[StepData]) -> Any:
    parts = [np.asarray(step.tokens.logprobs, dtype=np.float32) for step in steps]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def _concatenate_column(name: str, credited: Sequence[CreditedRollout], arrays: Sequence[Any]) -> Any:
    """Concatenate into one flat array. Lengths are checked: an off-by-one would shift every later token."""
    for rollout, per_step in zip(credited, arrays, strict=True):
        for step, array in zip(rollout.steps, per_step, strict=True):
            if len(array) != sampled_tokens(step):
                raise ToolwiseError(
                    f"rollout {rollout.rollout.rollout_id}, step {step.system_step_index}: {len(array)} {name} for "
                    f"{sampled_tokens(step)} sampled tokens; there must be one per token"
                )
    parts = [np.asarray(array, dtype=np.float32) for per_step in arrays for array in per_step]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)
