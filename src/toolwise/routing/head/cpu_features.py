"""The last hidden state of many prompts on a CPU: the learner's forward pass without what only a gradient needs.

A prefix that prompts share is computed once. Products are oneDNN's, which take less than half of MKL's time on some
processors, prompts of similar length attend in one call, and the last layer computes only the last token of each
prompt. Rounding differs from that of the learner's pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolwise.engine.cpu_forward import CpuForward, cpu_forward_problem, ropes_at
from toolwise.engine.cpu_packed import OneDnnProjections, onednn_problem
from toolwise.engine.length_groups import MAX_GROUP_KEY_BYTES, chunk_order, group_chunks
from toolwise.engine.paged_attention import Formula, PagedContext, attend_in_groups
from toolwise.learner.packing import common_prefix_length
from toolwise.learner.row_trees import Array, FlatTree, layout_by_row
from toolwise.models.decoder_layers import Decoder, describe_decoder, max_context
from toolwise.models.merged_weights import merged_copy

MIN_ONEDNN_TOKENS = 32
"""oneDNN rearranges the weights in each call, which takes longer than the products of fewer tokens save."""


def cpu_features_problem(model: Any, longest: int) -> str | None:
    """Why the learner's pass is needed for prompts of up to `longest` tokens, in a few words; None if it is not."""
    if longest > max_context(model.get_decoder().config):
        return "its rope has other angles for longer texts"
    if merged_copy(model) is not model:
        return "it has adapters"
    return onednn_problem() or cpu_forward_problem(model)


@dataclass(frozen=True, slots=True)
class _Pass:
    """What a forward pass over some prompts needs besides the weights."""

    ids: Tensor
    positions: Tensor
    contexts: tuple[PagedContext, PagedContext]
    """Of the new tokens, and of the last ones in the last layer."""
    needed: Tensor
    """Places of the last tokens, the prompts in order of their lengths."""
    back: Tensor
    """The place of each prompt in that order."""


@dataclass(frozen=True, slots=True)
class ReadingPlan:
    """How prompts are read; weights play no part in it."""

    passes: Sequence[_Pass]
    order: Tensor
    """The state of each prompt, among those of all passes."""


class CpuFeatures:
    """The last states of one model's prompts. What the model consists of is looked up once; its weights may change."""

    def __init__(self, model: Any) -> None:
        self.problem = cpu_features_problem(model, 0)
        self.longest = max_context(model.get_decoder().config)
        self._decoder = None if self.problem is not None else describe_decoder(model)

    def reads(self, prompts: Sequence[Sequence[int]]) -> bool:
        """Whether it can read these prompts: otherwise they need the learner's pass."""
        return self._decoder is not None and max(map(len, prompts)) <= self.longest

    def plan(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> ReadingPlan:
        """Where a pass has more than `max_tokens`, prompts are read in halves."""
        assert self._decoder is not None, self.problem
        return _plan(self._decoder, prompts, max_tokens)

    def read(self, plan: ReadingPlan) -> Tensor:
        """[prompts, width], with the weights that the model has now."""
        assert self._decoder is not None, self.problem
        return _read(self._decoder, plan)


def last_states(model: Any, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> Tensor:
    """[prompts, width], read once."""
    decoder = describe_decoder(model)
    return _read(decoder, _plan(decoder, prompts, max_tokens))


def _plan(decoder: Decoder, prompts: Sequence[Sequence[int]], max_tokens: int) -> ReadingPlan:
    # Equal prompts once: the last layer must not have more rows than there are tokens.
    place = {prompt: i for i, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    rows = [np.array(prompt, dtype=np.int64) for prompt in place]
    # In lexicographic order each row shares the most with the one before it; big-endian bytes compare in one call.
    order = sorted(range(len(rows)), key=lambda i: rows[i].astype(">i8").tobytes())
    shared = [0, *(common_prefix_length(rows[a], rows[b]) for a, b in pairwise(order))]
    trees = _in_halves([rows[i] for i in order], shared, max_tokens)
    chosen = np.argsort(order)[[place[tuple(prompt)] for prompt in prompts]]
    return ReadingPlan([_plan_pass(decoder, tree) for tree in trees], torch.from_numpy(chosen))


def _in_halves(rows: Sequence[Array], shared: Sequence[int], max_tokens: int) -> list[FlatTree]:
    if len(rows) == 1 or sum(map(len, rows)) - sum(shared) <= max_tokens:
        return [layout_by_row(rows, shared)]
    half = len(rows) // 2
    parts = (rows[:half], shared[:half]), (rows[half:], [0, *shared[half + 1 :]])
    return [tree for part in parts for tree in _in_halves(*part, max_tokens)]


def _plan_pass(decoder: Decoder, tree: FlatTree) -> _Pass:
    rows = tree.row_indices
    row_ending_at = {int(indices[-1]) + 1: indices for indices in reversed(rows)}
    segments = [tree.segments[i] for i in chunk_order([(segment.depth, len(segment)) for segment in tree.segments])]
    tokens = np.concatenate([np.arange(segment.start, segment.stop) for segment in segments])
    place = np.empty(len(tokens), dtype=np.int64)
    place[tokens] = np.arange(len(tokens))
    last_order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    last_tables = [place[rows[row]].tolist() for row in last_order]
    new = [(segment.depth, len(segment), place[row_ending_at[segment.stop]].tolist()) for segment in segments]
    last = [(len(table) - 1, 1, table) for table in last_tables]
    return _Pass(
        ids=torch.from_numpy(tree.ids[tokens]),
        positions=torch.from_numpy(tree.positions[tokens])[None],
        contexts=(_context(decoder, new, len(tokens)), _context(decoder, last, len(tokens))),
        needed=torch.tensor([table[-1] for table in last_tables]),
        back=torch.from_numpy(np.argsort(last_order)),
    )


@torch.inference_mode()
def _read(decoder: Decoder, plan: ReadingPlan) -> Tensor:
    states = [_states(decoder, each) for each in plan.passes]
    return (states[0] if len(states) == 1 else torch.cat(states))[plan.order]


def _states(decoder: Decoder, plan: _Pass) -> Tensor:
    """The state of each row's last token, in the order of the tree."""

    def attend(number: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        layer = decoder.layers[number].attention
        cache = [torch.empty(states.shape).unsqueeze(1) for states in (key, value)]
        formula = Formula(scale, layer.window, layer.softcap)
        context = plan.contexts[number == len(decoder.layers) - 1]
        return attend_in_groups(query, key, value, cache[0], cache[1], context, formula).flatten(1)

    products = OneDnnProjections() if len(plan.ids) >= MIN_ONEDNN_TOKENS else None
    ropes = ropes_at(decoder, plan.positions)
    return CpuForward(decoder, products).forward(plan.ids, ropes, attend, needed=plan.needed)[plan.back]


def _context(decoder: Decoder, chunks: Sequence[tuple[int, int, list[int]]], tokens: int) -> PagedContext:
    """How chunks attend: the number of tokens before each, that of its own, and the places of both."""
    shape = decoder.layers[0].attention
    held, lengths, tables = zip(*chunks, strict=True)
    groups = group_chunks(
        held,
        lengths,
        tables,
        1,
        queries_per_kv_head=shape.heads // shape.key_heads,
        dtype=torch.float32,
        max_keys=MAX_GROUP_KEY_BYTES // (shape.key_heads * shape.key_size * 4),
    )
    return PagedContext([], [], torch.arange(tokens), groups=groups)
