"""The packed forward pass gives what plain `transformers` gives row by row: log-probs, entropies and every gradient."""

from __future__ import annotations

import copy
import math
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from architectures import build
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_cases import pack
from precision import assert_fp32_close
from selection import quick_first
from torch import Tensor

from toolwise.errors import ModelError
from toolwise.learner.forward import can_share_prefixes, hidden_states, token_logprobs
from toolwise.learner.losses import clipped_policy_loss
from toolwise.messages import Message
from toolwise.models import load_model
from toolwise.policies.transformers_generation import generate_batch
from toolwise.protocols import Sampling

torch.set_num_threads(1)
VOCABULARY = 40
TINY = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "rope_theta": 10000.0,
}  # fmt: skip
SLIDING = ["sliding_attention", "full_attention"]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, all heads": ("Llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama, one key head": ("Llama", {"num_key_value_heads": 1}),
    "llama, linear rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "llama, yarn": ("Llama", {"rope_parameters": YARN}),
    "llama, llama3 rope": ("Llama", {"rope_parameters": LLAMA3}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": 3, "layer_types": SLIDING}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "qwen3, moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}),
    "mistral, sliding": ("Mistral", {"sliding_window": 4}),
    "gemma2": ("Gemma2", {"sliding_window": 3, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3Text", {"sliding_window": 3, "layer_types": SLIDING, "query_pre_attn_scalar": 6}),
    "phi3": ("Phi3", {}),
    "granite": ("Granite", {"logits_scaling": 4.0, "attention_multiplier": 0.3}),
    "cohere": ("Cohere", {"logit_scale": 0.25}),
    "gpt2": ("GPT2", {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64}),
}


@dataclass(frozen=True)
class Tokens:
    ids: list[int]
    sampled: list[bool]


@cache
def model_of(family: str) -> Any:
    """In double precision, though the norms and rotary embeddings of most families compute in single precision."""
    name, changes = FAMILIES[family]
    torch.manual_seed(7)
    options = {"vocab_size": VOCABULARY} | changes if name == "GPT2" else TINY | changes
    config = getattr(transformers, f"{name}Config")(**options)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64, experts_implementation="eager")
    with torch.no_grad():
        for weight in model.parameters():  # fresh weights are so small that all rows would give the same output
            weight.add_(torch.randn_like(weight) * 0.15)
    return model.eval()


@cache
def shipped() -> Any:
    return load_model("builtin:small", device="cpu")[0]


@st.composite
def forests(draw: st.DrawFn) -> list[Tokens]:
    """Groups with a shared prompt, and rows that fork, end early or coincide within the sampled tokens."""
    few = st.integers(3, 5)
    rows: list[Tokens] = []
    for _ in range(draw(st.integers(1, 3))):
        prompt = draw(st.lists(few, min_size=0, max_size=6))
        for _ in range(draw(st.integers(1, 4))):
            reply = draw(st.lists(few, min_size=1, max_size=5))
            tool = draw(st.lists(few, max_size=2))
            again = draw(st.lists(few, max_size=2))
            marks = [*[False] * len(prompt), *[True] * len(reply), *[False] * len(tool), *[True] * len(again)]
            rows.append(Tokens([*prompt, *reply, *tool, *again], marks))
    return rows


Loss = dict[tuple[int, int], tuple[float, float]]
"""Of the token at (row, position): old log-prob and advantage; each row has its own, whatever it shares."""


def credit(rows: Sequence[Tokens]) -> Loss:
    rng = random.Random(len(rows))
    return {
        (n, at): (-rng.uniform(1, 6), rng.uniform(-2, 2))
        for n, row in enumerate(rows)
        for at in range(1, len(row.ids))
        if row.sampled[at]
    }


def loss_of(where: list[tuple[int, int]], logprobs: Tensor, entropy: Tensor, wanted: Loss) -> Tensor:
    old, advantages = (torch.tensor([wanted[w][k] for w in where], dtype=logprobs.dtype) for k in (0, 1))
    found = clipped_policy_loss(logprobs, old, advantages, clip_low=0.2, clip_high=0.3)
    losses: Tensor = found[0] if isinstance(found, tuple) else found
    return losses.sum() - 0.1 * (advantages * entropy).sum()


def by_transformers(model: Any, rows: Sequence[Tokens], temperature: float, wanted: Loss) -> dict[str, Any]:
    """Rows through the stock model: padded, if its attention can handle a row of only padding."""
    model.zero_grad()
    padded = model.config._attn_implementation == "sdpa"
    width = max(len(row.ids) for row in rows)
    logp: list[Tensor] = []
    for few in [rows] if padded else [[row] for row in rows]:
        ids = torch.tensor([[*row.ids, *[0] * (width - len(row.ids))] for row in few])
        mask = torch.tensor([[1] * len(row.ids) + [0] * (width - len(row.ids)) for row in few])
        ids, mask = (ids, mask) if padded else (ids[:, : len(few[0].ids)], mask[:, : len(few[0].ids)])
        logp.extend(torch.log_softmax(model(input_ids=ids, attention_mask=mask).logits / temperature, -1))
    where = list(wanted)
    logprobs = torch.stack([logp[n][at - 1, rows[n].ids[at]] for n, at in where])
    entropy = torch.stack([-(logp[n][at - 1].exp() * logp[n][at - 1]).sum() for n, at in where])
    loss_of(where, logprobs, entropy, wanted).backward()
    return {
        "logprobs": dict(zip(where, logprobs.tolist(), strict=True)),
        "entropy": dict(zip(where, entropy.tolist(), strict=True)),
        "gradients": {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None},
    }


def by_us(
    model: Any, rows: Sequence[Tokens], temperature: float, wanted: Loss, *, budget: int = 10_000, **how: bool
) -> dict[str, Any]:
    model.zero_grad()
    found: dict[str, dict[Any, Any]] = {"logprobs": {}, "entropy": {}}
    for packed in pack(rows, budget, **how):
        logprobs, entropy = token_logprobs(model, hidden_states(model, packed), packed, temperature, chunk_tokens=3)
        where = list(zip(packed.row.tolist(), packed.at.tolist(), strict=True))
        loss_of(where, logprobs, entropy, wanted).backward()
        found["logprobs"] |= dict(zip(where, logprobs.tolist(), strict=True))
        found["entropy"] |= dict(zip(where, entropy.tolist(), strict=True))
    return found | {"gradients": {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}}


def distance(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Distance of two gradients, relative to the norm of the second."""
    apart = [float((ours["gradients"][name].double() - g.double()).norm()) for name, g in theirs["gradients"].items()]
    return math.hypot(*apart) / math.hypot(*(float(g.double().norm()) for g in theirs["gradients"].values()))


def assert_same(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float, values: float | None = None) -> None:
    """The gradient as a whole to `tolerance` relative to its norm, each weight's to twice that; log-probs and
    entropies to `values`, 1e-5 at most where it is not given."""
    for name in ("logprobs", "entropy"):
        near = min(tolerance, 1e-5) if values is None else values
        assert ours[name] == pytest.approx(theirs[name], rel=near, abs=near)
    assert ours["gradients"].keys() == theirs["gradients"].keys()
    size = {name: float(g.norm()) for name, g in theirs["gradients"].items()}
    apart = {name: float((ours["gradients"][name] - g).norm()) for name, g in theirs["gradients"].items()}
    whole = math.hypot(*size.values())
    assert math.hypot(*apart.values()) <= tolerance * whole
    for name, gap in apart.items():
        # A gradient that is almost zero (that of a key's bias is) has no significant digits.
        assert gap <= 2 * tolerance * max(size[name], 0.01 * whole), name


@pytest.mark.parametrize("family", quick_first(FAMILIES, [*FAMILIES][::2]))
@settings(max_examples=8, deadline=None)
@given(
    rows=forests(),
    budget=st.integers(1, 40),
    share=st.booleans(),
    nodes=st.booleans(),
    temperature=st.sampled_from([1.0, 0.7]),
)
def test_log_probs_and_gradients_are_those_of_plain_transformers(
    family: str, rows: list[Tokens], budget: int, share: bool, nodes: bool, temperature: float
) -> None:
    wanted = credit(rows)
    if wanted:
        how = {"share_prefixes": share, "nodes": nodes}
        ours = by_us(model_of(family), rows, temperature, wanted, budget=budget, **how)
        assert_same(ours, by_transformers(model_of(family), rows, temperature, wanted), 1e-5)


@cache
def sampled_rows() -> list[tuple[Tokens, list[float]]]:
    """Long replies of the bundled model to three questions, with log-probs."""
    model, chat = load_model("builtin:small", device="cpu")
    questions = ["What is 12 + 7?", "What is the capital of France?", "What is 3 * 14?"]
    prompts = [p for q in questions for p in [chat.start([Message(role="user", content=q)], None)] * 4]
    samplings = [Sampling(max_new_tokens=24, temperature=1.0, seed=i, stop_token_ids=()) for i in range(len(prompts))]
    found = generate_batch(model, prompts, samplings, pad_id=0, policy_version=0)
    return [
        (Tokens([*p, *g.token_ids], [False] * len(p) + [True] * len(g.token_ids)), [*[0.0] * len(p), *g.logprobs])
        for p, g in zip(prompts, found, strict=True)
    ]


@pytest.mark.long
@settings(max_examples=2, deadline=None)
@given(cuts=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 23)), max_size=6), budget=st.integers(1, 500))
def test_in_single_precision_gradients_of_the_shipped_model_are_near_those_in_double_precision(
    cuts: list[tuple[int, int]], budget: int
) -> None:
    """Rows that end anywhere within the sampled tokens: some are prefixes of others, some are equal.

    All whole rows are among them, since where the model is all but certain a gradient is a difference of two numbers
    that agree to many digits. How far single precision is off depends on the rows (5e-6 to 2e-5 of the gradient's norm
    were seen) and on the instruction set, so the yardstick is what plain transformers is off: up to 1.7 times that was
    seen of us (AVX-512, AVX2 and without vector instructions).
    """
    rows, wanted = [], {}
    rng = random.Random(budget)
    for number, cut in [*((n, 0) for n in range(12)), *cuts]:
        whole, logprobs = sampled_rows()[number]
        rows.append(Tokens(whole.ids[: len(whole.ids) - cut], whole.sampled[: len(whole.ids) - cut]))
        for at in range(whole.sampled.index(True), len(rows[-1].ids)):
            wanted[len(rows) - 1, at] = (logprobs[at] + rng.gauss(0, 0.2), rng.uniform(-2, 2))
    exact = by_transformers(copy.deepcopy(shipped()).double(), rows, 1.0, wanted)
    tolerance = 3 * max(distance(by_transformers(shipped(), rows, 1.0, wanted), exact), 3e-6)
    # Values are sums over two thousand logits up to 30 in size, whose rounding is 2e-6 each: 1.6e-5 was seen.
    assert_same(by_us(shipped(), rows, 1.0, wanted, share_prefixes=False), exact, tolerance, values=3e-5)
    assert_same(by_us(shipped(), rows, 1.0, wanted, budget=budget), exact, tolerance, values=3e-5)


def long_rows() -> list[Tokens]:
    rng = random.Random(3)
    rows = []
    for _ in range(1):
        prompt = [rng.randrange(2000) for _ in range(60)]
        for length in (3, 20, 600):  # 600 tokens do not fit in one mask
            reply = [rng.randrange(2000) for _ in range(length)]
            rows.append(Tokens(prompt + reply, [False] * 60 + [True] * length))
    return rows


def test_long_rows_agree_too() -> None:
    rows = long_rows()
    wanted = credit(rows)
    flat = by_us(shipped(), rows, 1.0, wanted, share_prefixes=False)
    assert_same(by_us(shipped(), rows, 1.0, wanted), flat, 1e-5)
    assert_same(by_us(shipped(), rows, 1.0, wanted, budget=900), flat, 1e-5)


def test_the_order_of_rows_changes_nothing() -> None:
    rows = [*long_rows(), Tokens([5, 6, 7], [False, True, True])]
    wanted = credit(rows)
    there = by_us(shipped(), rows, 1.0, wanted)
    turned = {(3 - n, at): value for (n, at), value in wanted.items()}
    back = by_us(shipped(), rows[::-1], 1.0, turned)
    assert {(3 - n, at) for n, at in back["logprobs"]} == there["logprobs"].keys()
    turned_back = [back["logprobs"][3 - n, at] for n, at in there["logprobs"]]
    assert_fp32_close(turned_back, [*there["logprobs"].values()])


def test_rows_that_share_a_sampled_token_each_bring_their_own_clipped_term() -> None:
    model = model_of("llama")
    rows = [Tokens([4, 5, 6, 7], [False, True, True, True])] * 2
    here = {(0, at): (-1.0, 1.0) for at in (1, 2, 3)}  # ratio below 1, advantage above 0: not clipped
    there = {(1, at): (-1.0, -1.0) for at in (1, 2, 3)}  # advantage below 0: clipped, and no gradient
    both = by_us(model, rows, 1.0, here | there)
    alone = by_us(model, rows, 1.0, here | dict.fromkeys(there, (-1.0, 0.0)))
    entropy_only = by_us(model, rows, 1.0, dict.fromkeys(here | there, (-1.0, 0.0)))
    assert both["logprobs"][0, 1] == both["logprobs"][1, 1]
    assert both["gradients"]["model.embed_tokens.weight"].norm() > 0
    assert entropy_only["gradients"]["model.embed_tokens.weight"].norm() == 0
    assert alone["gradients"]["model.norm.weight"].norm() > 0
    assert_same(both, by_transformers(model, rows, 1.0, here | there), 1e-5)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_activation_checkpointing_gives_the_same_gradients_and_does_run_layers_again(
    family: str, training: bool
) -> None:
    rows = [Tokens([4, 5, 6, *tail], [False, False, False, *[True] * len(tail)]) for tail in ([7, 8], [7, 9, 3], [3])]
    wanted = credit(rows)
    model = copy.deepcopy(model_of(family)).train(training)
    plain = by_us(model, rows, 1.0, wanted)
    runs = [0]
    model.get_decoder().layers[0].mlp.register_forward_pre_hook(lambda *_: runs.__setitem__(0, runs[0] + 1))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    before = [(m.training, getattr(m, "_gradient_checkpointing_func", None)) for m in model.modules()]
    assert_same(by_us(model, rows, 1.0, wanted), plain, 1e-10)
    assert runs[0] == 2
    assert [(m.training, getattr(m, "_gradient_checkpointing_func", None)) for m in model.modules()] == before


def test_the_model_s_own_attention_is_restored() -> None:
    model = model_of("llama")
    ids = torch.tensor([[4, 5, 6, 7]])
    before = model(input_ids=ids).logits
    packed = pack([Tokens([4, 5, 6], [False, True, True])], 10)[0]
    hidden_states(model, packed)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(input_ids=ids).logits, before)


def test_the_model_s_own_attention_is_restored_after_an_error() -> None:
    model = model_of("llama")
    packed = pack([Tokens([4, VOCABULARY + 5, 6], [False, True, True])], 10)[0]
    with pytest.raises(IndexError):
        hidden_states(model, packed)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_that_does_not_pass_the_layout_on_is_rejected() -> None:
    model = copy.deepcopy(model_of("llama"))
    assert can_share_prefixes(model)
    model.model.layers[1].self_attn.config = copy.deepcopy(model.config)
    packed = pack([Tokens([4, 5, 6], [False, True, True])], 10)[0]
    with pytest.raises(ModelError, match="1 of 2 layers"):
        hidden_states(model, packed)


def test_a_model_with_unsupported_attention_is_computed_padded() -> None:
    model = build("bloom", torch.float64)
    assert not can_share_prefixes(model)
    rows = [Tokens([4, 5, 6, *tail], [False, False, False, *[True] * len(tail)]) for tail in ([7, 8], [7, 9, 3], [3])]
    wanted = credit(rows)
    assert_same(by_us(model, rows, 1.0, wanted), by_transformers(model, rows, 1.0, wanted), 1e-5)


def test_nothing_sampled_gives_nothing() -> None:
    model = model_of("llama")
    packed = pack([Tokens([4, 5, 6], [False, True, True])], 10)[0]
    empty = {
        name: getattr(packed, name)[:0] for name in ("source", "target", "row", "at", "predictors", "predicted_by")
    }
    nothing = type(packed)(**vars(packed) | empty | {"predicted": ()})
    logprobs, entropy = token_logprobs(model, hidden_states(model, nothing), nothing, 1.0, chunk_tokens=4)
    assert logprobs.shape == entropy.shape == (0,)


def test_packing_and_the_forward_pass_need_no_more_than_torch_and_transformers() -> None:
    """They import without the package's other dependencies."""
    program = "import sys; sys.modules['pydantic'] = None; import toolwise.learner.forward, toolwise.learner.packing"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
