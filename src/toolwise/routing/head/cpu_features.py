"""The last hidden state of many prompts on a CPU: the learner's forward pass without what only a gradient needs.

A prefix that prompts share is computed once. Products are oneDNN's, which take less than half of MKL's time on some
processors, prompts of similar length attend in one call, and the last layer computes only the last token of each
prompt. Rounding differs from that of the learner's pass.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class CpuFeatures:
    """The last states of one model's prompts. What the model consists of is looked up once; its weights may change."""

    def __init__(self, model: Any) -> None:
        self.problem = cpu_features_problem(model, 0)
        self.longest = max_context(model.get_decoder().config)
        self._decoder = None if self.problem is not None else describe_decoder(model)

    def reads(self, prompts: Sequence[Sequence[int]]) -> bool:
        """Whether it can read these prompts: otherwise they need the learner's pass."""
        return self._decoder is not None and max(map(len, prompts)) <= self.longest

    def read(self, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> Tensor:
        assert self._decoder is not None, self.problem
        return _last_states(self._decoder, prompts, max_tokens)


def last_states(model: Any, prompts: Sequence[Sequence[int]], *, max_tokens: int) -> Tensor:
    """[prompts, width], with the weights that the model has now. Where a pass has more than `max_tokens`, prompts are
    read in halves."""
    return _last_states(describe_decoder(model), prompts, max_tokens)


@torch.inference_mode()
def _last_states(decoder: Decoder, prompts: Sequence[Sequence[int]], max_tokens: int) -> Tensor:
    # Equal prompts once: the last layer must not have more rows than there are tokens.
    place = {prompt: i for i, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    rows = [np.array(prompt, dtype=np.int64) for prompt in place]
    # In lexicographic order each row shares the most with the one before it; big-endian bytes compare in one call.
    order = sorted(range(len(rows)), key=lambda i: rows[i].astype(">i8").tobytes())
    shared = [0, *(common_prefix_length(rows[a], rows[b]) for a, b in pairwise(order))]
    states = _in_halves(decoder, [rows[i] for i in order], shared, max_tokens)
    in_order = np.argsort(order)
    return states[torch.from_numpy(in_order[[place[tuple(prompt)] for prompt in prompts]])]


def _in_halves(decoder: Decoder, rows: Sequence[Array], shared: Sequence[int], max_tokens: int) -> Tensor:
    if len(rows) == 1 or sum(map(len, rows)) - sum(shared) <= max_tokens:
        return _states(decoder, layout_by_row(rows, shared))
    half = len(rows) // 2
    parts = (rows[:half], shared[:half]), (rows[half:], [0, *shared[half + 1 :]])
    return torch.cat([_in_halves(decoder, *part, max_tokens) for part in parts])


def _states(decoder: Decoder, tree: FlatTree) -> Tensor:
    """The state of each row's last token, in the order of the tree."""
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
    contexts = [_context(decoder, chunks, len(tokens)) for chunks in (new, last)]

    def attend(number: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        layer = decoder.layers[number].attention
        cache = [torch.empty(states.shape).unsqueeze(1) for states in (key, value)]
        formula = Formula(scale, layer.window, layer.softcap)
        context = contexts[number == len(decoder.layers) - 1]
        return attend_in_groups(query, key, value, cache[0], cache[1], context, formula).flatten(1)

    products = OneDnnProjections() if len(tokens) >= MIN_ONEDNN_TOKENS else None
    ropes = ropes_at(decoder, torch.from_numpy(tree.positions[tokens])[None])
    needed = torch.tensor([table[-1] for table in last_tables])
    states = CpuForward(decoder, products).forward(torch.from_numpy(tree.ids[tokens]), ropes, attend, needed=needed)
    return states[torch.from_numpy(np.argsort(last_order))]


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
