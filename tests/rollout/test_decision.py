"""Policy answers: accepted in all their forms, rejected if malformed."""

from __future__ import annotations

from typing import Any

import pytest

from toolwise.messages import ToolCall
from toolwise.rollout.decision import PolicyDecision

CALL = ToolCall(name="add", arguments={"a": 1}, id="call_7")


def test_a_text() -> None:
    decision = PolicyDecision.from_answer(({"type": "text", "content": "so"}, "<t>so</t>", None, 0.5))
    assert (decision.message.role, decision.message.content, decision.message.tool_calls) == ("assistant", "so", None)
    assert (decision.raw, decision.value, decision.tokens) == ("<t>so</t>", 0.5, None)


@pytest.mark.parametrize(
    "told",
    [
        {"tool_calls": [CALL]},
        {"tool_calls": [{"name": "add", "arguments": {"a": 1}, "id": "call_7"}]},
        {"tool_calls": [{"id": "call_7", "function": {"name": "add", "arguments": '{"a": 1}'}}]},
    ],
    ids=["ours", "plain", "OpenAI's"],
)
def test_calls_in_every_form(told: dict[str, Any]) -> None:
    decision = PolicyDecision.from_answer(({"type": "tool_call", **told}, None, None, None))
    assert decision.action["tool_calls"] == decision.message.tool_calls == [CALL]
    assert decision.message.content == ""


@pytest.mark.parametrize("arguments", [{"a": 1}, "{oops", None])
def test_one_call_by_its_name_alone(arguments: Any) -> None:
    decision = PolicyDecision.from_answer(
        ({"type": "tool_call", "name": "add", "arguments": arguments}, None, None, None)
    )
    (call,) = decision.action["tool_calls"]
    assert (call.name, call.arguments, call.id) == ("add", arguments or {}, "call_0")


def test_the_policys_own_dictionary_is_not_changed() -> None:
    action = {"type": "tool_call", "name": "add"}
    PolicyDecision.from_answer((action, None, None, None))
    assert action == {"type": "tool_call", "name": "add"}


def test_tokens_are_packed_and_a_policy_may_give_none() -> None:
    told = {"token_ids": [1, 2], "logprobs": [-1.0, -2.0], "prompt_ids": [3], "finish_reason": "length"}
    tokens = PolicyDecision.from_answer(({"type": "text"}, "", told, None)).tokens
    assert tokens is not None
    assert (list(tokens.token_ids), tokens.finish_reason) == ([1, 2], "length")
    tokens = PolicyDecision.from_answer(({"type": "text"}, "", {"finish_reason": "stop"}, None)).tokens
    assert tokens is not None
    assert not tokens.has_ids


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (({"type": "dance"}, "", None, None), "unknown action type 'dance'"),
        (({"type": "text"}, b"raw", None, None), "raw output must be a string or None, not bytes"),
        (({"type": "text", "content": 7}, "", None, None), "content must be a string, not int"),
        (({"type": "text"}, "", [-1.0], None), "log-probs must be a TokenLogprobs or None, not list"),
        (({"type": "text"}, "", {"token_ids": [1]}, None), "token_ids without logprobs"),
        (({"type": "tool_call"}, "", None, None), "name"),
        (({"type": "tool_call", "tool_calls": [{"nom": "add"}]}, "", None, None), "name"),
        (({}, "", None, None), "type"),
        (({"type": "text"}, ""), "unpack"),
        (None, "unpack"),
    ],
)
def test_what_makes_no_sense_is_refused(answer: Any, words: str) -> None:
    with pytest.raises((ValueError, TypeError, KeyError), match=words):
        PolicyDecision.from_answer(answer)
