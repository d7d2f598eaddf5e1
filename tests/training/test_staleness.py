"""What asynchronous training reports of each step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from toolwise.config.schema import RunConfig
from toolwise.engine import Engine
from toolwise.engine.request import Request
from toolwise.rollout.queue import RolloutQueue
from toolwise.training.run import Run
from toolwise.training.staleness import StepWaits


def metrics_of_a_step(engine: Engine, address: str) -> dict[str, float]:
    run = SimpleNamespace(
        config=RunConfig.model_validate({"cluster": {"address": address}}),
        policy=SimpleNamespace(engine=engine),
        queue=RolloutQueue(per_update=1),
    )
    waits = StepWaits(cast("Run", run))
    return dict(waits.metrics(waits.started))


def test_tokens_in_flight_are_those_of_the_engine_and_left_out_on_a_cluster() -> None:
    """On a cluster this process's engine samples nothing: it would be reported as idle at all times."""
    shape: Any = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    torch.manual_seed(0)
    config = Qwen2Config(**shape, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64)
    engine = Engine(Qwen2ForCausalLM(config), blocks=8)
    engine.scheduler.waiting += [cast("Request", SimpleNamespace(tokens=[1] * count)) for count in (3, 4)]
    assert metrics_of_a_step(engine, "")["async/tokens_in_flight"] == 7.0
    assert "async/tokens_in_flight" not in metrics_of_a_step(engine, "local")
    assert metrics_of_a_step(engine, "local")["async/in_progress"] == 0.0
