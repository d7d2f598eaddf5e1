"""The fused decoder computes what the stock forward computes, on the model's own parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from toolwise.errors import PolicyError
from toolwise.kernels.llama import FusedDecoder, PagedCache, PrefixGroups, storage_key, unsupported_reason

BLOCK = 16
SHAPE: dict[str, Any] = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
    "intermediate_size": 80, "vocab_size": 97, "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip


def build(name: str) -> Any:
    torch.manual_seed(1)
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)).eval()
    if name == "llama-bias":
        return LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)).eval()
    if name == "llama3-rope":
        rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64, "rope_theta": 10000.0}  # fmt: skip
        return LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=rope)).eval()
    if name == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**SHAPE | {"hidden_size": 96})).eval()
    if name == "mistral":
        return MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=None)).eval()
    if name == "smollm3":
        return SmolLM3ForCausalLM(SmolLM3Config(**SHAPE, no_rope_layers=[1, 0], pad_token_id=0)).eval()
    if name == "phi3":
        return Phi3ForCausalLM(Phi3Config(**SHAPE | {"hidden_size": 96}, pad_token_id=0)).eval()
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE)).eval()


def shake(model: Any) -> None:
    """Norms and biases away from ones and zeros, so that omitting one shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += torch.randn_like(parameter) * 0.3


def paged(decoder: FusedDecoder, blocks: int) -> PagedCache:
    shape = (blocks, BLOCK, decoder.kv_heads, decoder.dim)
    cos, sin = decoder.rope_table(256)
    layers = range(len(decoder.layers))
    return PagedCache([torch.randn(shape) for _ in layers], [torch.randn(shape) for _ in layers], cos, sin)


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


@pytest.mark.parametrize("name", ["llama", "llama-bias", "llama3-rope", "qwen2", "qwen3", "mistral", "smollm3", "phi3"])
@torch.inference_mode()
def test_chunked_prefill_and_decode_give_the_stock_logits(name: str) -> None:
    model = build(name)
    shake(model)
    rows = [torch.randint(0, 97, (n,)).tolist() for n in (3, 40, 17)]
    want = [model(input_ids=torch.tensor([row])).logits[0] for row in rows]
    decoder = FusedDecoder(model)
    cache = paged(decoder, 12)
    tables = torch.randperm(12).view(3, 4).int()
    hidden = prefill(decoder, cache, [row[:-1] for row in rows], tables, chunk=7)
    for states, logits in zip(hidden, want, strict=True):
        torch.testing.assert_close(decoder.logits(states), logits[:-1], atol=2e-5, rtol=1e-4)
    lengths = torch.tensor([len(row) for row in rows])
    slots = torch.tensor([slot(t, len(row) - 1) for t, row in zip(tables, rows, strict=True)])
    ids = torch.tensor([row[-1] for row in rows])
    last = decoder.forward_decode(ids, lengths - 1, cache, slots, tables, lengths.int())
    torch.testing.assert_close(decoder.logits(last), torch.stack([logits[-1] for logits in want]), atol=2e-5, rtol=1e-4)


@torch.inference_mode()
def test_a_shared_prefix_gives_the_stock_logits() -> None:
    model = build("qwen3")
    common = torch.randint(0, 97, (32,)).tolist()
    rows = [common + torch.randint(0, 97, (n,)).tolist() for n in (1, 5, 20)]
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
    torch.testing.assert_close(decoder.logits(last), want, atol=2e-5, rtol=1e-4)


def weight_of(decoder: FusedDecoder) -> torch.Tensor:
    """Projections to queries, keys and values in the first layer."""
    found: torch.Tensor = decoder.layers[0].qkv.keywords["weight"]  # type: ignore[attr-defined]  # a partial
    return found


def test_the_layout_keeps_values_training_and_saving(tmp_path: Path) -> None:
    model = build("qwen2")
    shake(model)
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


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (CohereForCausalLM(CohereConfig(**SHAPE)), "not an RMS norm"),
        (Gemma2ForCausalLM(Gemma2Config(**SHAPE)), "norms"),
        (MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=8)), "window"),
        (LlamaForCausalLM(LlamaConfig(**SHAPE, hidden_act="gelu")), "gelu"),
        (LlamaForCausalLM(LlamaConfig(**SHAPE | {"head_dim": 24})), "head size 24"),
        (Qwen2ForCausalLM(Qwen2Config(**SHAPE | {"hidden_size": 96}, use_sliding_window=True, sliding_window=8,
                                      max_window_layers=0)), "window"),
    ],
)  # fmt: skip
def test_other_models_are_refused_in_one_line(model: Any, why: str) -> None:
    reason = unsupported_reason(model)
    assert why in (reason or "")
    with pytest.raises(PolicyError, match="use its stock forward") as caught:
        FusedDecoder(model)
    assert "\n" not in str(caught.value)


def test_a_wrapped_projection_is_refused() -> None:
    model = build("llama")
    model.model.layers[1].mlp.down_proj = torch.nn.Sequential(model.model.layers[1].mlp.down_proj)
    assert "not linear layers" in (unsupported_reason(model) or "")
