"""Each published architecture gives what transformers gives, by whichever engine it takes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, FAST, LONG, TRANSFORMERS, build
from engine_cases import assert_forced, assert_greedy, counted, forced, generate_all, random_ids, reference, run
from precision import assert_fp32_close
from selection import quick_first

from toolwise.config.schema import LoraConfig
from toolwise.engine import Engine, engine_path
from toolwise.engine.cpu_runner import CpuRunner
from toolwise.engine.cuda_runner import CudaRunner
from toolwise.engine.paged_attention import fits_attention_kernels
from toolwise.engine.paths import log_general_path
from toolwise.errors import ContextFullError
from toolwise.learner.lora import Adapters
from toolwise.protocols import Sampling

NEW = 12
PROMPTS = [random_ids(length, seed) for seed, length in enumerate((1, 3, 9, 17, 26))]
PROMPTS.append(PROMPTS[-1][:20] + random_ids(4, 90))
WAYS: dict[str, dict[str, Any]] = {
    "all together": {},
    "in chunks": {"max_batch_tokens": 7, "max_requests": 6},
    "short of memory": {"blocks": 14, "max_requests": 3},
    "nothing shared": {"prefix_cache": False},
    "to the bit": {"deterministic": True},
    "stock": {"fused": False},
    "stock, in chunks": {"fused": False, "max_batch_tokens": 7},
}
PAGED = [name for name, architecture in ARCHITECTURES.items() if architecture.engine != TRANSFORMERS]
FEATURES = ("llama", "llama, biases", "qwen3", "gemma2", "gemma3", "phi3, longrope", "granite", "olmo2", "smollm3")
"""Between them, all that a described layer may have: norms, windows, soft caps, scales, ropes by layer, biases."""
FORMS = ("llama", "gemma2", "gpt2", "glm4", "cohere2", "gpt-neox", "qwen3, moe", "gpt-oss", "deepseek-v3")
"""Between them, all forms of attention that a stock forward may ask for."""


@pytest.mark.parametrize("way", quick_first(WAYS, ("in chunks",)))
@pytest.mark.parametrize("name", quick_first(PAGED, FEATURES + FORMS))
def test_greedy_tokens_and_log_probs_are_those_of_transformers(name: str, way: str) -> None:
    model = build(name)
    prompts = [*PROMPTS, PROMPTS[3]]
    engine = counted(model, **WAYS[way])
    fast = ARCHITECTURES[name].engine == FAST and WAYS[way].get("fused") is None and not WAYS[way].get("deterministic")
    assert isinstance(engine.runner, CpuRunner) == fast
    found = generate_all(engine, prompts, [Sampling(max_new_tokens=NEW, do_sample=False)] * len(prompts))
    for ids, result in zip(prompts, found, strict=True):
        assert_greedy(model, ids, list(result.token_ids), reference(model, ids, NEW))
        assert_forced(model, ids, result)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_path_is_that_of_the_table(name: str) -> None:
    path, reason = engine_path(build(name))
    assert path == ARCHITECTURES[name].engine
    assert reason
    assert "\n" not in reason


FAST_NAMES = [name for name in PAGED if ARCHITECTURES[name].engine == FAST]
SHARED = [[*random_ids(20, 200), member] for member in range(4)]


def assert_as_in_transformers(model: Any, engine: Engine, prompts: list[list[int]]) -> None:
    found = generate_all(engine, prompts, [Sampling(max_new_tokens=NEW, do_sample=False)] * len(prompts))
    for ids, result in zip(prompts, found, strict=True):
        assert_greedy(model, ids, list(result.token_ids), reference(model, ids, NEW))
        assert_forced(model, ids, result)


@pytest.mark.parametrize("way", quick_first(["all together", "in chunks", "short of memory"], ("all together",)))
@pytest.mark.parametrize("name", quick_first(FAST_NAMES, FEATURES))
def test_the_kernels_of_a_gpu_compute_these_too(name: str, way: str) -> None:
    """The runner of a GPU with its kernels in plain torch: prefill, decoding many steps ahead, shared prefixes."""
    model = build(name)
    engine = counted(model, fused=True, **WAYS[way])
    assert isinstance(engine.runner, CudaRunner)
    assert_as_in_transformers(model, engine, [*PROMPTS, *SHARED])
    if way == "all together":
        assert_as_in_transformers(model, engine, SHARED)
        assert any(groups for _, groups, _ in engine.runner.shapes)


@pytest.mark.parametrize("way", quick_first(["in chunks", "nothing shared"], ("in chunks",)))
@pytest.mark.parametrize("name", quick_first([n for n in PAGED if n not in ("gpt-oss", "deepseek-v3")], FORMS))
def test_stock_forwards_attend_with_the_kernels_of_a_gpu(name: str, way: str) -> None:
    """All but attention sinks, and values of another size than the keys."""
    model = build(name)
    engine = counted(model, fused=False, **WAYS[way])
    assert all(map(fits_attention_kernels, engine.runner.attention))
    engine.runner.uses_block_tables = True
    assert_as_in_transformers(model, engine, [*PROMPTS, *SHARED])


def test_rows_that_pad_a_batch_to_a_fixed_size_reach_no_kernel_of_a_gpu() -> None:
    """They have no slot, table or length: a kernel would read those of other memory."""
    engine = counted(build("llama"), deterministic=True)
    engine.runner.uses_block_tables = True
    samplings = [Sampling(max_new_tokens=NEW, seed=seed) for seed in range(len(PROMPTS))]
    together = generate_all(engine, PROMPTS, samplings)
    plain = generate_all(counted(build("llama"), deterministic=True), PROMPTS, samplings)
    for ours, expected in zip(together, plain, strict=True):
        assert list(ours.token_ids) == list(expected.token_ids)
        assert_fp32_close(ours.logprobs, expected.logprobs)


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek-v3"])
def test_sinks_and_values_of_another_size_are_left_to_torch(name: str) -> None:
    assert not all(map(fits_attention_kernels, counted(build(name)).runner.attention))


@pytest.mark.parametrize(
    "name", quick_first(["gemma3", "phi3", "olmo2", "gpt2", "mixtral", "gpt-oss"], ["gemma3", "gpt2"])
)
def test_adapters_are_decoded_with(name: str) -> None:
    model = build(name)
    engine = counted(model)
    generate_all(engine, PROMPTS, [Sampling(max_new_tokens=3)] * len(PROMPTS))
    adapters = Adapters(model, LoraConfig(rank=3, alpha=5.0))
    with torch.no_grad():
        for parameter_name, weight in model.named_parameters():
            if "lora_" in parameter_name:
                weight.copy_(0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    engine.weights_changed(1)
    if engine_path(model)[0] == FAST:
        assert isinstance(engine.runner, CpuRunner)
        assert engine.runner.decoder is not None
    merged = copy.deepcopy(adapters.wrapped).merge_and_unload()
    found = generate_all(engine, PROMPTS, [Sampling(max_new_tokens=NEW, do_sample=False)] * len(PROMPTS))
    for ids, result in zip(PROMPTS, found, strict=True):
        assert_greedy(merged, ids, list(result.token_ids), reference(merged, ids, NEW))
        assert_forced(merged, ids, result)


def test_a_longrope_is_run_up_to_its_original_length() -> None:
    model = build("phi3, longrope")
    engine = counted(model)
    assert engine.max_context == LONG["original_max_position_embeddings"] < model.config.max_position_embeddings
    with pytest.raises(ContextFullError):
        run(engine.generate(random_ids(60, 0), Sampling(max_new_tokens=5)))


def test_the_reason_for_the_general_path_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    log_general_path.cache_clear()
    caplog.set_level("INFO")
    for _ in range(2):
        counted(build("gpt2"))
    assert caplog.text.count("GPT2LMHeadModel uses its stock forward over the paged cache") == 1
    assert engine_path(build("gpt2"))[1] in caplog.text


@pytest.mark.parametrize("name", quick_first(PAGED, FORMS))
def test_scores_share_a_prefix(name: str) -> None:
    model = build(name)
    prefix = random_ids(13, 3)
    continuations = [random_ids(1 + 5 * i, 50 + i) for i in range(3)]
    found = run(counted(model, max_batch_tokens=16).score(prefix, continuations))
    for tokens, scored in zip(continuations, found, strict=True):
        expected = forced(model, prefix, tokens)[range(len(tokens)), tokens]
        assert_fp32_close(scored.logprobs, expected)
