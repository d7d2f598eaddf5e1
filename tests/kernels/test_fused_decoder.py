"""The fused decoder computes what the stock forward computes, on the model's own parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, FAST, build
from transformers import AutoModelForCausalLM

from toolwise.errors import PolicyError
from toolwise.kernels.fused_decoder import FusedDecoder, PagedCache, PrefixGroups, storage_key, unsupported_reason
from toolwise.models.logits import logits_head

BLOCK = 16
NAMES = [name for name, architecture in ARCHITECTURES.items() if architecture.engine == FAST]


def paged(decoder: FusedDecoder, blocks: int) -> PagedCache:
    shape = (blocks, BLOCK, decoder.kv_heads, decoder.dim)
    layers, ropes = range(len(decoder.layers)), decoder.rope_tables(64)
    return PagedCache([torch.randn(shape) for _ in layers], [torch.randn(shape) for _ in layers], ropes)


def slot(table: torch.Tensor, position: int) -> int:
    return int(table[position // BLOCK]) * BLOCK + position % BLOCK


def prefill(decoder: FusedDecoder, cache: PagedCache, rows: list[list[int]], tables: torch.Tensor, chunk: int) -> Any:
    """Prefill every prompt in chunks; the hidden state of every token, per row."""
    done = [0] * len(rows)
    hidden: list[list[torch.Tensor]] = [[] for _ in rows]
    while any(d < len(r) for d, r in zip(done, rows, strict=True)):
        upto = [min(d + chunk, len(r)) for d, r in zip(done, rows, strict=True)]
        spans = list(zip(range(len(rows)), done, upto, strict=True))
        ids = torch.tensor([t for r, a, b in spans for t in rows[r][a:b]])
        positions = torch.tensor([p for _, a, b in spans for p in range(a, b)])
        slots = torch.tensor([slot(tables[r], p) for r, a, b in spans for p in range(a, b)])
        starts = torch.tensor([0] + [b - a for _, a, b in spans]).cumsum(0).int()
        out = decoder.forward_prefill(ids, positions, cache, slots, tables, starts, torch.tensor(upto).int(), chunk)
        for r, part in enumerate(out.split([b - a for _, a, b in spans])):
            hidden[r].append(part)
        done = upto
    return [torch.cat(parts) for parts in hidden]


def random_rows(*lengths: int) -> list[list[int]]:
    torch.manual_seed(2)
    return [torch.randint(0, 97, (n,)).tolist() for n in lengths]


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_chunked_prefill_and_decode_give_the_stock_logits(name: str) -> None:
    model = build(name)
    rows = random_rows(3, 40, 17)
    want = [model(input_ids=torch.tensor([row])).logits[0] for row in rows]
    decoder = FusedDecoder(model)
    cache = paged(decoder, 12)
    tables = torch.randperm(12).view(3, 4).int()
    hidden = prefill(decoder, cache, [row[:-1] for row in rows], tables, chunk=7)
    for states, logits in zip(hidden, want, strict=True):
        torch.testing.assert_close(logits_head(model)(states), logits[:-1], atol=1e-4, rtol=1e-4)
    lengths = torch.tensor([len(row) for row in rows])
    slots = torch.tensor([slot(t, len(row) - 1) for t, row in zip(tables, rows, strict=True)])
    ids = torch.tensor([row[-1] for row in rows])
    last = decoder.forward_decode(ids, lengths - 1, cache, slots, tables, lengths.int())
    want_last = torch.stack([logits[-1] for logits in want])
    torch.testing.assert_close(logits_head(model)(last), want_last, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_a_shared_prefix_gives_the_stock_logits(name: str) -> None:
    """With windows too: the first tail is so short that its window begins in the prefix."""
    model = build(name)
    common, *tails = random_rows(32, 1, 5, 20)
    rows = [common + tail for tail in tails]
    want = torch.stack([model(input_ids=torch.tensor([row])).logits[0, -1] for row in rows])
    decoder = FusedDecoder(model)
    cache = paged(decoder, 8)
    tables = torch.tensor([[0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 6, 7]]).int()
    prefill(decoder, cache, [row[:-1] for row in rows], tables, chunk=64)
    lengths = torch.tensor([len(row) for row in rows])
    slots = torch.tensor([slot(t, len(row) - 1) for t, row in zip(tables, rows, strict=True)])
    shared = PrefixGroups(
        tables[:1, :2], torch.tensor([32]).int(), torch.tensor([0, 3]).int(), torch.arange(3).int(), 3
    )
    last = decoder.forward_decode(
        torch.tensor([row[-1] for row in rows]), lengths - 1, cache, slots, tables[:, 2:], (lengths - 32).int(), shared
    )
    torch.testing.assert_close(logits_head(model)(last), want, atol=1e-4, rtol=1e-4)


def weight_of(decoder: FusedDecoder) -> torch.Tensor:
    """Projections to queries, keys and values in the first layer."""
    found: torch.Tensor = decoder.layers[0].qkv.weight
    return found


def test_the_layout_keeps_values_training_and_saving(tmp_path: Path) -> None:
    model = build("qwen2")
    before = {name: p.clone() for name, p in model.state_dict().items()}
    ids = torch.randint(0, 97, (2, 9))
    with torch.inference_mode():
        decoder = FusedDecoder(model)
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    first = model.model.layers[0]
    joined = torch.cat([first.self_attn.q_proj.weight, first.self_attn.k_proj.weight, first.self_attn.v_proj.weight])
    assert torch.equal(weight_of(decoder), joined), "the decoder must read the updated weights"
    assert not torch.equal(before["model.layers.0.self_attn.q_proj.weight"], first.self_attn.q_proj.weight)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(p, again.state_dict()[name]) for name, p in model.state_dict().items())


def test_a_second_decoder_moves_nothing_and_a_cast_is_noticed() -> None:
    model = build("llama")
    decoder = FusedDecoder(model)
    key = storage_key(model)
    assert weight_of(FusedDecoder(model)).data_ptr() == weight_of(decoder).data_ptr()
    assert storage_key(model) == key
    model.to(torch.float64)
    assert storage_key(model) != key
    assert weight_of(FusedDecoder(model)).dtype == torch.float64


def without_a_bias() -> Any:
    model = build("qwen2")
    model.model.layers[1].self_attn.v_proj.bias = None
    return model


def with_another_norm() -> Any:
    model = build("gemma2")
    model.model.layers[1].post_feedforward_layernorm.eps = 0.1
    return model


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (build("cohere"), "not an RMS norm"),
        (build("llama", head_dim=288), "heads of 288"),
        (without_a_bias(), "bias"),
        (with_another_norm(), "norms are of different kinds"),
    ],
)
def test_other_models_are_refused_in_one_line(model: Any, why: str) -> None:
    reason = unsupported_reason(model)
    assert why in (reason or "")
    with pytest.raises(PolicyError, match="use its stock forward") as caught:
        FusedDecoder(model)
    assert "\n" not in str(caught.value)


@torch.inference_mode()
def test_other_activations_are_computed_by_torch() -> None:
    model = build("llama", hidden_act="relu2")
    [row] = random_rows(20)
    want = model(input_ids=torch.tensor([row])).logits[0]
    decoder = FusedDecoder(model)
    [states] = prefill(decoder, paged(decoder, 2), [row], torch.tensor([[1, 0]]).int(), chunk=20)
    torch.testing.assert_close(logits_head(model)(states), want, atol=1e-4, rtol=1e-4)


def test_a_wrapped_projection_is_refused() -> None:
    model = build("llama")
    model.model.layers[1].mlp.down_proj = torch.nn.Sequential(model.model.layers[1].mlp.down_proj)
    assert "not linear layers" in (unsupported_reason(model) or "")
