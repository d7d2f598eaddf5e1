"""The learner on a GPU in half precision, end to end, with all options on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from architectures import build
from learner_cases import LR, changed, credit, pack, sample, tiny_model

from toolwise.advantages import Gae
from toolwise.config.schema import LoraConfig
from toolwise.engine import Engine
from toolwise.engine.cuda_runner import CudaRunner
from toolwise.learner.actor import Actor
from toolwise.learner.critic import Critic
from toolwise.learner.forward import hidden_states, token_logprobs
from toolwise.learner.lora import Adapters
from toolwise.learner.sharding import gathered
from toolwise.models.merged_weights import plain_layer
from toolwise.protocols import Generation, Sampling

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("aggregation", ["token", "step", "rollout", "constant"])
def test_a_full_update(dtype: torch.dtype, aggregation: Any) -> None:
    model = tiny_model(head_dim=16).to("cuda", dtype)
    config = changed(
        LR,
        {"algorithm": {"kl": "reward", "kl_coef": 0.1, "kl_target": 0.01}},
        lr=1e-3,
        entropy_coef=0.01,
        old_logprobs="recompute",
        ppo_epochs=2,
        mini_batches=2,
        loss_aggregation=aggregation,
        loss_length=16,
        activation_checkpointing=True,
        mismatch_check="stop",
    )
    critic = Critic(tiny_model(head_dim=16).to("cuda", dtype), config)
    actor = Actor(model, config, critic=critic)
    estimator = Gae()
    for step in range(3):
        scored = [c.annotated.scored for c in sample(model, [0.0] * 8, seed=step, groups_of=4)]
        scored = [replace(s, result=s.result.model_copy(update={"score": float(i % 2)})) for i, s in enumerate(scored)]
        metrics = actor.update(estimator(actor.annotate(scored)).rollouts)
        assert metrics["actor/skipped_updates"] == metrics["critic/skipped_updates"] == 0.0
        assert metrics["actor/update_norm"] > 0.0
        assert metrics["canary/logprob_gap_mean"] < (1e-4 if dtype is torch.float32 else 0.05)


@dataclass(frozen=True)
class Tokens:
    ids: list[int]
    sampled: list[bool]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "mistral, sliding", "gemma2", "gemma3", "phi3", "gpt-oss", "deepseek-v3"])
def test_packed_rows_of_other_architectures_have_their_log_probs(name: str, dtype: torch.dtype) -> None:
    """Windows, soft caps, sinks, keys and values of different sizes, and norms with factors 1 + w."""
    model = build(name, dtype).to("cuda")
    rows = [Tokens([3, 5, 7, 9, 11, 13, 15, *tail], [False] * 7 + [True] * 6) for tail in ([1] * 6, [2, 4] * 3)]
    [packed] = pack(rows, 500, share_prefixes=True, device="cuda")
    with torch.no_grad():
        found, _ = token_logprobs(model, hidden_states(model, packed), packed, 1.0)
        logits = model(input_ids=torch.tensor([row.ids for row in rows], device="cuda")).logits.float()
    expected = torch.log_softmax(logits, -1)[packed.row, packed.at - 1, packed.target]
    errors = (found - expected).abs()
    assert (errors.max() < 1e-4) if dtype is torch.float32 else (errors.mean() < 0.1)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_learn_from_the_engine_s_samples(dtype: torch.dtype, checkpointing: bool) -> None:
    """Fifty updates with real peft: engine, learner and reference over one model, mismatch check at every update."""
    model = tiny_model(head_dim=16).to("cuda", dtype)
    engine = Engine(model, blocks=256)
    config = changed(
        LR,
        {"algorithm": {"kl": "loss", "kl_coef": 0.01}},
        lr=3e-3,
        mismatch_check="stop",
        lora={"rank": 4, "alpha": 8.0},
        activation_checkpointing=checkpointing,
    )
    actor = Actor(model, config)
    assert isinstance(engine.runner, CudaRunner)
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]

    async def draw(step: int) -> list[Generation]:
        samplings = [Sampling(max_new_tokens=12, seed=100 * step + n) for n in range(8)]
        return await asyncio.gather(*(engine.generate(prompts[n % 2], s) for n, s in enumerate(samplings)))

    for step in range(50):
        drawn = asyncio.run(draw(step))
        credited = [
            credit(
                [(prompts[n % 2], list(found.token_ids), list(found.logprobs))],
                1.0 if n < 4 else -1.0,
                name=f"{step}/{n}",
                version=found.policy_version,
            )
            for n, found in enumerate(drawn)
        ]
        annotated = actor.annotate([c.annotated.scored for c in credited])
        metrics = actor.update([replace(c, annotated=a) for c, a in zip(credited, annotated, strict=True)])
        assert metrics["actor/skipped_updates"] == 0.0
        engine.weights_changed(actor.version)
    moved = [weight for name, weight in model.named_parameters() if "lora_B" in name]
    assert moved
    assert all(bool(weight.detach().any()) for weight in moved)
    layer = model.model.layers[0].mlp.up_proj
    merged = plain_layer(layer).weight
    expected = layer.base_layer.weight.float() + layer.get_delta_weight("default")
    step = expected.abs() * torch.finfo(dtype).eps
    assert ((merged.float() - expected).abs() <= step + 1e-6).all(), "not merged again after the last update"
    assert not torch.equal(merged, layer.base_layer.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_adapters_are_those_of_peft(dtype: torch.dtype) -> None:
    """With the fused modules of a GPU, over packed rows; peft runs its own modules over padded ones."""
    model = tiny_model(head_dim=16).to("cuda", dtype)
    Adapters(model, LoraConfig(rank=4, alpha=8.0))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.copy_(0.1 * torch.randn(weight.shape, generator=draw))
    rows = [Tokens([3, 5, 7, 9, 11, 13, 15, *tail], [False] * 7 + [True] * 6) for tail in ([1] * 6, [2, 4] * 3)]
    [packed] = pack(rows, 500, share_prefixes=True, device="cuda")
    weights = torch.linspace(-1, 1, packed.S, device="cuda")

    def gradients(logprobs: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        (logprobs * weights).sum().backward()
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
        return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.requires_grad])

    found = gradients(token_logprobs(model, hidden_states(model, packed), packed, 1.0)[0])
    logits = model(input_ids=torch.tensor([row.ids for row in rows], device="cuda")).logits.float()
    expected = gradients(torch.log_softmax(logits, -1)[packed.row, packed.at - 1, packed.target])
    assert (found - expected).norm() / expected.norm() < (1e-4 if dtype is torch.float32 else 0.1)


@pytest.mark.parametrize("offload", [False, True])
def test_sharded_weights_learn_what_whole_ones_do(offload: bool, tmp_path: Path) -> None:
    """One rank: NCCL wants a GPU for each. Offloaded weights are in CPU memory before and after each update."""
    config = changed(LR, lr=1e-3, activation_checkpointing=True)
    whole = Actor(tiny_model(head_dim=16).to("cuda", torch.bfloat16), config)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        model = tiny_model(head_dim=16).to("cuda", torch.bfloat16)
        sharded = Actor(model, config, shard=True, offload=offload)
        for step in range(3):
            credited = sample(whole.model, [1.0, -0.5, 2.0, -1.5], seed=step, groups_of=2)
            norms = [actor.update(credited)["actor/grad_norm"] for actor in (whole, sharded)]
            assert norms[1] == pytest.approx(norms[0], rel=0.02)
            assert {weight.device.type for weight in model.parameters()} == {"cpu" if offload else "cuda"}
        assert sharded.device.type == "cuda"
        for mine, other in zip(sharded.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.allclose(gathered(mine).cuda().float(), other.float(), atol=5e-3)
    finally:
        dist.destroy_process_group()
