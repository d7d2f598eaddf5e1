"""LoRA with real peft: adapters learn, the base model does not, and the saved model is a plain one."""

from __future__ import annotations

import asyncio
import copy
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import build
from learner_cases import LR, PAD, changed, credit, current_logprobs, sample, tiny_model
from precision import assert_fp32_close
from selection import quick_first
from transformers import LlamaForCausalLM

from toolwise.agent.export.folder import _check_adapters
from toolwise.config.loader import build_config
from toolwise.config.schema import LoraConfig, RunConfig
from toolwise.engine import Engine
from toolwise.errors import CheckpointError, ConfigError, MissingExtraError
from toolwise.learner.actor import Actor
from toolwise.learner.critic import Critic
from toolwise.learner.lora import Adapters, write_adapters
from toolwise.models.merged_weights import merged_copy, plain_layer
from toolwise.policies.transformers_generation import generate_batch
from toolwise.protocols import Generation, Sampling
from toolwise.types import AnnotatedRollout, CreditedRollout

torch.set_num_threads(1)
ADAPTED = changed(LR, lr=0.05, lora={"rank": 4, "alpha": 8.0})


def test_without_peft_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'toolwise\[peft\]'"):
        Actor(tiny_model(), ADAPTED)


def test_only_adapters_learn_and_the_policy_samples_through_them() -> None:
    model = tiny_model()
    base = {name: w.detach().clone() for name, w in model.named_parameters()}
    actor = Actor(model, ADAPTED)
    credited = sample(model, [1.0, -1.0])
    before = current_logprobs(actor, credited)
    actor.update(credited)
    actor.update(credited)
    assert (current_logprobs(actor, credited) - before).abs().max() > 1e-3
    kept = {name.replace(".base_layer", ""): w for name, w in model.named_parameters() if "lora_" not in name}
    assert all(torch.equal(kept[name], w) for name, w in base.items())
    assert sum(w.numel() for w in actor.optimizer.weights) < 0.3 * sum(w.numel() for w in base.values())
    [out] = generate_batch(model, [[5, 6, 7]], [Sampling(max_new_tokens=4)], pad_id=PAD, policy_version=0)
    assert len(out.token_ids) > 0


def test_the_reference_is_the_model_without_its_adapters() -> None:
    model = tiny_model()
    credited = sample(model, [1.0, -1.0])
    scored = [c.annotated.scored for c in credited]
    actor = Actor(model, changed(ADAPTED, {"algorithm": {"kl": "loss", "kl_coef": 0.0}}))
    began = actor.annotate(scored)
    for _ in range(2):
        actor.update([replace(c, annotated=a) for c, a in zip(credited, began, strict=True)])
    for a, b in zip(began, actor.annotate(scored), strict=True):
        assert a.ref_logprobs is not None
        assert b.ref_logprobs is not None
        assert [x.tolist() for x in a.ref_logprobs] == [x.tolist() for x in b.ref_logprobs]
    assert actor.reference is not None
    assert not any("lora" in name for name, _ in actor.reference.named_parameters())
    kept = {id(weight) for weight in model.parameters()}
    assert all(id(weight) in kept for weight in actor.reference.parameters()), "no second copy of the weights"


def test_the_reference_runs_while_the_policy_samples_through_its_adapters() -> None:
    """Neither switches anything in the model that both run."""
    model = tiny_model()
    actor = Actor(model, changed(ADAPTED, {"algorithm": {"kl": "loss", "kl_coef": 0.0}}))
    credited = sample(model, [1.0, -1.0] * 4)
    actor.update([replace(c, annotated=a) for c, a in zip(credited, annotated(actor, credited), strict=True)])
    alone = [[x.tolist() for x in a.ref_logprobs or ()] for a in annotated(actor, credited)]
    ids, sampling = [5, 6, 7], Sampling(max_new_tokens=12, do_sample=False)
    engine = Engine(model, blocks=64)
    drawn = asyncio.run(engine.generate(ids, sampling))

    async def draw() -> list[Generation]:
        return [await engine.generate(ids, sampling) for _ in range(30)]

    with ThreadPoolExecutor(1) as pool:
        drawing = pool.submit(asyncio.run, draw())
        while not drawing.done():
            assert [[x.tolist() for x in a.ref_logprobs or ()] for a in annotated(actor, credited)] == alone
        for found in drawing.result():
            assert found.token_ids == drawn.token_ids
            assert_fp32_close(found.logprobs, drawn.logprobs)


def annotated(actor: Actor, credited: Sequence[CreditedRollout]) -> list[AnnotatedRollout]:
    return actor.annotate([c.annotated.scored for c in credited])


def test_adapters_are_seeded_without_touching_the_global_random_state() -> None:
    torch.manual_seed(1)
    wanted = torch.rand(3).tolist()
    torch.manual_seed(1)
    first, again, other = tiny_model(), tiny_model(), tiny_model()
    torch.manual_seed(1)
    for model, seed in ((first, 3), (again, 3), (other, 4)):
        Adapters(model, LoraConfig(rank=16), seed)
    assert torch.rand(3).tolist() == wanted
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    held = [model.get_parameter(name) for model in (first, again, other)]
    assert torch.equal(held[0], held[1])
    assert not torch.equal(held[0], held[2])


def test_checkpoints_keep_adapters_and_the_saved_model_is_plain(tmp_path: Path) -> None:
    actor = Actor(tiny_model(), ADAPTED)
    credited = sample(tiny_model(), [1.0, -1.0])
    actor.update(credited)
    actor.update(credited)
    actor.save_model(tmp_path)
    merged = LlamaForCausalLM.from_pretrained(tmp_path)
    assert_fp32_close(current_logprobs(Actor(merged, LR), credited), current_logprobs(actor, credited))
    again = Actor(tiny_model(), ADAPTED)
    again.load_state_dict(copy.deepcopy(actor.state_dict()))
    again.load_weights(tmp_path)
    assert torch.equal(current_logprobs(again, credited), current_logprobs(actor, credited))


@pytest.mark.parametrize("updates", quick_first([5, 50], [5]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_engine_and_learner_agree_at_every_update(dtype: torch.dtype, updates: int) -> None:
    """Engine, learner and reference over one model; the mismatch check would end it. Both compute with the same merged
    weights, so half precision costs no more than without adapters: 5e-3 here, a tenth of the check's limit."""
    model = tiny_model().to(dtype)
    engine = Engine(model, blocks=256)
    settings = {"lr": 3e-3, "mismatch_check": "stop", "lora": {"rank": 4, "alpha": 8.0}}
    actor = Actor(model, changed(LR, {"algorithm": {"kl": "loss", "kl_coef": 0.01}}, **settings))
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]

    async def draw(step: int) -> list[Generation]:
        samplings = [Sampling(max_new_tokens=12, seed=100 * step + n) for n in range(8)]
        return await asyncio.gather(*(engine.generate(prompts[n % 2], s) for n, s in enumerate(samplings)))

    gaps = []
    for step in range(updates):
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
        pairs = zip(credited, annotated(actor, credited), strict=True)
        metrics = actor.update([replace(c, annotated=a) for c, a in pairs])
        assert metrics["actor/skipped_updates"] == 0.0
        engine.weights_changed(actor.version)
        gaps.append(metrics["canary/logprob_gap_max" if dtype is torch.float32 else "canary/logprob_gap_mean"])
    assert max(gaps) < (1e-4 if dtype is torch.float32 else 5e-3)
    layer = model.model.layers[0].mlp.up_proj
    expected = layer.base_layer.weight.float() + layer.get_delta_weight("default")
    errors = (plain_layer(layer).weight.float() - expected).abs()
    assert (errors <= expected.abs() * torch.finfo(dtype).eps + 1e-6).all(), "not merged after the last update"
    assert not torch.equal(plain_layer(layer).weight, layer.base_layer.weight)


def test_half_precision_adapters_are_fp32_and_frozen_weights_have_no_masters() -> None:
    model = tiny_model().to(torch.bfloat16)
    actor = Actor(model, ADAPTED)
    assert {weight.dtype for weight in actor.optimizer.weights} == {torch.float32}
    assert all(
        weight is master for weight, master in zip(actor.optimizer.weights, actor.optimizer.masters, strict=True)
    )
    trained = sum(weight.numel() for weight in actor.optimizer.weights)
    assert trained == sum(w.numel() for name, w in model.named_parameters() if "lora_" in name)


def test_the_saved_model_is_bit_for_bit_what_the_engine_ran(tmp_path: Path) -> None:
    """In half precision too, where merging again elsewhere could round differently."""
    model = tiny_model().to(torch.bfloat16)
    actor = Actor(model, ADAPTED)
    actor.update(sample(model, [1.0, -1.0]))
    actor.save_model(tmp_path)
    saved = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    ran = Engine(model, blocks=8).runner.model.state_dict()
    assert saved.keys() == ran.keys()
    assert all(torch.equal(saved[name], weight) for name, weight in ran.items())


def test_a_critic_beside_adapters_is_trained_in_full() -> None:
    model = tiny_model()
    config = changed(ADAPTED, {"algorithm": {"adv_estimator": "gae"}, "critic": {"lr": 1e-2}})
    critic = Critic(copy.deepcopy(model), config, per="token")
    actor = Actor(model, config, critic=critic)
    before = [weight.detach().clone() for weight in critic.trunk.parameters()]
    credited = sample(model, [1.0, -1.0])
    for _ in range(2):  # the value head starts at zero, so the first update moves it alone
        scored = annotated(actor, credited)
        returns = [tuple(np.ones(len(values), dtype=np.float32) for values in a.values or ()) for a in scored]
        actor.update([replace(c, annotated=a, returns=r) for c, a, r in zip(credited, scored, returns, strict=True)])
    assert all(not torch.equal(old, new) for old, new in zip(before, critic.trunk.parameters(), strict=True))
    assert not any("lora" in name for name, _ in critic.model.named_parameters())


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        ({"rank": 4, "target_modules": ["nowhere"]}, r"no layer 'nowhere' \(the linear layers of LlamaForCausalLM are "
         r"down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj\)"),
        ({"rank": 4, "target_modules": ["q_prj"]}, "no layer 'q_prj'; did you mean 'q_proj'"),
        ({"rank": 4, "target_modules": [""]}, "no layer ''"),
        ({"rank": 4, "target_modules": ["mlp"]}, r"model\.layers\.0\.mlp is not a linear layer but LlamaMLP"),
        ({"rank": 17}, r"rank is 17, but model\.layers\.0\.self_attn\.k_proj is 16 x 32: use a rank of at most 16"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_the_model_are_refused(lora: dict[str, Any], said: str) -> None:
    model = tiny_model()
    with pytest.raises(ConfigError, match=said):
        Adapters(model, LoraConfig(**lora))
    assert not any("lora_" in name for name, _ in model.named_parameters()), "the model was changed"


def test_layers_that_peft_adapts_in_another_way_are_refused() -> None:
    """It would adapt the experts in place of the shared expert, whose layers have the same names."""
    with pytest.raises(
        ConfigError, match=r"\(down_proj, experts, gate_proj, up_proj\): set it to \['kv_a_proj_with_mqa'"
    ):
        Adapters(build("deepseek-v3"), LoraConfig(rank=2))


def test_a_rank_as_large_as_the_smallest_layer_is_allowed() -> None:
    Adapters(tiny_model(), LoraConfig(rank=16))


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_tied_embeddings_and_head_are_refused(target: str) -> None:
    with pytest.raises(ConfigError, match="share their weights"):
        Adapters(tiny_model(tie_word_embeddings=True), LoraConfig(rank=2, target_modules=[target, "q_proj"]))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rank": 4, "alpha": 0}, "alpha` must be greater than 0"),
        ({"rank": 4, "alpha": float("inf")}, "alpha` must be a finite number"),
        ({"rank": -1}, "rank` must be greater than or equal to 0"),
        ({"rank": 4, "dropout": 0.1}, "dropout is not supported: the ratio of new to old probabilities"),
        ({"rank": 4, "use_rslora": True}, "unknown key `actor.lora.use_rslora`"),
        (
            {"target_modules": ["q_proj"]},
            "target_modules is set but rank is 0",
        ),
    ],
)
def test_settings_that_are_wrong_for_any_model_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_config(RunConfig, {"actor": {"lora": settings}}, source="run.toml")


def test_adapters_of_other_settings_are_refused() -> None:
    saved = Adapters(tiny_model(), LoraConfig(rank=4)).state_dict()
    with pytest.raises(CheckpointError, match=r"gate_proj\.lora_A\.weight is 4 x 32 in the checkpoint and missing"):
        Adapters(tiny_model(), LoraConfig(rank=4, target_modules=["k_proj", "down_proj"])).load_state_dict(saved)
    with pytest.raises(CheckpointError, match="is 4 x 48 in the checkpoint and 2 x 48 in the run"):
        Adapters(tiny_model(), LoraConfig(rank=2)).load_state_dict(saved)


@pytest.mark.parametrize("targets", [[], ["q_proj", "down_proj"], ["lm_head", "embed_tokens"]], ids=str)
def test_written_adapters_load_with_plain_peft(targets: list[str], tmp_path: Path) -> None:
    from peft import PeftModel

    model = tiny_model()
    config = changed(ADAPTED, lora={"rank": 4, "alpha": 8.0, "target_modules": targets})
    actor = Actor(model, config)
    credited = sample(model, [1.0, -1.0])
    for _ in range(2):
        actor.update(credited)
    assert actor.adapters is not None
    write_adapters(tmp_path, config.actor.lora, actor.adapters.state_dict(), "owner/base")
    loaded = PeftModel.from_pretrained(tiny_model(), tmp_path)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    expected = merged_copy(model)(input_ids=ids).logits
    torch.testing.assert_close(loaded(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-5)
    assert (tiny_model()(input_ids=ids).logits - expected).abs().max() > 1e-3
    assert json.loads((tmp_path / "adapter_config.json").read_bytes())["base_model_name_or_path"] == "owner/base"


def test_no_base_model_is_looked_up_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[str] = []
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("peft.utils.other.file_exists", lambda name, *_, **__: looked_up.append(name))
    model, lora = tiny_model(), LoraConfig(rank=2)
    model.name_or_path = model.config._name_or_path = "owner/base"
    adapters = Adapters(model, lora)
    assert adapters.wrapped.peft_config["default"].base_model_name_or_path == "owner/base"
    older = adapters.state_dict() | {"base_model.model.model.embed_tokens.weight": torch.zeros(3, 3)}
    write_adapters(tmp_path, lora, older, "owner/base")
    _check_adapters(tiny_model(), tmp_path)
    assert looked_up == []


def test_checkpoints_that_hold_embeddings_beside_the_adapters_still_load() -> None:
    adapters = Adapters(tiny_model(), LoraConfig(rank=2))
    saved = adapters.state_dict()
    adapters.load_state_dict(saved | {"base_model.model.model.embed_tokens.weight": torch.zeros(3, 3)})
    assert adapters.state_dict().keys() == saved.keys()
