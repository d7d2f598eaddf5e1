"""Conversations with tools in the chat templates of published models: tokens are only ever appended, as sampled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import published_templates as library
import pytest

from toolwise.messages import Message, ToolCall
from toolwise.rollout.chat_tokenizer import ChatTokenizer
from toolwise.rollout.control_tokens import strip_guard_marks
from toolwise.rollout.tokens import OnChange, TokenBuffer

NAMES = library.names()
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "description": "The word."}},
            "required": ["word"],
        },
    },
}
QUESTION = Message(role="user", content="How long is the Nile?")
CALL = ToolCall(id="call_0", name="look_up", arguments={"word": 'the "Nile", 字'})
CALLING = Message(role="assistant", content="", tool_calls=[CALL])
RESULT = Message(role="tool", content="6650 km", tool_call_id="call_0", name="look_up")
ANSWER = Message(role="assistant", content="It is 6650 km long.")
FOLLOWING = Message(role="user", content="Sure?")
TURNS = [(CALLING, RESULT), (ANSWER, FOLLOWING), (CALLING, RESULT), (ANSWER, FOLLOWING)]


def sampled_by(chat: ChatTokenizer, message: Message) -> list[int]:
    """Tokens a model might sample for this message, without its end."""
    form = chat.tool_prompt.form
    if message.tool_calls and form.render is not None:
        return chat.encode(form.render("", message.tool_calls))
    return chat.encode(message.content or "")


def rows(chat: ChatTokenizer, ends: Iterator[int | None], on_change: OnChange) -> Iterator[tuple[str, list[int]]]:
    """Alignment and prompt of each turn of an episode. Checks that prompts only append, unless they fork."""
    buffer, messages, before = TokenBuffer(chat, on_change=on_change), [QUESTION], list[int]()
    for reply, following in TURNS:
        prompt = list(buffer.prompt(messages, [TOOL]))
        end = next(ends)
        sampled = [*sampled_by(chat, reply), *([] if end is None else [end])]
        alignment = buffer.add(sampled, closed=end is not None)
        if alignment != "forked":
            assert prompt[: len(before)] == before, "what was sampled is part of the next prompt as it was sampled"
            new = chat.tokenizer.decode(prompt[len(before) :])
            assert (messages[-1].content or "") in new, "what came after the reply is in the next prompt"
            written = strip_guard_marks(chat.render(messages, [TOOL]))
            assert written.endswith(new), "and it is as the template writes it"
        before = prompt + sampled
        yield alignment, prompt
        messages += [reply, following]


def test_there_are_many_published_templates() -> None:
    assert len(NAMES) >= 40
    families = {name.split("_")[0].rstrip("0123456789") for name in NAMES}
    assert {"cohere", "deepseekv", "gemma", "glm4moe", "gptoss", "lfm", "llama", "phi", "qwen"} <= families


@pytest.mark.parametrize("name", NAMES)
def test_generation_stops_where_the_model_ends_its_turns(name: str) -> None:
    assert set(library.published(name).turn_ends.stops) == library.expected_stops(name)


@pytest.mark.parametrize("name", NAMES)
def test_the_model_sees_its_tools_calls_and_results(name: str) -> None:
    chat = library.published(name)
    assert chat.tool_prompt.usable, chat.tool_prompt.describe()
    text = strip_guard_marks(chat.render([QUESTION, CALLING, RESULT, ANSWER, FOLLOWING], [TOOL]))
    for shown in ("look_up", "Looks up a word.", "Nile", "6650 km", "Sure?"):
        assert shown in text


@pytest.mark.parametrize("name", NAMES)
def test_the_first_prompt_is_what_the_template_writes(name: str) -> None:
    chat = library.published(name)
    text = strip_guard_marks(chat.render([QUESTION], [TOOL]))
    assert chat.tokenizer.decode(chat.start([QUESTION], [TOOL])) == text


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("closed", ["as the template ends it", "by each stop token", "cut off"])
def test_tokens_are_only_appended(name: str, closed: str) -> None:
    chat = library.published(name)
    ends: list[list[int | None]] = {
        "as the template ends it": [[chat.end_id] * len(TURNS)],
        "by each stop token": [[stop] * len(TURNS) for stop in chat.stop_ids],
        "cut off": [[None] * len(TURNS)],
    }[closed]
    for episode in ends:
        alignments = [alignment for alignment, _ in rows(chat, iter(episode), "append")]
        assert alignments[0] == "first"
        assert "forked" not in alignments


@pytest.mark.parametrize("name", NAMES)
def test_a_fork_shows_what_the_template_writes(name: str) -> None:
    chat = library.published(name)
    messages, as_written = [QUESTION], True
    for (alignment, prompt), (reply, following) in zip(
        rows(chat, iter([chat.end_id] * len(TURNS)), "fork"), TURNS, strict=True
    ):
        as_written = alignment in ("first", "forked") or (as_written and alignment == "clean")
        if as_written:
            assert prompt == chat.start(messages, [TOOL])
        messages += [reply, following]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_but_the_template_writes_control_tokens(name: str) -> None:
    chat = library.published(name)
    for control in (*chat.turn_ends.stops, *chat.turn_ends.openings, "".join(chat.controls.texts)):
        counts = []
        for text in ("harmless", control):
            call = ToolCall(id="call_0", name="look_up", arguments={"word": text, text: [text]})
            function = TOOL["function"] | {"description": text, "parameters": {"type": "object", "title": text}}
            messages = [
                Message(role="user", content=text),
                Message(role="assistant", content="", tool_calls=[call]),
                Message(role="tool", content=text, tool_call_id="call_0", name="look_up"),
                Message(role="assistant", content=text),
                Message(role="user", content=text),
            ]
            tools = [{"type": "function", "function": function}]
            counts.append(Counter(i for i in chat.start(messages, tools) if i in chat.controls.ids))
        assert counts[0] == counts[1], control


@pytest.mark.parametrize("name", NAMES)
def test_a_system_message_is_never_lost(name: str) -> None:
    chat = library.published(name)
    system = Message(role="system", content="Be brief, please.")
    text = strip_guard_marks(chat.render([system, QUESTION, CALLING, RESULT], [TOOL]))
    for shown in ("Be brief, please.", "Nile", "look_up"):
        assert shown in text
