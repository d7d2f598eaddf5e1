"""LoRA: adapters learn, the model beneath does not, and what is saved is a plain model. Needs the extra `peft`."""

from __future__ import annotations

import copy
import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from learner_cases import LR, PAD, sample, tiny_model
from transformers import LlamaForCausalLM

from toolwise.errors import ConfigError, MissingExtraError
from toolwise.learner.actor import Actor
from toolwise.learner.lora import Adapters, LoraSettings
from toolwise.policies.decoding import generate_batch
from toolwise.protocols import Sampling

torch.set_num_threads(1)
THERE = importlib.util.find_spec("peft") is not None
with_peft = pytest.mark.skipif(not THERE, reason="peft is not installed")
ADAPTED = replace(LR, lr=0.05, lora=LoraSettings(rank=4, alpha=8.0))


@pytest.mark.skipif(THERE, reason="peft is installed")
def test_without_peft_it_says_what_to_install() -> None:
    with pytest.raises(MissingExtraError, match=r"pip install 'toolwise\[peft\]'"):
        Actor(tiny_model(), ADAPTED)


@with_peft
def test_only_adapters_learn_and_the_policy_draws_through_them() -> None:
    model = tiny_model()
    base = {name: w.detach().clone() for name, w in model.named_parameters()}
    actor = Actor(model, ADAPTED)
    credited = sample(model, [1.0, -1.0])
    before = actor.logprobs(credited)
    actor.update(credited)
    actor.update(credited)
    assert (actor.logprobs(credited) - before).abs().max() > 1e-3
    kept = {name.replace(".base_layer", ""): w for name, w in model.named_parameters() if "lora_" not in name}
    assert all(torch.equal(kept[name], w) for name, w in base.items())
    assert sum(w.numel() for w in actor.optimizer.weights) < 0.3 * sum(w.numel() for w in base.values())
    [out] = generate_batch(model, [[5, 6, 7]], [Sampling(max_new_tokens=4)], pad_id=PAD, policy_version=0)
    assert len(out.token_ids) > 0


@with_peft
def test_the_reference_is_the_model_without_its_adapters() -> None:
    model = tiny_model()
    credited = sample(model, [1.0, -1.0])
    scored = [c.annotated.scored for c in credited]
    actor = Actor(model, replace(ADAPTED, kl="loss", kl_coef=0.0))
    began = actor.annotate(scored)
    for _ in range(2):
        actor.update([replace(c, annotated=a) for c, a in zip(credited, began, strict=True)])
    for a, b in zip(began, actor.annotate(scored), strict=True):
        assert a.ref_logprobs is not None
        assert b.ref_logprobs is not None
        assert [x.tolist() for x in a.ref_logprobs] == [x.tolist() for x in b.ref_logprobs]


@with_peft
def test_checkpoints_keep_adapters_and_the_saved_model_is_plain(tmp_path: Path) -> None:
    actor = Actor(tiny_model(), ADAPTED)
    credited = sample(tiny_model(), [1.0, -1.0])
    actor.update(credited)
    actor.update(credited)
    actor.save_model(tmp_path)
    merged = LlamaForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(Actor(merged, LR).logprobs(credited), actor.logprobs(credited), rtol=0, atol=1e-4)
    again = Actor(tiny_model(), ADAPTED)
    again.load_state_dict(copy.deepcopy(actor.state_dict()))
    again.load_weights(tmp_path)
    assert torch.equal(again.logprobs(credited), actor.logprobs(credited))


@with_peft
def test_layers_that_are_not_there_are_named() -> None:
    with pytest.raises(ConfigError, match=r"actor\.lora\.target_modules"):
        Adapters(tiny_model(), LoraSettings(target_modules=("nowhere",)))
