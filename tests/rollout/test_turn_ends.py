"""Where turns end, for the ways in which models end them, each as a template of a few lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import published_templates
import pytest
from tokenizers import AddedToken

from toolwise.errors import ModelError
from toolwise.messages import Message, ToolCall
from toolwise.rollout.chat_tokenizer import ChatTokenizer
from toolwise.rollout.turn_ends import TurnEnds, after_reply, find_turn_ends, mark_reply

CONTROLS = ("<s>", "</s>", "<end>", "<close>", "<user>", "<tool>", "<bot>", "<call>")
Write = Callable[[Message, bool], str]


def find(write: Write, stops: Sequence[str] = ("</s>",)) -> TurnEnds:
    def render(messages: Sequence[Message], opened: bool) -> str:
        return "".join(write(m, m is messages[-1] and not opened) for m in messages) + ("<bot>" if opened else "")

    return find_turn_ends(render, CONTROLS, stops, name="mine")


def text_of(message: Message) -> str:
    calls = "".join(f"call({c.arguments})" for c in message.tool_calls or ())
    return f"{message.content or ''}{calls}"


def role(message: Message) -> str:
    return {"user": "<user>", "tool": "<tool>"}.get(message.role, "<bot>")


def test_one_token_closes_every_message() -> None:
    ends = find(lambda m, last: f"{role(m)}{text_of(m)}<end>\n")
    assert (ends.stops, ends.ends, ends.openings) == (("</s>", "<end>"), ("<end>",), ("<user>", "<tool>"))
    assert ends.split("<end>\n<user>hm<end>\n<bot>", "<end>") == ("<end>", "\n<user>hm<end>\n<bot>")
    assert ends.split("<end>\n<user>hm", "</s>") == ("<end>", "\n<user>hm"), "another stop token was sampled"


def test_what_stands_before_the_end_is_not_part_of_the_reply() -> None:
    ends = find(lambda m, last: f"{role(m)}{text_of(m)}<close></s>", ["</s>"])
    assert (ends.stops, ends.ends, ends.closers) == (("</s>",), ("</s>",), {"<close>"})


def test_the_opening_of_the_next_message_ends_a_reply() -> None:
    ends = find(lambda m, last: f"{role(m)}{text_of(m)}")
    assert (ends.stops, ends.ends, ends.openings) == (("</s>", "<user>", "<tool>"), (), ("<user>", "<tool>"))
    assert ends.split("<tool>result<bot>", "<tool>") == ("<tool>", "result<bot>")
    assert ends.split("<tool>result<bot>", "</s>") == ("", "<tool>result<bot>")


def test_the_last_turn_ends_otherwise_than_earlier_ones() -> None:
    ends = find(lambda m, last: f"{role(m)}{text_of(m)}{'</s>' if last else '<end>'}")
    assert (ends.stops, ends.ends) == (("</s>",), ("<end>",))
    assert ends.split("<end><user>hm", "</s>") == ("<end>", "<user>hm")


def test_the_end_of_a_call_opens_its_result() -> None:
    def write(message: Message, last: bool) -> str:
        if message.role == "tool":
            return text_of(message)
        return f"{role(message)}{text_of(message)}{'<call>' if message.tool_calls else '<end>'}"

    ends = find(write)
    assert ends.ends == ("<end>", "<call>")
    assert ends.split("<call>result", "<call>") == ("<call>", "result")
    assert ends.split("<call>result", "<end>") == ("", "<call>result"), "it was not sampled, so it is written"


def test_a_template_without_ends_is_refused() -> None:
    with pytest.raises(ModelError, match="the chat template of mine does not end an assistant turn"):
        find(lambda m, last: f"{m.role}: {text_of(m)}\n")


def test_a_marked_reply_is_found_again_by_its_text_or_its_call() -> None:
    assert after_reply(f"a{mark_reply(Message(role='assistant', content='x')).content}b") == "b"
    with pytest.raises(ModelError, match="leaves out an assistant turn"):
        after_reply("no marker")


def test_tags_around_calls_are_special_tokens_but_end_no_turn() -> None:
    def write(message: Message, last: bool) -> str:
        calls = "".join(f"<call>{c.arguments}<close>" for c in message.tool_calls or ())
        return f"{role(message)}{message.content or ''}{calls}"

    ends = find(write)
    assert (ends.stops, ends.ends, ends.openings) == (("</s>", "<user>", "<tool>"), (), ("<user>", "<tool>"))
    assert ends.split("<close><tool>result<bot>", "<tool>") == ("<tool>", "result<bot>")
    closed = find(lambda m, last: f"{write(m, last)}<end>")
    assert (closed.stops, closed.ends) == (("</s>", "<end>"), ("<end>",))


def test_calls_in_turns_of_their_own_end_like_any_turn() -> None:
    def write(message: Message, last: bool) -> str:
        calls = "".join(f"<bot><call>{c.arguments}<end>" for c in message.tool_calls or ())
        return calls or f"{role(message)}{message.content}<end>"

    assert find(write).stops == ("</s>", "<end>")


def test_a_glm_folder_whose_tags_are_special_tokens() -> None:
    tokenizer = published_templates.tokenizer("glm4moe")
    tags = ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
    tokenizer.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in tags])
    chat, plain = ChatTokenizer(tokenizer), published_templates.published("glm4moe")
    assert chat.turn_ends == plain.turn_ends
    call = ToolCall(id="call_0", name="look_up", arguments={"word": "nile"})
    talk = [Message(role="user", content="hm"), Message(role="assistant", content="", tool_calls=[call])]
    result = Message(role="tool", content="a river", tool_call_id="call_0", name="look_up")
    after = chat.decode(chat.encode_continuation([result], after=talk, stop_id=chat.stop_ids[-1]))
    assert after.startswith("\n<tool_response>\na river")
