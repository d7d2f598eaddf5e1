"""Attention over packed rows, against a mask written out in full."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from toolwise.errors import ModelError
from toolwise.learner import packed_attention
from toolwise.learner.packed_attention import ATTENTION_NAME, QUERY_CHUNK, Layout, attend
from toolwise.learner.row_trees import Segment
from toolwise.models.weight_sharing import register_attention

torch.set_num_threads(1)
MODULE = torch.nn.Identity()
FORK = [Segment(0, 5), Segment(5, 7, ((0, 3),)), Segment(7, 8, ((0, 3), (5, 6))), Segment(8, 12)]


def states(tokens: int, heads: int = 4, key_heads: int = 2, size: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return [
        torch.randn(1, h, tokens, size, generator=generator, dtype=torch.float64).requires_grad_()
        for h in (heads, key_heads, key_heads)
    ]


def written_out(
    query: Tensor, key: Tensor, value: Tensor, segments: Sequence[Segment], window: int | None, softcap: float | None
) -> Tensor:
    """A full mask over all pairs."""
    tokens = query.shape[2]
    seen = torch.zeros(tokens, tokens, dtype=torch.bool)
    for segment in segments:
        path = [place for start, stop in segment.path for place in range(start, stop)]
        for place in range(segment.start, segment.stop):
            before = [*path, *range(segment.start, place + 1)]
            seen[place, before[-window:] if window else before] = True
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-1, -2) * 0.3
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
    return (weights @ value).transpose(1, 2)


def gradients(out: Tensor, given: Sequence[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return list(torch.autograd.grad((out * weights).sum(), given))


@st.composite
def trees(draw: st.DrawFn) -> list[Segment]:
    """Segments as packing lays them out: each continues a prefix of the one before it."""
    segments: list[Segment] = []
    spans: list[tuple[int, int]] = []
    total = 0
    for _ in range(draw(st.integers(1, 6))):
        left = draw(st.integers(0, sum(stop - start for start, stop in spans)))
        path = []
        for start, stop in spans:
            if left:
                path.append((start, start + min(left, stop - start)))
                left -= min(left, stop - start)
        length = draw(st.integers(1, 6))
        segments.append(Segment(total, total + length, tuple(path)))
        spans = [*path, (total, total + length)]
        total += length
    return segments


@settings(max_examples=60, deadline=None)
@given(
    segments=trees(),
    key_heads=st.sampled_from([1, 2, 4]),
    window=st.sampled_from([None, 1, 3]),
    softcap=st.sampled_from([None, 1.5]),
    keep=st.booleans(),
)
def test_each_token_sees_its_path_and_earlier_tokens_of_its_segment(
    segments: list[Segment], key_heads: int, window: int | None, softcap: float | None, keep: bool
) -> None:
    given = states(segments[-1].stop, key_heads=key_heads)
    layout = Layout.of(segments, "cpu", keep_gathered=keep)
    options: dict[str, Any] = {"sliding_window": window, "softcap": softcap, "scaling": 0.3}
    ours, _ = attend(MODULE, *given, None, toolwise_layout=layout, **options)
    theirs = written_out(*given, segments, window, softcap)
    # The weights of a softmax under a softcap are in fp32 on our side, as they are in transformers.
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    for a, b in zip(gradients(ours, given), gradients(theirs, given), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_segments_longer_than_a_mask_are_split() -> None:
    segments = [Segment(0, 20), Segment(20, 20 + 2 * QUERY_CHUNK + 7, ((0, 15),))]
    given = states(segments[-1].stop, heads=1, key_heads=1, size=4)
    layout = Layout.of(segments, "cpu")
    ours, _ = attend(MODULE, *given, None, toolwise_layout=layout, scaling=0.3)
    theirs = written_out(*given, segments, None, None)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(gradients(ours, given), gradients(theirs, given), strict=True):
        torch.testing.assert_close(a, b)
    assert all(mask.shape[0] == QUERY_CHUNK for mask in layout._masks.values())


def test_rows_that_share_nothing_are_not_gathered_and_have_no_mask() -> None:
    layout = Layout.of([Segment(0, 3), Segment(3, 8)], "cpu")
    attend(MODULE, *states(8), None, toolwise_layout=layout)
    assert layout.gather_index is None
    assert not layout._masks


@pytest.mark.parametrize("keep", [False, True])
def test_gathered_keys_are_kept_for_the_backward_pass_only_when_asked(
    keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, gathered = packed_attention.embedding, []

    def watched(*given: Any) -> Tensor:
        found = real(*given)
        gathered.append(weakref.ref(found.untyped_storage()))
        return found

    monkeypatch.setattr(packed_attention, "embedding", watched)
    given = states(12)
    out, _ = attend(MODULE, *given, None, toolwise_layout=Layout.of(FORK, "cpu", keep_gathered=keep))
    gc.collect()
    assert len(gathered) == 2
    assert all((storage() is not None) == keep for storage in gathered)
    assert all(gradient.isfinite().all() for gradient in gradients(out, given))


def test_unsupported_attention_features_are_rejected() -> None:
    layout = Layout.of(FORK, "cpu")
    with pytest.raises(ModelError, match="Identity"):
        attend(MODULE, *states(12), None, toolwise_layout=layout, position_bias=torch.zeros(4))
    with pytest.raises(ModelError, match="Identity"):
        attend(MODULE, *states(12), None)


def test_transformers_makes_no_mask_for_it() -> None:
    from transformers import LlamaConfig
    from transformers.masking_utils import create_causal_mask

    config = LlamaConfig(attn_implementation=register_attention(ATTENTION_NAME, attend))
    mask = create_causal_mask(
        config=config,
        inputs_embeds=torch.zeros(1, 6, 8),
        attention_mask=None,
        past_key_values=None,
        position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]),
    )
    assert mask is None


def test_under_autocast_all_of_attention_is_in_one_precision() -> None:
    query, key, value = states(3)
    with torch.autocast("cpu", torch.bfloat16):
        found = packed_attention._to_common_dtype(query, key, value.bfloat16())
    assert {s.dtype for s in found} == {torch.bfloat16}
    mixed = packed_attention._to_common_dtype(query, key, value.float())
    assert {s.dtype for s in mixed} == {torch.float32}


def kernel_of_torch_2_11(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """What the flash kernel on a GPU documents: causal with the last query at the last key, `window_size` (W, 0)
    showing a query W keys before its own."""
    outs = []
    (q_ends, k_ends), (left, right) = (cu_seq_q.tolist(), cu_seq_k.tolist()), window_size
    assert right == 0
    for n in range(len(q_ends) - 1):
        q, k, v = query[q_ends[n] : q_ends[n + 1]], *(s[k_ends[n] : k_ends[n + 1]] for s in (key, value))
        assert len(q) <= max_q
        assert len(k) <= max_k
        distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
        seen = (distance >= 0) & ((distance <= left) | (left < 0))
        k, v = (s.repeat_interleave(q.shape[1] // s.shape[1], 1) for s in (k, v))
        scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(~seen, -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(outs)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("takes_gqa", [False, True])
def test_the_kernel_is_called_with_the_segments_layout(
    window: int | None, takes_gqa: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(*given: Any, enable_gqa: bool = False, **options: Any) -> Tensor:
        assert enable_gqa == takes_gqa
        return kernel_of_torch_2_11(*given, **options)

    options = frozenset({"scale", "window_size", *(["enable_gqa"] if takes_gqa else [])})
    monkeypatch.setattr(packed_attention, "_varlen", lambda: (kernel, options))
    monkeypatch.setattr(packed_attention, "_fits_kernel", lambda *_: True)
    given = states(12)
    ours, _ = attend(MODULE, *given, None, toolwise_layout=Layout.of(FORK, "cpu"), scaling=0.3, sliding_window=window)
    theirs = written_out(*given, FORK, window, None)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(gradients(ours, given), gradients(theirs, given), strict=True):
        torch.testing.assert_close(a, b)


def test_this_torch_has_the_varlen_kernel() -> None:
    assert packed_attention._varlen() is not None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 3])
def test_on_a_gpu_the_kernel_gives_what_a_full_mask_gives(window: int | None) -> None:
    given = [s.detach().to("cuda", torch.bfloat16).requires_grad_() for s in states(12)]
    ours, _ = attend(MODULE, *given, None, toolwise_layout=Layout.of(FORK, "cuda"), scaling=0.3, sliding_window=window)
    exact = states(12)
    theirs = written_out(*exact, FORK, window, None)
    torch.testing.assert_close(ours.double().cpu(), theirs, atol=0.05, rtol=0.05)
    weights = torch.linspace(-1, 1, ours.numel(), dtype=torch.bfloat16, device="cuda").view_as(ours)
    for a, b in zip(torch.autograd.grad((ours * weights).sum(), given), gradients(theirs, exact), strict=True):
        torch.testing.assert_close(a.double().cpu(), b, atol=0.1, rtol=0.1)
