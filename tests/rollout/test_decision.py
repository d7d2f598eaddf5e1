"""Policy answers: accepted in all their forms, rejected if malformed."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from toolwise.messages import Prefix, ToolCall
from toolwise.rollout.decision import PolicyDecision

CALL = ToolCall(name="add", arguments={"a": 1}, id="call_7")


def test_a_text() -> None:
    decision = PolicyDecision.from_answer(({"type": "text", "content": "so"}, "<t>so</t>", None, 0.5))
    assert (decision.message.role, decision.message.content, decision.message.tool_calls) == ("assistant", "so", None)
    assert (decision.raw, decision.value, decision.logprobs) == ("<t>so</t>", 0.5, None)
    assert decision.sampled_tokens == 0
    assert not decision.hit_length_limit


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


@pytest.mark.parametrize("ids", [[1, 2, 3], (1, 2, 3), array("i", [1, 2, 3]), Prefix([1, 2, 3, 4], 3)])
def test_sampled_tokens_are_counted_in_whatever_holds_them(ids: Any) -> None:
    assert PolicyDecision.from_answer(({"type": "text"}, "", {"token_ids": ids}, None)).sampled_tokens == 3


@pytest.mark.parametrize("logprobs", [None, {}, {"token_ids": None, "prompt_ids": None}, {"logprobs": [-1.0]}])
def test_a_policy_may_give_no_tokens(logprobs: Any) -> None:
    assert PolicyDecision.from_answer(({"type": "text"}, "", logprobs, None)).sampled_tokens == 0


@pytest.mark.parametrize(("reason", "cut"), [("length", True), ("stop", False), ("tool_calls", False), (None, False)])
def test_a_reply_that_was_cut(reason: Any, cut: bool) -> None:
    assert PolicyDecision.from_answer(({"type": "text"}, "", {"finish_reason": reason}, None)).hit_length_limit == cut


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (({"type": "dance"}, "", None, None), "unknown action type 'dance'"),
        (({"type": "text"}, b"raw", None, None), "raw output must be a string or None, not bytes"),
        (({"type": "text", "content": 7}, "", None, None), "content must be a string, not int"),
        (({"type": "text"}, "", [-1.0], None), "log-probs must be a TokenLogprobs or None, not list"),
        (({"type": "text"}, "", {"token_ids": 7}, None), "int"),
        (({"type": "text"}, "", {"prompt_ids": 7}, None), "int"),
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
