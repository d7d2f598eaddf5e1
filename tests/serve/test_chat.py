"""Completions by the shipped model: the tokens match the generator's, the response matches OpenAI's format."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from toolwise.errors import PolicyError
from toolwise.messages import Message
from toolwise.models import load_model
from toolwise.policies.local import LocalPolicy
from toolwise.protocols import Generation, Sampling
from toolwise.rollout.chat_tokenizer import ChatTokenizer
from toolwise.serve.chat import ServedModel, error_response
from toolwise.serve.request import BadRequestError, read_request
from toolwise.tools import build_tools

torch.set_num_threads(1)
SPECS = [tool.get_openai_tool_schema().model_dump() for tool in build_tools(["calculator"]).values()]
QUESTION = [{"role": "user", "content": "What is 531 * 77?"}]


@cache
def loaded() -> tuple[Any, Any]:
    return load_model("builtin:small", device="cpu")


class Says:
    """A generator with scripted output."""

    def __init__(self, text: str, *, ended: bool = True, version: int = 0) -> None:
        self.ids = [*loaded()[1].encode(text), *([loaded()[1].end_id] if ended else [])]
        self.ended = ended
        self.version = version
        self.asked: list[tuple[Sequence[int], Sampling]] = []

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        self.asked.append((token_ids, sampling))
        return Generation(self.ids, [-0.5] * len(self.ids), "stop" if self.ended else "length", self.version)


def complete(generator: Any = None, parser: str = "auto", **fields: Any) -> dict[str, Any]:
    model, chat = loaded()
    sampling = Sampling(max_new_tokens=32)
    served = ServedModel("small", generator or LocalPolicy(model, chat, sampling), chat, sampling, parser)
    request = read_request(json.dumps({"model": "small", "messages": QUESTION, **fields}).encode())
    return asyncio.run(served.complete(request))


def test_a_completion_has_openais_form() -> None:
    answer = complete(Says("Hello you"))
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello you"},
            "finish_reason": "stop",
            "logprobs": None,
        }
    ]
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert "prompt_token_ids" not in answer


def message_of(text: str, parser: str) -> dict[str, Any]:
    message: dict[str, Any] = complete(Says(text), parser, tools=SPECS)["choices"][0]["message"]
    return message


def test_the_models_own_format_is_read_with_the_types_of_the_tools() -> None:
    text = "<tool_call><function=calculator><parameter=expression>5</parameter></function></tool_call>"
    (call,) = message_of(text, "qwen3_coder")["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"expression": "5"}  # its schema says a string


def test_thoughts_that_the_format_keeps_apart_are_reasoning() -> None:
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>It is 4."
    assert message_of(text, "gpt_oss") == {"role": "assistant", "content": "It is 4.", "reasoning_content": "hm"}


def test_a_served_policy_keeps_its_parser() -> None:
    model, chat = loaded()
    policy = LocalPolicy(model, chat, Sampling(max_new_tokens=4), parser="mistral")
    assert ServedModel.of(policy, "small").call_format.name == "mistral"
    assert ServedModel.of(policy, "small", parser="glm").call_format.name == "glm"
    assert ServedModel("small", policy, chat, Sampling()).call_format.name == "hermes", "its template's"


@pytest.mark.parametrize("excess", [0, 1])
def test_a_prompt_with_too_many_characters_is_not_tokenised(excess: int, monkeypatch: pytest.MonkeyPatch) -> None:
    says = Says("Hello you")
    served = ServedModel("small", says, loaded()[1], Sampling(), max_context=64)
    monkeypatch.setattr(ChatTokenizer, "render", lambda *_: "x" * (served.limits.prompt_chars + excess))
    asked = served.complete(read_request(json.dumps({"model": "small", "messages": QUESTION}).encode()))
    if not excess:
        asyncio.run(asked)
    else:
        with pytest.raises(BadRequestError, match="characters cannot fit the model's 64 tokens"):
            asyncio.run(asked)
    assert len(says.asked) == 1 - excess


def test_ids_and_log_probs_where_asked_for() -> None:
    says = Says("Hello you", version=4)
    answer = complete(says, logprobs=True, return_token_ids=True)
    choice = answer["choices"][0]
    assert choice["token_ids"] == says.ids
    assert answer["prompt_token_ids"] == loaded()[1].start([Message(role="user", content="What is 531 * 77?")])
    entries = choice["logprobs"]["content"]
    assert [e["logprob"] for e in entries] == [-0.5] * len(says.ids)
    assert "".join(e["token"] for e in entries) == "Hello you<|end|>"
    assert answer["policy_version"] == 4
    assert answer["usage"]["completion_tokens"] == len(says.ids)


def test_tokens_as_ids() -> None:
    says = Says("Hello")
    choice = complete(says, logprobs=True, return_tokens_as_token_ids=True)["choices"][0]
    assert [e["token"] for e in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in says.ids]


CALL_TEXT = '<tool_call>{"name": "calculator", "arguments": {"expression": "1 + 1"}}</tool_call>'


def test_calls_are_taken_out_of_the_text() -> None:
    choice = complete(Says(CALL_TEXT), tools=SPECS)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "calculator", "arguments": '{"expression": "1 + 1"}'}


@pytest.mark.parametrize("more", [{}, {"tools": SPECS, "tool_choice": "none"}], ids=["no tools", "none chosen"])
def test_calls_are_text_where_nobody_asked_for_calls(more: dict[str, Any]) -> None:
    choice = complete(Says(CALL_TEXT), **more)["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": CALL_TEXT}
    assert choice["finish_reason"] == "stop"


def test_tools_are_shown_also_where_none_is_to_be_chosen() -> None:
    shown, hidden = Says("x"), Says("x")
    complete(shown, tools=SPECS, tool_choice="none")
    complete(hidden)
    assert len(shown.asked[0][0]) > len(hidden.asked[0][0])


def test_a_reply_cut_off_says_so() -> None:
    assert complete(Says("Hello", ended=False))["choices"][0]["finish_reason"] == "length"


def test_the_request_says_how_to_sample() -> None:
    says = Says("x")
    complete(says, temperature=0.5, max_tokens=7, seed=11, stop_token_ids=[3])
    assert says.asked[0][1] == Sampling(0.5, 7, True, 11, (loaded()[1].end_id, 3))
    complete(says, temperature=0)
    assert not says.asked[1][1].do_sample
    complete(says, max_tokens=7, max_completion_tokens=9)
    assert says.asked[2][1].max_new_tokens == 9
    assert says.asked[2][1].temperature == 1.0


def test_without_a_seed_draws_differ() -> None:
    says = Says("x")
    complete(says)
    complete(says)
    assert says.asked[0][1].seed != says.asked[1][1].seed


def test_several_choices_have_seeds_of_their_own_and_the_first_has_the_one_given() -> None:
    says = Says("x")
    answer = complete(says, n=4, seed=5)
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    seeds = [sampling.seed for _, sampling in says.asked]
    assert seeds[0] == 5
    assert len(set(seeds)) == 4


def test_the_real_model_draws_the_same_by_seed_and_otherwise_by_choice() -> None:
    one, two = (complete(n=3, seed=5, temperature=3.0, max_tokens=8, return_token_ids=True) for _ in range(2))
    drawn = [tuple(c["token_ids"]) for c in one["choices"]]
    assert drawn == [tuple(c["token_ids"]) for c in two["choices"]]
    assert len(set(drawn)) == 3


def refusal(generator: Any = None, **fields: Any) -> BadRequestError:
    with pytest.raises(BadRequestError) as caught:
        complete(generator, **fields)
    return caught.value


def test_another_model_is_not_found() -> None:
    fault = refusal(model="large")
    assert (fault.status, fault.code) == (404, "model_not_found")


def test_a_context_overflow_has_openais_code() -> None:
    fault = refusal(max_tokens=5_000)
    assert (fault.status, fault.code) == (400, "context_length_exceeded")


def test_a_template_that_fails_is_the_requests_fault() -> None:
    broken = [{"type": "function", "function": {"name": "f", "parameters": {"properties": 5}}}]
    fault = refusal(Says("x"), tools=broken)
    assert fault.status == 400
    assert "template" in str(fault)


def test_errors_in_openais_form() -> None:
    status, body = error_response(BadRequestError("no\nway", param="n", code="c", status=404))
    assert (status, body) == (
        404,
        {"error": {"message": "no way", "type": "invalid_request_error", "param": "n", "code": "c"}},
    )
    assert error_response(PolicyError("generation failed"))[1]["error"]["message"] == "generation failed"
    assert error_response(KeyError("secret path")) == (
        500,
        {"error": {"message": "internal error", "type": "server_error", "param": None, "code": None}},
    )


CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "2 + 3"}}</tool_call>'


@pytest.mark.parametrize(
    ("stop", "content", "arguments"),
    [
        ("name", 'Hm. <tool_call>{"', None),  # before the name: no call was begun, so all of it is text
        ("tor", 'Hm. <tool_call>{"name": "calcula', None),
        (" + ", 'Hm. <tool_call>{"name": "calculator", "arguments": {"expression": "2', None),  # nobody can run that
        ("</tool_call>", "Hm.", {"expression": "2 + 3"}),
        ("Hm", "", None),
    ],
)
def test_a_stop_string_within_a_call(stop: str, content: str, arguments: dict[str, str] | None) -> None:
    [choice] = complete(Says(f"Hm. {CALL}"), "hermes", tools=SPECS, stop=[stop])["choices"]
    assert (choice["message"]["content"] or "") == content
    calls = choice["message"].get("tool_calls")
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    assert [json.loads(call["function"]["arguments"]) for call in calls or ()] == ([arguments] if arguments else [])
