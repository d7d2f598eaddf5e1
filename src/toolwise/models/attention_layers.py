"""How each layer of a decoder attends, found by running the model on a few tokens.

A model can run over our caches if every layer attends through transformers' attention interface, causally or within a
sliding window, and if nothing else in it depends on the other tokens of a row. No list of architectures says so: the
layers are asked what they pass to the attention function, the masks that they would use are read from the functions
that transformers builds them from, and a short text in two chunks, with another text in the same rows, must give the
hidden states of the model's own forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from toolwise.models.attention_probe import (
    LENGTHS,
    UnsupportedAttentionError,
    inference_copy,
    probe_text,
    record_layers,
    run_in_chunks,
)
from toolwise.models.dense_attention import AttentionLayer
from toolwise.models.logits import logits_head

MAX_ERROR = {torch.float64: 1e-4, torch.float32: 2e-3}
"""Largest relative error of a token's hidden state; attention in another order gives some 1e-6 in fp32."""
MAX_MEDIAN_ERROR = 0.1
"""The same in half precision, for the median token: a few tokens may be routed to other experts."""


@dataclass(frozen=True)
class AttentionReport:
    layers: tuple[AttentionLayer, ...] = ()
    problem: str | None = None
    """Why the layers cannot run over our caches, in a few words; None if they can."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(layer.window for layer in self.layers)


_REPORTS: Any = WeakIdKeyDictionary()
"""Reports by the first parameter of a decoder, which is the same object in all copies that share its weights."""


def attention_layers(model: Any) -> AttentionReport:
    """The layers of the model, or why they cannot run over our caches. The model runs a few tokens the first time."""
    try:
        trunk = model.get_decoder()
        first = next(trunk.parameters())
    except (AttributeError, NotImplementedError, TypeError, StopIteration):
        return AttentionReport(problem="it has no decoder (get_decoder)")
    known: AttentionReport | None = _REPORTS.get(first)
    if known is not None:
        return known
    try:
        # In the precision of the weights: a caller's autocast would round more than the tolerance allows.
        with torch.no_grad(), torch.autocast(first.device.type, enabled=False):
            report = AttentionReport(_probe(trunk))
    except UnsupportedAttentionError as problem:
        report = AttentionReport(problem=str(problem))
    except Exception as fault:  # model code that expects something else
        line = (str(fault).splitlines() or [""])[0]
        report = AttentionReport(problem=f"its forward pass fails with our attention ({type(fault).__name__}: {line})")
    _REPORTS[first] = report
    return report


_HEADS: Any = WeakIdKeyDictionary()


def head_problem(model: Any) -> str | None:
    """How the model's logits differ from those of `logits_head`, which engine and learner use; None if they do not.

    Some families scale or cap their logits in the forward pass. One that does so in a way that we do not know must not
    be trained on other numbers.
    """
    first = next(model.parameters())
    if first not in _HEADS:
        copied = inference_copy(model)
        ids = torch.tensor([probe_text(model.get_decoder().config, 0)], device=first.device)
        with torch.no_grad(), torch.autocast(ids.device.type, enabled=False):
            states = copied.get_decoder()(input_ids=ids, use_cache=False)
            if hasattr(states, "last_hidden_state"):
                found = logits_head(copied)(states.last_hidden_state[0])
                difference = state_difference(found, copied(input_ids=ids, use_cache=False).logits[0])
            else:
                difference = "get_decoder() is not the part below its head"
        _HEADS[first] = difference
    problem: str | None = _HEADS[first]
    return problem


def adopt_reports(model: Any, first: Any) -> None:
    """What was found about the model when `first` was its first parameter still holds: its values are the same."""
    for reports, parameter in ((_REPORTS, next(model.get_decoder().parameters())), (_HEADS, next(model.parameters()))):
        if first in reports:
            reports[parameter] = reports[first]


def _probe(trunk: Any) -> tuple[AttentionLayer, ...]:
    if getattr(trunk.config, "is_encoder_decoder", False):
        raise UnsupportedAttentionError("it is an encoder-decoder")
    _check_cache(trunk.config)
    device = next(trunk.parameters()).device
    texts = [probe_text(trunk.config, number) for number in range(len(LENGTHS))]
    layers = record_layers(trunk, texts[0], device)
    stock = inference_copy(trunk)
    expected = [
        stock(input_ids=torch.tensor([text], device=device), use_cache=False).last_hidden_state[0] for text in texts
    ]
    found = run_in_chunks(trunk, layers, texts, device)
    check_states(torch.cat(found), torch.cat(expected), "with its keys and values cached")
    return layers


def _check_cache(config: Any) -> None:
    """Raise if transformers itself would cache more than keys and values for the model: the states of a recurrence, or
    an index of the keys that a query selects, which a short text does not show."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    others = {type(layer).__name__ for layer in DynamicCache(config=config).layers if type(layer) not in plain}
    if others:
        raise UnsupportedAttentionError(f"it caches more than keys and values ({', '.join(sorted(others))})")


def check_states(found: Tensor, expected: Tensor, how: str) -> None:
    """Raise if the hidden states [tokens, width] differ by more than rounding."""
    problem = state_difference(found, expected)
    if problem is not None:
        raise UnsupportedAttentionError(f"{how}, its hidden states are others ({problem})")


def state_difference(found: Tensor, expected: Tensor) -> str | None:
    """How far the hidden states [tokens, width] differ if that is more than rounding, or None."""
    dtype = expected.dtype
    found, expected = found.detach().double(), expected.detach().double()
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
    error = float(errors.max() if dtype in MAX_ERROR else errors.median())
    return None if error <= MAX_ERROR.get(dtype, MAX_MEDIAN_ERROR) else f"relative error {error:.1g}"
