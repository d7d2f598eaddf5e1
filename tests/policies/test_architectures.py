"""Published architectures that the engine cannot run generate with transformers: the same tokens and log-probs."""

from __future__ import annotations

import pytest
import torch
from architectures import ARCHITECTURES, LONG, TRANSFORMERS, build
from engine_cases import assert_forced, assert_greedy, random_ids, reference, run
from selection import quick_first
from transformers import RwkvConfig, RwkvForCausalLM

from toolwise.engine import Engine, engine_path
from toolwise.errors import ContextFullError, ModelError, PolicyError
from toolwise.policies.transformers_generation import BatchGenerator, generate_batch
from toolwise.protocols import Sampling

NEW = 9
PROMPTS = [random_ids(length, seed) for seed, length in enumerate((1, 3, 14, 14, 26))]
REFUSED = [name for name, architecture in ARCHITECTURES.items() if architecture.engine == TRANSFORMERS]


@pytest.mark.parametrize("name", quick_first(ARCHITECTURES, (*REFUSED, "gemma3", "gpt-oss", "phi3, longrope")))
def test_greedy_tokens_and_log_probs_are_those_of_transformers(name: str) -> None:
    """Prompts of unequal lengths, one of them twice, in one batch that rows leave at different times."""
    model = build(name)
    prompts = [*PROMPTS, PROMPTS[2]]
    samplings = [Sampling(max_new_tokens=NEW - i, do_sample=False) for i in range(len(prompts))]
    found = generate_batch(model, prompts, samplings, pad_id=0, policy_version=0)
    for ids, sampling, result in zip(prompts, samplings, found, strict=True):
        assert len(result.token_ids) == sampling.max_new_tokens
        assert_greedy(model, ids, list(result.token_ids), reference(model, ids, sampling.max_new_tokens))
        assert_forced(model, ids, result)


@pytest.mark.parametrize("name", REFUSED)
def test_the_engine_says_why_it_refuses_them(name: str) -> None:
    model = build(name)
    path, reason = engine_path(model)
    assert path == TRANSFORMERS
    with pytest.raises(ModelError, match=r'set rollout.engine = "transformers"') as caught:
        Engine(model)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_longrope_is_run_up_to_its_original_length() -> None:
    """Beyond it, the keys in the cache would have been rotated by other angles."""
    limit = LONG["original_max_position_embeddings"]
    generator = BatchGenerator(build("phi3, longrope"), 0, 4)
    assert len(run(generator.generate(random_ids(limit - 3, 0), Sampling(max_new_tokens=3))).token_ids) == 3
    with pytest.raises(ContextFullError, match="longrope"):
        run(generator.generate(random_ids(limit - 3, 0), Sampling(max_new_tokens=4)))


def test_a_model_that_keeps_its_state_elsewhere_is_refused_in_one_line() -> None:
    """RWKV ignores the cache that it is given, so each token would be the first."""
    config = RwkvConfig(vocab_size=97, hidden_size=32, attention_hidden_size=32, num_hidden_layers=2, context_length=64)
    with pytest.raises(PolicyError, match="other logits over transformers' cache than without") as caught:
        generate_batch(RwkvForCausalLM(config).eval(), [[5, 6]], [Sampling()], pad_id=0, policy_version=0)
    assert "\n" not in str(caught.value)


def test_a_model_without_a_cache_of_transformers_is_refused_in_one_line() -> None:
    class Stateful(torch.nn.Linear):
        def forward(self, input_ids: torch.Tensor, state: torch.Tensor | None = None) -> torch.Tensor:
            return input_ids

    with pytest.raises(PolicyError, match="does not use transformers' cache"):
        generate_batch(Stateful(2, 2), [[1]], [Sampling()], pad_id=0, policy_version=0)
