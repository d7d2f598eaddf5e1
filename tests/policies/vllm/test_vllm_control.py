"""Control endpoints: model info, weight transfer, and one-line errors for each failure."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from toolwise.errors import PolicyError
from toolwise.policies.vllm.control import VllmControlClient
from toolwise.policies.vllm.weights import WeightsFolder


def answering(status: int, **content: Any) -> VllmControlClient:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, **content))
    return VllmControlClient("http://server/v1", timeout_s=5, client=httpx.Client(transport=transport))


def one_line(fault: pytest.ExceptionInfo[PolicyError]) -> str:
    assert "\n" not in str(fault.value)
    return str(fault.value)


def test_it_says_what_it_serves(stand_in: Any) -> None:
    model_info = VllmControlClient(stand_in.url, timeout_s=5).model_info()
    assert (model_info.name, model_info.max_context) == ("small", 4096)
    assert (model_info.dtype, model_info.logprobs_mode) == ("float32", "processed_logprobs")
    assert VllmControlClient(stand_in.url, timeout_s=5).model_info("adapter").name == "adapter"


@pytest.mark.parametrize(
    ("cache", "tokens"),
    [
        ({"num_gpu_blocks": 100, "block_size": 16}, 1600),
        ({"num_gpu_blocks": 100, "block_size": 16, "kv_cache_size_tokens": 900}, 900),
        ({"num_gpu_blocks": None}, 0),
        (None, 0),
    ],
)
def test_it_says_what_its_cache_holds(stand_in: Any, cache: Any, tokens: int) -> None:
    stand_in.cache = cache
    assert VllmControlClient(stand_in.url, timeout_s=5).model_info().cache_tokens == tokens


def test_weights_go_in_while_nobody_is_served_and_nothing_cached_stays(stand_in: Any, loaded: Any) -> None:
    weights = WeightsFolder()
    try:
        VllmControlClient(stand_in.url, timeout_s=5).load(weights.write(loaded[0]), 3)
    finally:
        weights.close()
    assert stand_in.asked == ["pause", "collective_rpc", "reset_prefix_cache", "update_weight_version", "resume"]
    assert (stand_in.version, stand_in.paused) == ("3", False)


def test_no_server() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        with pytest.raises(PolicyError, match=f"there is no vLLM server at http://127.0.0.1:{port} ") as fault:
            VllmControlClient(f"http://127.0.0.1:{port}/v1", timeout_s=5).model_info()
    assert "rollout.vllm.base_url" in one_line(fault)


def test_another_name(stand_in: Any) -> None:
    with pytest.raises(PolicyError, match=r"serves small, adapter, not 'large': set rollout\.vllm\.model") as fault:
        VllmControlClient(stand_in.url, timeout_s=5).model_info("large")
    one_line(fault)


def test_no_transfer_api(stand_in: Any) -> None:
    stand_in.development = False
    control = VllmControlClient(stand_in.url, timeout_s=5)
    with pytest.raises(PolicyError, match="does not accept new weights: start it with VLLM_SERVER_DEV_MODE=1") as fault:
        control.model_info()
    one_line(fault)
    with pytest.raises(PolicyError, match="does not accept new weights"):
        control.load(Path("/nowhere"), 1)


def test_weights_that_are_refused(stand_in: Any) -> None:
    stand_in.refuses_weights = True
    with pytest.raises(PolicyError, match=r"shapes do not match; does it serve the model at model\.path") as fault:
        VllmControlClient(stand_in.url, timeout_s=5).load(Path("/nowhere"), 1)
    one_line(fault)
    assert not stand_in.paused


def test_a_cache_that_is_not_forgotten(stand_in: Any, loaded: Any) -> None:
    stand_in.resets = False
    weights = WeightsFolder()
    try:
        with pytest.raises(PolicyError, match="did not reset its prefix cache"):
            VllmControlClient(stand_in.url, timeout_s=5).load(weights.write(loaded[0]), 1)
    finally:
        weights.close()


@pytest.mark.parametrize(
    ("status", "content", "told"),
    [
        (200, {"text": "<html>"}, "not in JSON"),
        (200, {"json": []}, "lists no models"),
        (200, {"json": {"data": []}}, "serves nothing"),
        (401, {"json": {"error": {"message": "bad\nkey"}}}, "HTTP 401: bad key"),
    ],
)
def test_something_else_answers(status: int, content: dict[str, Any], told: str) -> None:
    with pytest.raises(PolicyError, match=told) as fault:
        answering(status, **content).model_info()
    one_line(fault)


def test_an_answer_that_does_not_come() -> None:
    def late(_: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("late")

    control = VllmControlClient(
        "http://server/v1", timeout_s=1, client=httpx.Client(transport=httpx.MockTransport(late))
    )
    with pytest.raises(PolicyError, match=r"raise rollout\.vllm\.timeout_s"):
        control.model_info()
