"""The message graph of a session: tokens continue what was sampled, whatever clients do to messages, or branch."""

from __future__ import annotations

import json
from typing import Any

import chat_tokenizers as made
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolwise.messages import Message, ToolCall
from toolwise.rollout.agents.message_graph import GraphTurn, MessageGraph, message_key
from toolwise.rollout.chat_tokenizer import ChatTokenizer
from toolwise.rollout.parsers import PARSERS

QUESTION = Message(role="user", content="What is 2 + 2?")
AGAIN = Message(role="user", content="Sure?")
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 + 2", "digits": 3}}\n</tool_call>'
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "calculator", "description": "", "parameters": {"properties": {}}}}
]


class Session:
    """Plays the model's side: each reply is sampled in odd tokens, which no tokenizer would give."""

    def __init__(self, template: str = "qwen2_5", kind: str = "tagged") -> None:
        self.chat: ChatTokenizer = made.chat_tokenizer(template, kind)
        self.graph = MessageGraph(self.chat)
        self.turns: list[tuple[GraphTurn, list[int], list[int]]] = []
        """Each turn with its prompt and its sampled tokens, as they were."""
        self.alignments: list[str] = []

    def call(self, messages: list[Message], reply: str = "4", *, tools: Any = TOOLS, closed: bool = True) -> Message:
        turn = self.graph.prompt(messages, tools)
        prompt = list(turn.prompt_ids)
        ids = [i for letter in reply for i in self.chat.encode(letter)] + [self.chat.end_id] * closed
        content, calls = PARSERS["hermes"](self.chat.decode(ids))
        message = Message(role="assistant", content=content, tool_calls=calls or None)
        self.alignments.append(self.graph.add(turn, ids, message, closed=closed))
        self.turns.append((turn, prompt, ids))
        return message

    def origins(self) -> list[str]:
        return [turn.origin for turn, _, _ in self.turns]

    def continues(self, at: int, earlier: int) -> bool:
        """Whether the prompt of turn `at` starts with everything that turn `earlier` saw and sampled."""
        _, prompt, sampled = self.turns[earlier]
        held = [*prompt, *sampled]
        return self.turns[at][1][: len(held)] == held


def through_a_client(message: Message, *, suffix: str = "x") -> Message:
    """What clients make of a reply: null for no text, other ids, more fields, arguments in another spelling."""
    raw = json.loads(json.dumps(message.to_openai()))
    raw |= {"content": raw["content"] or None, "refusal": None, "annotations": [], "audio": None, "function_call": None}
    for index, call in enumerate(raw.get("tool_calls") or ()):
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(dict(sorted(arguments.items())), indent=2)
        call["id"] = f"client_{suffix}_{index}"
    return Message.model_validate(raw)


def result_of(message: Message, text: str = "4") -> Message:
    assert message.tool_calls
    return Message(role="tool", content=text, name="calculator", tool_call_id=message.tool_calls[0].id)


def test_a_conversation_that_comes_back_is_continued_token_by_token() -> None:
    session = Session()
    sent = through_a_client(session.call([QUESTION], CALL))
    talk = [QUESTION, sent, result_of(sent)]
    last = session.call(talk, "It is 4.")
    session.call([*talk, through_a_client(last), AGAIN], "Yes.")
    assert session.origins() == ["first", "continued", "continued"]
    assert session.continues(1, 0)
    assert session.continues(2, 1)
    assert session.turns[0][1] == session.chat.start([QUESTION], TOOLS)


def test_ids_of_calls_may_differ_from_request_to_request() -> None:
    session = Session()
    reply = session.call([QUESTION], CALL)
    first = through_a_client(reply, suffix="a")
    second = session.call([QUESTION, first, result_of(first)], CALL)
    again, other = through_a_client(reply, suffix="b"), through_a_client(second, suffix="c")
    session.call([QUESTION, again, result_of(again), other, result_of(other)], "4")
    assert session.origins() == ["first", "continued", "continued"]


def test_the_results_of_parallel_calls_are_told_apart() -> None:
    session = Session()
    sent = through_a_client(session.call([QUESTION], CALL + CALL))
    assert sent.tool_calls is not None
    one, two = (Message(role="tool", content=f"result {call.id}", tool_call_id=call.id) for call in sent.tool_calls)
    session.call([QUESTION, sent, one, two])
    session.call([QUESTION, sent, two, one])
    assert session.origins() == ["first", "continued", "branched"]
    internal = [m.tool_call_id for m in session.turns[1][0].history if m.role == "tool"]
    assert internal == ["call_0", "call_1"]


@pytest.mark.parametrize("edit", ["text", "arguments", "thoughts", "calls"])
def test_a_reply_that_came_back_changed_opens_a_branch(edit: str) -> None:
    session = Session()
    first = session.call([QUESTION], "4")
    reply = session.call([QUESTION, first, AGAIN], CALL)
    changed = {
        "text": {"content": "no"},
        "arguments": {"tool_calls": [ToolCall(id="call_0", name="calculator", arguments={"expression": "3"})]},
        "thoughts": {"reasoning_content": "hmm"},
        "calls": {"tool_calls": None, "content": "4"},
    }[edit]
    session.call([QUESTION, first, AGAIN, reply.model_copy(update=changed), AGAIN])
    assert session.origins() == ["first", "continued", "edited"]
    assert session.alignments[2] == "forked"
    assert session.continues(2, 0)
    assert not session.continues(2, 1)


def test_sub_agents_and_a_compacted_history_are_rows_of_their_own() -> None:
    session = Session()
    reply = session.call([QUESTION], "4")
    session.call([Message(role="system", content="You check."), AGAIN], "5")
    session.call([Message(role="user", content="So far: 4."), AGAIN])
    session.call([QUESTION, reply, AGAIN], "6")
    assert session.origins() == ["first", "unrelated", "unrelated", "continued"]
    assert session.alignments == ["first", "forked", "forked", "clean"]
    assert session.continues(3, 0)


def test_two_calls_that_continue_one_reply_do_not_disturb_each_other() -> None:
    session = Session()
    reply = session.call([QUESTION], "4")
    talk = [QUESTION, reply, AGAIN]
    first, second = session.graph.prompt(talk, TOOLS), session.graph.prompt(talk, TOOLS)
    prompts = [list(first.prompt_ids), list(second.prompt_ids)]
    session.graph.add(second, session.chat.encode("no"), Message(role="assistant", content="no"), closed=False)
    session.graph.add(first, session.chat.encode("yes"), Message(role="assistant", content="yes"), closed=False)
    assert [list(first.prompt_ids), list(second.prompt_ids)] == prompts
    assert [turn.history[-1].content for turn in (first, second)] == ["yes", "no"]


def test_a_call_that_failed_is_no_branch() -> None:
    session = Session()
    reply = session.call([QUESTION], "4")
    failed = session.graph.prompt([QUESTION, reply, AGAIN, AGAIN], TOOLS)
    session.graph.discard(failed)
    session.call([QUESTION, reply, AGAIN])
    assert session.origins() == ["first", "continued"]
    assert session.turns[1][0].history == [QUESTION, reply, AGAIN, session.turns[1][0].history[-1]]


def test_other_tools_are_another_conversation() -> None:
    session = Session()
    reply = session.call([QUESTION], "4")
    session.call([QUESTION, reply, AGAIN], tools=None)
    assert session.origins() == ["first", "unrelated"]


def test_a_key_knows_what_a_message_says() -> None:
    made_call = ToolCall(id="a", name="f", arguments={"x": 1, "y": 2})
    same = ToolCall(id="b", name="f", arguments={"y": 2, "x": 1})
    assert message_key(Message(role="assistant", content=None, tool_calls=[made_call])) == message_key(
        Message(role="assistant", content="", tool_calls=[same])
    )
    assert message_key(QUESTION) != message_key(QUESTION.model_copy(update={"role": "system"}))


ACTIONS = st.lists(
    st.tuples(
        st.integers(0, 20),  # which conversation
        st.sampled_from(["continue", "continue", "continue", "edit", "new", "cut"]),
        st.sampled_from(["4", "It is 4.", CALL, CALL + CALL, "Let me see. " + CALL, "<think>\nhmm\n</think>\n\n4"]),
        st.booleans(),  # whether the reply was ended
    ),
    min_size=1,
    max_size=8,
)


@given(ACTIONS, st.sampled_from(["qwen2_5", "qwen3", "chatml", "llama3"]))
def test_whatever_a_client_does_sampled_tokens_stay_as_they_were(actions: list[Any], template: str) -> None:
    session = Session(template)
    talks: list[tuple[list[Message], int | None]] = []  # conversations, and the turn that wrote their last reply
    for number, (which, action, text, closed) in enumerate(actions):
        talk, writer = talks[which % len(talks)] if talks else ([], None)
        if action == "new" or not talk:
            messages, writer = [Message(role="user", content=f"question {number}")], None
        else:
            last = talk[-1]
            if action == "edit":
                last, writer = Message(role="assistant", content=f"edited {number}"), None
            elif action == "cut":
                talk, writer = talk[:1], None
                last = Message(role="assistant", content="cut")
            results = [Message(role="tool", content="4", tool_call_id=c.id) for c in last.tool_calls or ()]
            messages = [*talk[:-1], last, *(results or [AGAIN])]
        reply = session.call(messages, text, closed=closed)
        talks.append(([*messages, through_a_client(reply, suffix=str(number))], number))
        if writer is not None:
            assert session.continues(number, writer)
    for turn, prompt, _ in session.turns:
        assert list(turn.prompt_ids) == prompt


def test_a_number_may_come_back_in_another_spelling() -> None:
    def call(arguments: dict[str, Any]) -> str:
        return message_key(Message(role="assistant", tool_calls=[ToolCall(id="a", name="f", arguments=arguments)]))

    assert call({"x": [1.0, {"y": -2.0}]}) == call({"x": [1, {"y": -2}]})
    assert call({"x": 1.5}) != call({"x": 1})
    assert call({"x": True}) != call({"x": 1})
