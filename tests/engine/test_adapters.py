"""LoRA adapters in the engine, with real peft: every decoder matches the merged model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from engine_cases import (
    assert_forced,
    assert_greedy,
    counted,
    forced,
    generate_all,
    greedily,
    random_ids,
    reference,
    tiny,
)
from engine_cases import run as run_async
from precision import assert_fp32_close
from selection import quick_first

from toolwise.config.schema import LoraConfig
from toolwise.engine.cpu_runner import CpuRunner
from toolwise.engine.cuda_runner import CudaRunner
from toolwise.engine.runner import Runner
from toolwise.errors import ConfigError
from toolwise.learner.lora import Adapters
from toolwise.policies.transformers_generation import generate_batch
from toolwise.protocols import Sampling

NEW = 20
PROMPTS = [random_ids(length, seed) for seed, length in enumerate((1, 17, 30, 9))]
RUNNERS: dict[str, tuple[type[Runner], dict[str, Any]]] = {
    "dense": (CpuRunner, {}),
    "stock": (Runner, {"fused": False}),
    "deterministic": (Runner, {"deterministic": True}),
    "fused": (CudaRunner, {"fused": True}),
}
TARGETS: dict[str, tuple[str, ...]] = {
    "all": (),
    "queries": ("q_proj",),
    "some": ("k_proj", "v_proj", "down_proj"),
    "mlp": ("gate_proj", "up_proj"),
    "ends": ("lm_head", "embed_tokens", "o_proj"),
}


def model_of(family: str) -> Any:
    return tiny(family, **({} if family == "qwen3" else {"head_dim": 16}))


def adapted(model: Any, targets: str = "all", rank: int = 3, alpha: float = 5.0) -> Adapters:
    adapters = Adapters(model, LoraConfig(rank=rank, alpha=alpha, target_modules=list(TARGETS[targets])))
    move(model)
    return adapters


@torch.no_grad()
def move(model: Any, seed: int = 0) -> None:
    """Like an update: in place."""
    draw = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.copy_(0.3 * torch.randn(weight.shape, generator=draw))


def merged(adapters: Adapters) -> Any:
    return copy.deepcopy(adapters.wrapped).merge_and_unload().eval()


def assert_draws_from(engine: Any, model: Any) -> None:
    for ids, found in zip(PROMPTS, generate_all(engine, PROMPTS, [greedily(model, NEW)] * len(PROMPTS)), strict=True):
        assert_greedy(model, ids, list(found.token_ids), reference(model, ids, NEW))
        assert_forced(model, ids, found)


@pytest.mark.parametrize("after", [False, True], ids=["adapters first", "engine first"])
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("family", quick_first(["llama", "qwen2", "qwen3"], ("llama",)))
def test_an_engine_gives_what_the_merged_model_gives(family: str, runner: str, after: bool) -> None:
    model = model_of(family)
    kind, settings = RUNNERS[runner]
    engine = counted(model, **settings) if after else None
    if engine is not None:  # it has decoded and cached something before there are adapters
        assert_draws_from(engine, model)
    adapters = adapted(model)
    engine = engine or counted(model, **settings)
    assert type(engine.runner) is kind
    assert_draws_from(engine, merged(adapters))


@pytest.mark.parametrize("runner", quick_first(["dense", "fused", "stock"], ["dense", "fused"]))
@pytest.mark.parametrize("targets", quick_first(TARGETS, list(TARGETS)[::2]))
def test_any_of_the_layers_may_have_adapters(targets: str, runner: str) -> None:
    model = model_of("llama")
    adapters = adapted(model, targets, rank=2, alpha=9.0)
    assert_draws_from(counted(model, **RUNNERS[runner][1]), merged(adapters))


@pytest.mark.parametrize("told", quick_first([True, False], [True]))
@pytest.mark.parametrize("runner", quick_first(RUNNERS, ["dense", "fused"]))
def test_what_is_cached_is_forgotten_when_adapters_move(runner: str, told: bool) -> None:
    model = model_of("llama")
    adapters = adapted(model)
    engine = counted(model, **RUNNERS[runner][1])
    for version in range(3):
        assert_draws_from(engine, merged(adapters))
        move(model, seed=version + 1)
        if told:
            engine.weights_changed(version + 1)
    assert_draws_from(engine, merged(adapters))


@pytest.mark.parametrize("runner", RUNNERS)
def test_prompts_are_read_and_continuations_scored_through_them(runner: str) -> None:
    """Used by the router and to compare thinking levels."""
    model = model_of("llama")
    adapters = adapted(model)
    plain, engine = merged(adapters), counted(model, **RUNNERS[runner][1])
    prefix, rest = random_ids(19, 5), [random_ids(7, 6), random_ids(4, 7)]
    for continuation, scored in zip(rest, run_async(engine.score(prefix, rest)), strict=True):
        wanted = forced(plain, prefix, continuation)[range(len(continuation)), continuation]
        assert_fp32_close(scored.logprobs, wanted)
    with torch.inference_mode():
        states = plain.get_decoder()(input_ids=torch.tensor([prefix])).last_hidden_state[0]
    assert_fp32_close(run_async(engine.encode(prefix)), states[-1], scale=float(states[-1].abs().max()))


def test_plain_transformers_generation_is_that_of_the_merged_model() -> None:
    model = model_of("llama")
    adapters = adapted(model)
    for version in range(2):
        plain = merged(adapters)
        samplings = [greedily(model, NEW)] * len(PROMPTS)
        found = generate_batch(model, PROMPTS, samplings, pad_id=0, policy_version=version)
        for ids, result in zip(PROMPTS, found, strict=True):
            assert_greedy(plain, ids, list(result.token_ids), reference(plain, ids, NEW))
            assert_forced(plain, ids, result)
        move(model, seed=version + 1)


def test_prefixes_are_shared_until_the_adapters_move() -> None:
    model = model_of("llama")
    adapted(model)
    engine = counted(model)
    prompt, sampling = [random_ids(40, 1)], [greedily(model, 2)]

    def reused() -> float:
        before = engine.metrics()["engine/reused_tokens"]
        generate_all(engine, prompt, sampling)
        return engine.metrics()["engine/reused_tokens"] - before

    assert reused() == 0
    assert reused() > 0
    move(model, seed=1)
    engine.weights_changed(1)
    assert reused() == 0, "keys and values of the old adapters"
    assert reused() > 0


def test_the_engine_decodes_with_plain_layers_whose_weights_stay_in_place() -> None:
    """No adapter in the forward pass, and nothing that was captured or concatenated is built again after an update."""
    model = model_of("llama")
    adapted(model)
    engine = counted(model, fused=True)
    generate_all(engine, PROMPTS, [greedily(model, 3)] * len(PROMPTS))
    assert isinstance(engine.runner, CudaRunner)
    before = engine.runner._ready()[0]
    assert all(type(part) is torch.nn.Linear for layer in before.decoder.layers for part in layer.projections)
    move(model, seed=1)
    engine.weights_changed(1)
    generate_all(engine, PROMPTS, [greedily(model, 3)] * len(PROMPTS))
    assert engine.runner._ready()[0] is before


def test_drawing_at_random_goes_by_the_merged_model_too() -> None:
    model = model_of("llama")
    adapters = adapted(model)
    samplings = [Sampling(max_new_tokens=NEW, seed=n, temperature=0.7) for n in range(len(PROMPTS))]
    for ids, found in zip(PROMPTS, generate_all(counted(model), PROMPTS, samplings), strict=True):
        assert_forced(merged(adapters), ids, found, temperature=0.7)


def test_adapters_of_tied_embeddings_are_refused() -> None:
    with pytest.raises(ConfigError, match="share their weights"):
        adapted(model_of("qwen2"), "ends")
