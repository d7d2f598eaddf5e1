"""Servers that cannot be used for training are rejected before the first rollout."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from toolwise.errors import PolicyError
from toolwise.policies.vllm.control import ModelInfo, VllmControlClient
from toolwise.policies.vllm.server_check import check_logprobs, check_settings, check_tied_head, check_vocabulary
from toolwise.policies.vllm.weights import WeightsFolder

SERVED = ModelInfo("small", 4096, "float32", "processed_logprobs")


@pytest.fixture
def control(stand_in: Any) -> Iterator[VllmControlClient]:
    made = VllmControlClient(stand_in.url, timeout_s=20)
    yield made
    made.close()


@pytest.fixture
def weights() -> Iterator[WeightsFolder]:
    made = WeightsFolder()
    yield made
    made.close()


def test_a_server_that_fits_passes(control: VllmControlClient, loaded: Any, weights: WeightsFolder) -> None:
    check_settings(SERVED, loaded[0], control.root)
    check_vocabulary(control, SERVED, loaded[0])
    check_tied_head(control, SERVED, loaded[0], weights)
    control.load(weights.write(loaded[0]), 0)
    check_logprobs(control, SERVED, loaded[0])


@pytest.mark.parametrize(
    ("model_info", "told"),
    [
        (
            ModelInfo("m", 1, "bfloat16", "processed_logprobs"),
            "bfloat16 and the learner in float32: start it with --dtype",
        ),
        (ModelInfo("m", 1, "float32", "raw_logprobs"), "--logprobs-mode processed_logprobs"),
    ],
)
def test_a_server_started_with_other_settings(loaded: Any, model_info: ModelInfo, told: str) -> None:
    with pytest.raises(PolicyError, match=told):
        check_settings(model_info, loaded[0], "http://server")


@pytest.mark.parametrize(("change", "told"), [(1, "fewer"), (-1, "more")])
def test_another_vocabulary(control: VllmControlClient, loaded: Any, change: int, told: str) -> None:
    model = copy.deepcopy(loaded[0])
    model.config.vocab_size += change
    with pytest.raises(PolicyError, match=f"serves another model .small., with {told} tokens"):
        check_vocabulary(control, SERVED, model)


def test_a_head_that_stays_behind(
    stand_in: Any, control: VllmControlClient, loaded: Any, weights: WeightsFolder
) -> None:
    stand_in.keeps_head = True
    with pytest.raises(PolicyError, match="does not update the output head of a model with tied embeddings"):
        check_tied_head(control, SERVED, loaded[0], weights)


def test_weights_that_were_not_taken(
    stand_in: Any, control: VllmControlClient, loaded: Any, weights: WeightsFolder
) -> None:
    changed = copy.deepcopy(loaded[0])
    with torch.no_grad():
        changed.model.norm.weight.mul_(1.5)
    stand_in.ignores_weights = True
    control.load(weights.write(changed), 0)
    with pytest.raises(PolicyError, match=r"disagree on log-probs by .* did not load the weights"):
        check_logprobs(control, SERVED, changed)


def test_logprobs_of_before_temperature(stand_in: Any, control: VllmControlClient, loaded: Any) -> None:
    stand_in.logprobs_mode = "raw_logprobs"
    with pytest.raises(PolicyError, match="before temperature, start it with --logprobs-mode processed_logprobs"):
        check_logprobs(control, SERVED, loaded[0])


def test_a_server_that_tells_no_tokens(loaded: Any) -> None:
    import httpx

    transport = httpx.MockTransport(lambda _: httpx.Response(200, json={"choices": [{"finish_reason": "stop"}]}))
    control = VllmControlClient("http://server/v1", timeout_s=5, client=httpx.Client(transport=transport))
    with pytest.raises(PolicyError, match="http://server: the reply has no token_ids"):
        check_logprobs(control, SERVED, loaded[0])
