"""LoRA with real peft: adapters learn, the base model does not, and the saved model is a plain one."""

from __future__ import annotations

import asyncio
import copy
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from learner_cases import LR, PAD, changed, current_logprobs, sample, tiny_model
from transformers import LlamaForCausalLM

from toolwise.config.schema import LoraConfig
from toolwise.engine import Engine
from toolwise.errors import ConfigError, MissingExtraError
from toolwise.learner.actor import Actor
from toolwise.learner.lora import Adapters
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
            assert list(found.logprobs) == pytest.approx(list(drawn.logprobs), abs=1e-5)


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
    torch.testing.assert_close(
        current_logprobs(Actor(merged, LR), credited), current_logprobs(actor, credited), rtol=0, atol=1e-4
    )
    again = Actor(tiny_model(), ADAPTED)
    again.load_state_dict(copy.deepcopy(actor.state_dict()))
    again.load_weights(tmp_path)
    assert torch.equal(current_logprobs(again, credited), current_logprobs(actor, credited))


def test_layers_that_are_not_there_are_named() -> None:
    with pytest.raises(ConfigError, match=r"actor\.lora\.target_modules"):
        Adapters(tiny_model(), LoraConfig(rank=16, target_modules=["nowhere"]))
