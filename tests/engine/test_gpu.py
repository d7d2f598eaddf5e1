"""On a GPU, with kernels and captured steps: the engine matches transformers and the learner."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, FAST, SHAPE, TRANSFORMERS, build
from engine_cases import FAMILIES, counted, generate_all, greedily, random_ids, tiny

from toolwise.config.schema import LoraConfig
from toolwise.engine import Engine, engine_path
from toolwise.engine.cuda_runner import CudaRunner
from toolwise.learner.lora import Adapters
from toolwise.models.merged_weights import merged_copy
from toolwise.protocols import Generation, Sampling

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
NEW = 70
PROMPTS = [random_ids(length, seed) for seed, length in enumerate((1, 17, 30, 9, 64, 150))]
GROUPS = [[*random_ids(100, 100 + group), member] for group in range(3) for member in range(4)]


def on_gpu(family: str, dtype: torch.dtype = torch.float32) -> Any:
    more = {"head_dim": 16} if family not in ("qwen3", "builtin") else {}
    return tiny(family, **more).to(device="cuda", dtype=dtype)


@torch.inference_mode()
def forced(model: Any, ids: list[int], found: Generation, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs over the vocabulary at each sampled position."""
    whole = torch.tensor([[*ids, *found.token_ids]], device="cuda")
    logits = model(input_ids=whole).logits[0, len(ids) - 1 : -1]
    return torch.log_softmax(logits.float() / temperature, dim=-1)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_the_likeliest_in_fp32(family: str, kernels: bool) -> None:
    model = on_gpu(family)
    engine = counted(model, fused=kernels, block_size=16)
    prompts = [*PROMPTS, *GROUPS]
    for ids, found in zip(prompts, generate_all(engine, prompts, [greedily(model, NEW)] * len(prompts)), strict=True):
        says = forced(model, ids, found)
        chosen = says[range(len(found.token_ids)), list(found.token_ids)]
        assert (says.max(-1).values - chosen).max() < 1e-4, "a token that is not the likeliest"
        assert (chosen.cpu() - torch.tensor(list(found.logprobs))).abs().max() < 1e-4
    if kernels:
        assert isinstance(engine.runner, CudaRunner)
        assert any(groups for _, groups, _ in engine.runner.shapes)


@pytest.mark.parametrize("family", ["llama", "qwen3", "builtin"])
def test_bf16_log_probs_are_within_the_canary_s_bound(family: str) -> None:
    model = on_gpu(family, torch.bfloat16)
    samplings = [Sampling(max_new_tokens=NEW, seed=n, temperature=0.8) for n in range(len(GROUPS))]
    for ids, found in zip(GROUPS, generate_all(Engine(model, blocks=512), GROUPS, samplings), strict=True):
        chosen = forced(model, ids, found, 0.8)[range(len(found.token_ids)), list(found.token_ids)]
        assert (chosen.cpu() - torch.tensor(list(found.logprobs))).abs().mean() < 0.05


def assert_likeliest(model: Any, engine: Engine, prompts: list[list[int]]) -> None:
    """Greedy tokens are the likeliest of a teacher-forced pass in fp32, with its log-probs."""
    sampling = Sampling(max_new_tokens=NEW, do_sample=False)
    for ids, found in zip(prompts, generate_all(engine, prompts, [sampling] * len(prompts)), strict=True):
        says = forced(model, ids, found)
        chosen = says[range(NEW), list(found.token_ids)]
        assert (says.max(-1).values - chosen).max() < 1e-4, "a token that is not the likeliest"
        assert (chosen.cpu() - torch.tensor(list(found.logprobs))).abs().max() < 1e-4


HEAD_SIZES = {
    "gemma": 256, "gemma2": 256, "gemma3": 256, "phi3": 96, "phi3, partial": 128, "olmo2": 128, "mistral, sliding": 80,
}  # fmt: skip
"""Those of published models, and one more; 64 for all others."""
PAGED = [
    name
    for name, architecture in ARCHITECTURES.items()
    if architecture.engine != TRANSFORMERS and "longrope" not in name  # too short for these texts
]
FUSED = [name for name in PAGED if ARCHITECTURES[name].engine == FAST]


def architecture(name: str, dtype: torch.dtype = torch.float32) -> Any:
    return build(name, dtype, head_dim=HEAD_SIZES.get(name, 64), max_position_embeddings=512).to("cuda")


@pytest.mark.parametrize("name", FUSED)
def test_every_described_architecture_takes_the_fused_kernels(name: str) -> None:
    model = architecture(name)
    assert engine_path(model) == ("toolwise-fast", "fused kernels compute its layers")
    engine = counted(model, block_size=16, max_batch_tokens=96)
    assert isinstance(engine.runner, CudaRunner)
    assert_likeliest(model, engine, [*PROMPTS, *GROUPS])
    assert_likeliest(model, engine, GROUPS)
    assert any(groups for _, groups, _ in engine.runner.shapes)


@pytest.mark.parametrize("name", FUSED)
def test_bf16_is_as_close_to_fp32_as_the_stock_forward(name: str) -> None:
    model = architecture(name, torch.bfloat16)
    exact = copy.deepcopy(model).float()
    samplings = [Sampling(max_new_tokens=NEW, seed=n) for n in range(len(GROUPS))]
    engine = Engine(model, blocks=512)
    assert isinstance(engine.runner, CudaRunner)
    ours, stock = [], []
    for ids, found in zip(GROUPS, generate_all(engine, GROUPS, samplings), strict=True):
        chosen = range(len(found.token_ids)), list(found.token_ids)
        truth = forced(exact, ids, found)[chosen].cpu()
        ours.append((torch.tensor(list(found.logprobs)) - truth).abs())
        stock.append((forced(model, ids, found)[chosen].cpu() - truth).abs())
    assert torch.cat(ours).mean() < 1.3 * torch.cat(stock).mean() + 0.002


@pytest.mark.parametrize("name", PAGED)
def test_every_architecture_is_exact_over_the_paged_cache(name: str) -> None:
    """In kernels, but for attention sinks and values of another size than the keys."""
    more = {"max_position_embeddings": 512} if ARCHITECTURES[name].shape is SHAPE else {}
    model = build(name, **more).to("cuda")
    assert engine_path(model)[0] == ARCHITECTURES[name].engine
    engine = counted(model, fused=False, block_size=16, max_batch_tokens=48)
    assert engine.runner.uses_block_tables == (name not in ("gpt-oss", "deepseek-v3"))
    limit = engine.max_context - NEW
    assert_likeliest(model, engine, [ids for ids in [*PROMPTS, *GROUPS[:4]] if len(ids) <= limit])


def test_a_request_draws_the_same_alone_and_in_company() -> None:
    model = on_gpu("llama")
    samplings = [Sampling(max_new_tokens=NEW, seed=n) for n in range(len(GROUPS))]
    together = generate_all(Engine(model, blocks=512), GROUPS, samplings)
    for n in (0, 5, 11):
        [alone] = generate_all(Engine(model, blocks=512), [GROUPS[n]], [samplings[n]])
        assert list(alone.token_ids) == list(together[n].token_ids)


def test_deterministic_results_are_the_same_to_the_bit_alone_and_in_company() -> None:
    model = on_gpu("llama")
    samplings = [Sampling(max_new_tokens=NEW, seed=n) for n in range(len(GROUPS))]
    together = generate_all(Engine(model, blocks=512, deterministic=True), GROUPS, samplings)
    for n in (0, 5, 11):
        [alone] = generate_all(Engine(model, blocks=512, deterministic=True), [GROUPS[n]], [samplings[n]])
        assert list(alone.token_ids) == list(together[n].token_ids)
        assert list(alone.logprobs) == list(together[n].logprobs)


def test_the_next_token_is_the_new_weights_and_graphs_stay() -> None:
    model, other = on_gpu("llama"), tiny("llama", 1, head_dim=16).to("cuda")
    engine = Engine(model, blocks=256)
    generate_all(engine, PROMPTS, [greedily(model, NEW)] * len(PROMPTS))
    assert isinstance(engine.runner, CudaRunner)
    decoder = engine.runner._multi_step
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), other.parameters(), strict=True):
            parameter.copy_(value)
    engine.weights_changed(1)
    for ids, found in zip(PROMPTS, generate_all(engine, PROMPTS, [greedily(model, NEW)] * len(PROMPTS)), strict=True):
        says = forced(other, ids, found)
        assert (says.max(-1).values - says[range(NEW), list(found.token_ids)]).max() < 1e-4
    assert engine.runner._multi_step is decoder
    engine.drop_cache()
    again = generate_all(engine, PROMPTS, [greedily(model, NEW)] * len(PROMPTS))
    assert len(again[0].token_ids) == NEW


def with_adapters(model: Any, *targets: str) -> Adapters:
    """Rank 4, and far enough from their initial values to matter."""
    adapters = Adapters(model, LoraConfig(rank=4, alpha=8.0, target_modules=list(targets)))
    move(model, seed=0)
    return adapters


@torch.no_grad()
def move(model: Any, seed: int) -> None:
    """Like an update: in place, so that captured steps stay valid."""
    draw = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.copy_(0.2 * torch.randn(weight.shape, generator=draw))


@pytest.mark.parametrize("after", [False, True], ids=["adapters first", "engine first"])
@pytest.mark.parametrize("targets", [(), ("q_proj", "down_proj")], ids=["all", "some"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_adapters_are_decoded_with_in_captured_steps(family: str, targets: tuple[str, ...], after: bool) -> None:
    """Matches the merged model before and after the adapters change, with prefixes cached in between."""
    model = on_gpu(family)
    prompts = [*PROMPTS, *GROUPS]
    samplings = [greedily(model, NEW)] * len(prompts)
    engine = counted(model, block_size=16)
    if after:
        generate_all(engine, prompts, samplings)  # captured without adapters
    adapters = with_adapters(model, *targets)
    for version in range(1, 3):
        merged = copy.deepcopy(adapters.wrapped).merge_and_unload()
        for ids, found in zip(prompts, generate_all(engine, prompts, samplings), strict=True):
            says = forced(merged, ids, found)
            chosen = says[range(len(found.token_ids)), list(found.token_ids)]
            assert (says.max(-1).values - chosen).max() < 1e-3, "a token that is not the likeliest"
            assert (chosen.cpu() - torch.tensor(list(found.logprobs))).abs().max() < 1e-3
        assert isinstance(engine.runner, CudaRunner)
        captured = engine.runner._multi_step
        move(model, seed=version)
        engine.weights_changed(version)
        generate_all(engine, prompts[:1], samplings[:1])
        assert engine.runner._multi_step is captured, "captured again after an update"
    assert engine.runner.shapes


def test_merging_on_a_gpu_gives_the_same_numbers_every_time() -> None:
    model = on_gpu("llama", torch.bfloat16)
    with_adapters(model)
    first = [weight.clone() for weight in merged_copy(model).parameters()]
    move(model, seed=1)
    assert not all(torch.equal(a, b) for a, b in zip(first, merged_copy(model).parameters(), strict=True))
    move(model, seed=0)
    assert all(torch.equal(a, b) for a, b in zip(first, merged_copy(model).parameters(), strict=True))


def test_bf16_with_adapters_is_within_the_canary_s_bound() -> None:
    """Merged weights are rounded; compared with peft's own modules, which add fp32 adapters in the forward pass."""
    model = on_gpu("qwen3", torch.bfloat16)
    with_adapters(model)
    engine = Engine(model, blocks=512)
    samplings = [Sampling(max_new_tokens=NEW, seed=n, temperature=0.8) for n in range(len(GROUPS))]
    for ids, found in zip(GROUPS, generate_all(engine, GROUPS, samplings), strict=True):
        chosen = forced(model, ids, found, 0.8)[range(len(found.token_ids)), list(found.token_ids)]
        assert (chosen.cpu() - torch.tensor(list(found.logprobs))).abs().mean() < 0.05
    assert isinstance(engine.runner, CudaRunner)
