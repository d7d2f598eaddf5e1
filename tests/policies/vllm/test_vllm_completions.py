"""Completion requests, and replies that are invalid."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from toolwise.policies.vllm.completions import completion_body, read_completion
from toolwise.protocols import Sampling
from toolwise.remote.server_errors import ServerError

CHOICE: dict[str, Any] = {
    "finish_reason": "stop",
    "token_ids": [7, 2],
    "prompt_token_ids": [1, 5],
    "logprobs": {"token_logprobs": [-0.5, -0.25]},
}


def reply(**changes: Any) -> dict[str, Any]:
    return {"choices": [CHOICE | changes]}


def test_a_request_says_all_that_shapes_a_draw() -> None:
    body = completion_body("m", array("i", [1, 5]), Sampling(temperature=0.7, max_new_tokens=9, stop_token_ids=(2, 3)))
    assert body["prompt"] == [1, 5]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("m", 9, 0.7)
    assert (body["stop_token_ids"], body["ignore_eos"]) == ([2, 3], True)
    assert (body["logprobs"], body["return_token_ids"]) == (0, True)
    unshaped = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    assert [body[name] for name in unshaped] == [1.0, -1, 0.0, 1.0, 0.0, 0.0]


def test_stop_strings_are_sent_and_stay_in_the_reply() -> None:
    body = completion_body("m", [1], Sampling(stop_strings=("</answer>",)))
    assert (body["stop"], body["include_stop_str_in_output"]) == (["</answer>"], True)
    assert "stop" not in completion_body("m", [1], Sampling())


def test_greedy_is_temperature_zero() -> None:
    assert completion_body("m", [1], Sampling(do_sample=False, temperature=0.7))["temperature"] == 0.0


def test_seeds_fit_into_what_a_server_takes() -> None:
    assert completion_body("m", [1], Sampling(seed=(1 << 64) - 1))["seed"] == (1 << 63) - 1


def test_a_reply_is_read_to_the_token() -> None:
    found = read_completion(reply(), [1, 5])
    assert (list(found.token_ids), list(found.logprobs), found.finish_reason) == ([7, 2], [-0.5, -0.25], "stop")


@pytest.mark.parametrize(
    ("body", "told", "retryable"),
    [
        ({"error": "no"}, "no choices", True),
        ([], "no choices", True),
        (reply(finish_reason="abort"), "finish_reason 'abort'", True),
        (reply(token_ids=None), "no token_ids", False),
        (reply(prompt_token_ids=None), "no prompt_token_ids", False),
        (reply(token_ids=[1, -1]), "not a list of token ids", False),
        (reply(prompt_token_ids=[5]), "a different prompt", False),
        (reply(token_ids=[7]), "1 token ids and 2 log-probs", False),
        (reply(token_ids=[], logprobs={"token_logprobs": []}), "0 token ids", False),
        (reply(logprobs=None), "2 token ids and 0 log-probs", False),
        (reply(logprobs={"token_logprobs": [None, -1.0]}), "not a list of numbers", False),
        (reply(logprobs={"token_logprobs": [float("nan"), -1.0]}), "NaN", False),
    ],
)
def test_a_reply_that_is_none_is_a_typed_fault(body: Any, told: str, retryable: bool) -> None:
    with pytest.raises(ServerError, match=told) as fault:
        read_completion(body, [1, 5])
    assert (fault.value.kind, fault.value.retryable) == ("bad_reply", retryable)
