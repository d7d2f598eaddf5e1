"""The append-only token buffer of an episode, with real chat templates and lossy tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import chat_tokenizers as made
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import quick_first

from toolwise.errors import ModelError
from toolwise.messages import Message, ToolCall
from toolwise.rollout.chat_tokenizer import ChatTokenizer
from toolwise.rollout.parsers import PARSERS
from toolwise.rollout.tokens import OnChange, TokenBuffer

chat_of = made.chat_tokenizer
TEMPLATES = sorted(made.CONTROLS)
QUESTION = Message(role="user", content="What is 2 + 2?")
RESULT = Message(role="tool", content="4", name="calculator", tool_call_id="call_0")
AGAIN = Message(role="user", content="Sure?")
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 + 2"}}\n</tool_call>'
THOUGHT = "<think>\nhmm\n</think>\n\n"


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "", "parameters": {"properties": {}}}}


TOOLS = [tool("calculator")]


class Episode:
    """Plays both sides: the policy that samples, and the worker that keeps the conversation."""

    def __init__(self, chat: ChatTokenizer, talk: Sequence[Message] = (QUESTION,), **more: Any) -> None:
        self.chat = chat
        self.buffer = TokenBuffer(chat, **more)
        self.talk = list(talk)
        self.steps: list[tuple[list[int], list[int]]] = []
        self.alignments: list[str] = []
        self.asked: list[tuple[list[Message], Any]] = []

    def reply(self, sampled: str | Sequence[int], *, tools: Any = TOOLS, closed: bool = True) -> Episode:
        prompt = self.buffer.prompt(self.talk, tools)
        ids = self.chat.encode(sampled) if isinstance(sampled, str) else list(sampled)
        ids = [*ids, self.chat.end_id] if closed else ids
        self.alignments.append(self.buffer.add(ids, closed=closed))
        self.steps.append((list(prompt), ids))
        self.asked.append((list(self.talk), tools))
        content, calls = PARSERS["hermes"](self.chat.decode(ids))
        self.talk.append(Message(role="assistant", content=content, tool_calls=calls or None))
        return self

    def say(self, *messages: Message) -> Episode:
        self.talk.extend(messages)
        return self

    def text(self) -> str:
        prompt, sampled = self.steps[-1]
        text: str = self.chat.tokenizer.decode([*prompt, *sampled])
        return text

    def extends(self, at: int) -> bool:
        """Whether the prompt of step `at` starts with all tokens of the previous step."""
        held = [*self.steps[at - 1][0], *self.steps[at - 1][1]]
        return self.steps[at][0][: len(held)] == held


def test_a_conversation_that_the_template_writes_the_same_is_clean_to_the_token() -> None:
    chat = chat_of("qwen2_5", "tagged")
    episode = Episode(chat).reply(CALL).say(RESULT, RESULT).reply("It is 4.").say(AGAIN).reply("Yes.")
    assert episode.alignments == ["first", "clean", "clean"]
    assert episode.steps[2][0] == chat.start(episode.talk[:-1], TOOLS)
    assert episode.extends(1)
    assert episode.extends(2)


@pytest.mark.parametrize(
    "template", ["chatml", "qwen2_5", "qwen3", "forgetful", "trailing", "llama3", "strict", "mistral"]
)
def test_each_template_carries_on_after_a_plain_reply(template: str) -> None:
    chat = chat_of(template)
    reply = " It is 4." if template == "mistral" else "It is 4."
    episode = Episode(chat).reply(reply, tools=None).say(AGAIN).reply("Yes.", tools=None)
    assert episode.alignments == ["first", "clean"]
    assert episode.steps[1][0] == chat.start(episode.talk[:-1])


def test_the_newline_after_the_end_of_a_turn_is_kept() -> None:
    text = Episode(chat_of("chatml")).reply("4").say(AGAIN).reply("Yes.").text()
    assert "4<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\nYes." in text
    text = Episode(chat_of("trailing")).reply(THOUGHT.rstrip() + " 4 ").say(AGAIN).reply("Yes.").text()
    assert " 4 <|im_end|>  \n \n<|im_start|>user\nSure?" in text


def test_other_tokens_for_the_same_text_are_kept_and_counted() -> None:
    chat = chat_of("chatml")
    odd = [i for letter in "It is 4." for i in chat.encode(letter)]
    assert odd != chat.encode("It is 4.")
    episode = Episode(chat).reply(odd).say(AGAIN).reply("Yes.").say(AGAIN).reply("Yes.")
    assert episode.alignments == ["first", "realigned", "clean"]
    assert episode.extends(1)
    assert episode.extends(2)
    assert chat.tokenizer.decode(episode.steps[1][0]) == chat.render(episode.talk[:3], TOOLS)


def test_calls_in_another_spelling_are_kept_as_sampled() -> None:
    odd = CALL.replace('", "', '","').replace("\n", "")
    episode = Episode(chat_of("qwen3")).reply(odd).say(RESULT).reply("4")
    assert episode.alignments == ["first", "realigned"]
    assert f"{odd}<|im_end|>\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n" in episode.text()


@pytest.mark.parametrize("template", ["qwen3", "forgetful"])
def test_thoughts_that_a_template_drops_stay_in_the_row(template: str) -> None:
    chat = chat_of(template, "tagged")
    episode = Episode(chat).reply(THOUGHT + "4").say(AGAIN).reply(THOUGHT + "Yes.").say(AGAIN).reply("Yes.")
    assert episode.alignments == ["first", "realigned", "realigned"]
    assert episode.text().count(THOUGHT) == 2
    assert THOUGHT not in chat.render(episode.talk[:-1])


@pytest.mark.parametrize("template", ["qwen3", "forgetful"])
def test_a_template_followed_to_the_letter_begins_a_row_where_it_drops_a_thought(template: str) -> None:
    chat = chat_of(template, "tagged")
    episode = Episode(chat, on_change="fork").reply(THOUGHT + "4").say(AGAIN).reply("Yes.").say(AGAIN).reply("Yes.")
    assert episode.alignments == ["first", "forked", "clean"]
    assert episode.steps[1][0] == chat.start(episode.talk[:3], TOOLS)
    assert THOUGHT not in episode.text()
    assert episode.extends(2)


def test_qwen3_keeps_thoughts_between_tool_calls_of_one_question() -> None:
    for on_change in ("append", "fork"):
        episode = Episode(chat_of("qwen3", "tagged"), on_change=on_change)
        episode.reply(THOUGHT + CALL).say(RESULT).reply(THOUGHT + CALL).say(RESULT).reply("4")
        assert episode.alignments == ["first", "clean", "clean"]


def test_following_to_the_letter_does_not_retokenise_what_was_sampled() -> None:
    chat = chat_of("chatml")
    odd = [i for letter in "It is 4." for i in chat.encode(letter)]
    episode = Episode(chat, on_change="fork").reply(odd).say(AGAIN).reply("Yes.")
    assert episode.alignments == ["first", "realigned"]
    assert episode.extends(1)


def test_an_opening_that_the_template_takes_back_is_kept() -> None:
    chat = ChatTokenizer(made.tokenizer("qwen3", "tagged"), template_kwargs={"enable_thinking": False})
    episode = Episode(chat).reply("4").say(AGAIN).reply("Yes.")
    assert episode.alignments == ["first", "realigned"]
    assert episode.extends(1)
    assert episode.text().count("<think>\n\n</think>\n\n") == 2


@pytest.mark.parametrize("template", ["qwen2_5", "qwen3", "llama3"])
def test_other_tools_on_offer_begin_a_new_row(template: str) -> None:
    chat = chat_of(template)
    more = [*TOOLS, tool("search")]
    episode = Episode(chat).reply("4").say(AGAIN).reply("5", tools=more).say(AGAIN).reply("6", tools=more)
    assert episode.alignments == ["first", "forked", "clean"]
    assert not episode.extends(1)
    assert episode.steps[1][0] == chat.start(episode.talk[:3], more)
    assert episode.extends(2)


def test_other_tools_that_the_template_does_not_show_change_nothing() -> None:
    chat = ChatTokenizer(made.tokenizer("chatml"))
    chat.set_tool_prompt("template")
    episode = Episode(chat).reply("4").say(AGAIN).reply("5", tools=[tool("search")])
    assert episode.alignments == ["first", "clean"]


def test_a_template_that_moves_the_tools_along_is_appended_to() -> None:
    episode = Episode(chat_of("mistral")).reply(" 4").say(AGAIN).reply(" 5", tools=[tool("search")])
    # The part before the first reply had the old tools: only a new row can change it.
    assert episode.alignments == ["first", "forked"]
    episode = Episode(chat_of("mistral")).reply(" 4").say(AGAIN).reply(" 5")
    assert episode.alignments == ["first", "realigned"]
    assert episode.text().count("[AVAILABLE_TOOLS]") == 2
    assert " 4</s>[AVAILABLE_TOOLS] [{" in episode.text()


@pytest.mark.parametrize("edit", ["question", "shorter", "no reply", "only the last observation"])
def test_a_history_that_somebody_edited_begins_a_new_row(edit: str) -> None:
    chat = chat_of("chatml")
    episode = Episode(chat).reply("4").say(AGAIN)
    if edit == "question":
        episode.talk[0] = Message(role="user", content="What is 3 + 3?")
    elif edit == "shorter":
        episode.talk[:] = [AGAIN]
    elif edit == "no reply":
        del episode.talk[1]
    else:
        episode.talk[:] = [Message(role="system", content="s"), AGAIN]
    seen = list(episode.talk)
    episode.reply("5")
    assert episode.alignments == ["first", "forked"]
    assert episode.steps[1][0] == chat.start(seen, TOOLS)


def test_a_turn_cut_off_is_closed_before_the_next() -> None:
    chat = chat_of("chatml")
    whole = chat.encode("It is")
    for ids, expected in ((whole, "clean"), ([i for c in "It is" for i in chat.encode(c)], "realigned")):
        episode = Episode(chat).reply(ids, closed=False).say(AGAIN).reply("Yes.")
        assert episode.alignments == ["first", expected]
        assert episode.extends(1)
        assert "It is<|im_end|>\n<|im_start|>user\nSure?" in episode.text()


def test_a_turn_ended_by_another_stop_token_is_not_ended_twice() -> None:
    chat = chat_of("llama3")
    stop = chat.tokenizer.convert_tokens_to_ids("<|python_tag|>")
    buffer = TokenBuffer(chat)
    buffer.prompt([QUESTION])
    buffer.add([*chat.encode("4"), stop], closed=True)
    prompt = buffer.prompt([QUESTION, Message(role="assistant", content="4"), AGAIN])
    assert "4<|python_tag|><|start_header_id|>user" in chat.tokenizer.decode(list(prompt))
    assert chat.decode([*chat.encode("4"), stop], [stop]) == "4"


def test_llama_holds_calls_and_results_though_it_leaves_text_out_beside_them() -> None:
    chat = chat_of("llama3", "tagged")
    talk = Episode(chat).reply("Let me see. " + CALL).say(RESULT).reply("It is 4.")
    assert talk.alignments == ["first", "realigned"]
    end = 'calculator", "arguments": {"expression": "2 + 2"}}\n</tool_call><|eot_id|>'
    header = '<|start_header_id|>ipython<|end_header_id|>\n\n"4"<|eot_id|><|start_header_id|>assistant'
    assert end + header in talk.text()


def test_a_reply_that_the_template_refuses_does_not_end_the_episode() -> None:
    """Two calls at once, with a template that accepts one: the reply stands, and the results can still be added."""
    chat = chat_of("llama3", "tagged")
    with pytest.raises(ModelError, match="only supports single tool-calls"):
        chat.start([QUESTION, Message(role="assistant", tool_calls=[ToolCall(name="f")] * 2)])
    episode = Episode(chat).reply(CALL + CALL).say(RESULT, RESULT).reply("4").say(AGAIN).reply("Yes.")
    assert episode.alignments == ["first", "realigned", "realigned"]
    assert episode.text().count("ipython<|end_header_id|>") == 2


def test_other_tools_after_a_refused_reply_are_a_clear_fault() -> None:
    episode = Episode(chat_of("llama3", "tagged")).reply(CALL + CALL).say(RESULT, RESULT).reply("4").say(AGAIN)
    with pytest.raises(ModelError, match=r"tests/llama3.*single tool-calls"):
        episode.reply("5", tools=[tool("search")])


@pytest.mark.parametrize("template", ["qwen3", "chatml", "mistral"])
def test_arguments_that_are_no_object_do_not_end_the_episode(template: str) -> None:
    episode = Episode(chat_of(template, "tagged")).reply("<tool_call>{oops</tool_call>").say(RESULT).reply("4")
    assert episode.extends(1)
    assert "{oops</tool_call>" in episode.text()


def test_mistral_gets_ids_of_the_length_it_wants() -> None:
    chat = chat_of("mistral")
    call = ToolCall(id="call_0", name="calculator", arguments={"expression": "2 + 2"})
    text = chat.tokenizer.decode(chat.start([QUESTION, Message(role="assistant", tool_calls=[call]), RESULT], TOOLS))
    assert text.count('"0000call0"') == 2


def test_the_date_does_not_change_in_the_middle_of_an_episode() -> None:
    chat = ChatTokenizer(made.tokenizer("llama3"), now=datetime(2026, 12, 31, 23, 59))
    assert "Today Date: 31 Dec 2026\n" in chat.tokenizer.decode(chat.start([QUESTION]))
    dated = ChatTokenizer(made.tokenizer("llama3"), template_kwargs={"date_string": "26 Jul 2024"})
    assert "Today Date: 26 Jul 2024\n" in dated.tokenizer.decode(dated.start([QUESTION]))


def test_without_a_system_role_its_text_starts_the_first_user_message() -> None:
    chat, system = chat_of("strict"), Message(role="system", content="Be brief.")
    merged = Message(role="user", content=f"Be brief.\n\n{QUESTION.content}")
    assert chat.start([system, QUESTION]) == chat.start([merged])


@pytest.mark.parametrize(
    ("talk", "words"),
    [
        ([QUESTION, QUESTION], r"tests/strict .*\[user, user\]: Conversation roles must alternate"),
        ([], r"tests/strict"),
    ],
)
def test_what_a_template_refuses_is_one_clear_line(talk: list[Message], words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        TokenBuffer(chat_of("strict")).prompt(talk)
    assert "\n" not in str(caught.value)


def test_ids_that_came_with_the_task_are_kept_as_they_are() -> None:
    chat = chat_of("qwen2_5")
    given_ids = chat.encode("anything at all")
    episode = Episode(chat, prompt_ids=given_ids).reply("4").say(AGAIN).reply("5").say(AGAIN).reply("6", tools=None)
    assert episode.steps[0][0] == given_ids
    assert episode.alignments == ["first", "realigned", "realigned"]
    assert all(episode.extends(at) for at in (1, 2))
    assert episode.text().startswith("anything at all4<|im_end|>\n<|im_start|>user\nSure?")


def test_after_a_fork_from_given_ids_the_row_is_the_templates() -> None:
    episode = Episode(chat_of("qwen2_5"), prompt_ids=[1, 2, 3]).reply("4")
    episode.talk[:] = [AGAIN]
    episode.reply("5").say(AGAIN).reply("6").say(AGAIN).reply("7", tools=[tool("search")])
    assert episode.alignments == ["first", "forked", "clean", "forked"]


def test_ids_that_came_with_no_messages_can_be_followed_too() -> None:
    for template in TEMPLATES:
        chat = chat_of(template)
        episode = Episode(chat, talk=(), prompt_ids=[1, 2, 3]).reply("4").say(AGAIN).reply("5")
        assert episode.extends(1)


def test_asking_again_changes_nothing() -> None:
    episode = Episode(chat_of("chatml"))
    asked = [list(episode.buffer.prompt(episode.talk)) for _ in range(3)]
    assert asked[0] == asked[1] == asked[2]
    episode.reply("4", tools=None).say(AGAIN)
    first = episode.buffer.prompt(episode.talk)
    second = episode.buffer.prompt(episode.talk)
    assert first == second
    assert first._items is second._items
    episode.reply("5", tools=None)
    assert episode.steps[1][0] == list(first)
    assert episode.alignments == ["first", "clean"]


def test_asking_again_with_other_news_leaves_the_first_attempts_tokens_alone() -> None:
    """The thread serving an abandoned request may still read its prompt."""
    chat = chat_of("chatml")
    episode = Episode(chat).reply("4")
    abandoned = episode.buffer.prompt([*episode.talk, AGAIN, AGAIN])
    before = list(abandoned)
    episode.say(RESULT).reply("5").say(AGAIN).reply("6")
    assert list(abandoned) == before
    assert [prompt for prompt, _ in episode.steps] == [chat.start(*asked) for asked in episode.asked]
    assert episode.alignments == ["first", "clean", "clean"]


def test_a_fork_that_was_not_taken_up_leaves_the_row_as_it_was() -> None:
    episode = Episode(chat_of("qwen2_5")).reply("4").say(AGAIN)
    episode.buffer.prompt(episode.talk, [tool("search")])
    episode.reply("5")
    assert episode.alignments == ["first", "clean"]
    assert episode.extends(1)


def test_a_reply_to_nothing_is_a_mistake() -> None:
    with pytest.raises(RuntimeError, match="called before prompt"):
        TokenBuffer(chat_of("chatml")).add([1], closed=True)


def test_pad_and_end_may_be_the_same_token() -> None:
    chat = chat_of("chatml", "bytes", "eos")
    assert chat.pad_id == chat.end_id
    episode = Episode(chat).reply("4").say(AGAIN).reply("Yes.")
    assert episode.alignments == ["first", "clean"]
    assert episode.steps[1][0].count(chat.end_id) == 4  # the tools are in a system message


texts = st.lists(
    st.one_of(
        st.sampled_from(
            [THOUGHT, CALL, "It is 4.", "\n", " ", "é", "ＡＢ", "<|im_end|>", "</s>", "[INST]", "<|eot_id|>", "<"]
        ),
        st.text(max_size=5),
    ),
    max_size=4,
).map("".join)


@st.composite
def turns(draw: st.DrawFn) -> list[tuple[Any, str, bool, bool]]:
    """(sampled tokens, messages that follow, whether the turn ended itself, whether other tools are offered)"""
    sampled = st.one_of(texts, st.lists(st.integers(0, 10_000), min_size=1, max_size=6))
    return draw(st.lists(st.tuples(sampled, texts, st.booleans(), st.booleans()), min_size=2, max_size=4))


@pytest.mark.parametrize("on_change", ["append", "fork"])
@pytest.mark.parametrize("template", quick_first(TEMPLATES, list(TEMPLATES)[::3]))
@settings(max_examples=25, deadline=None)
@given(script=turns(), kind=st.sampled_from(made.KINDS))
def test_every_turn_extends_the_last_exactly_or_forks_and_is_counted(
    template: str, on_change: OnChange, script: list[Any], kind: str
) -> None:
    chat = chat_of(template, kind)
    episode = Episode(chat, on_change=on_change)
    controls = chat.controls.ids
    for sampled, said, closed, other in script:
        # Any tokens, including control tokens; only the end-of-turn token cannot come in the middle.
        ids = [i % len(chat.tokenizer) for i in sampled] if isinstance(sampled, list) else chat.encode(sampled)
        tools = [tool("other")] if other else TOOLS
        try:
            episode.reply([i for i in ids if i != chat.end_id] or [5], tools=tools, closed=closed)
        except ModelError:  # a new row is needed, and the template refuses to render the reply
            with pytest.raises(ModelError):
                chat.start(episode.talk, tools)
            break
        role: Any = "tool" if episode.talk[-1].tool_calls and template != "strict" else "user"
        told = f"{said} no {len(episode.steps)}."
        episode.say(Message(role=role, content=told, tool_call_id="call_0" if role == "tool" else None))
    as_written = True
    for at, alignment in enumerate(episode.alignments):
        assert alignment == "first" if at == 0 else alignment in ("clean", "realigned", "forked")
        as_written = alignment in ("first", "forked") or (as_written and alignment == "clean")
        if as_written:
            assert episode.steps[at][0] == chat.start(*episode.asked[at])
        if alignment in ("clean", "realigned"):
            assert episode.extends(at)
            between = episode.steps[at][0][len(episode.steps[at - 1][0]) + len(episode.steps[at - 1][1]) :]
            assert [i for i in between if i in controls]
            assert f"no {at}." in chat.tokenizer.decode(between)


def sampled_oddly(chat: ChatTokenizer, kind: str) -> list[int]:
    """Tokens that do not survive decoding and encoding."""
    core = chat.tokenizer.backend_tokenizer
    if kind == "dropping":
        return [core.token_to_id(c) for c in "is four"]
    if kind.startswith("folding"):
        return [core.token_to_id(c) for c in "AZA"]
    return [*chat.encode("\n\n"), *chat.encode("is four")]


@pytest.mark.parametrize("kind", ["crossing", "folding", "folding_controls", "dropping"])
def test_what_was_sampled_survives_a_tokenizer_that_would_lose_it(kind: str) -> None:
    """Decoding and encoding is not the identity here; the buffer does neither to sampled tokens."""
    chat = chat_of("llama3", kind)
    sampled = sampled_oddly(chat, kind)
    assert None not in sampled
    assert chat.encode(chat.tokenizer.decode(sampled)) != sampled
    episode = Episode(chat).reply(sampled).say(AGAIN).reply(sampled).say(AGAIN).reply("4")
    held = episode.steps[2][0]
    assert [held[i : i + len(sampled)] for i in range(len(held))].count(sampled) == 2
    assert episode.alignments == ["first", "realigned", "realigned"]


def test_a_token_that_the_whole_would_join_across_the_opening_is_counted() -> None:
    """GPT-2's pre-tokenizer splits the two newlines of the opening as soon as text follows them."""
    chat = chat_of("llama3", "crossing")
    episode = Episode(chat).reply("It is 4.").say(AGAIN).reply("Yes.")
    assert episode.alignments == ["first", "realigned"]
    assert episode.extends(1)
    assert chat.tokenizer.decode(episode.steps[1][0]) == chat.render(episode.talk[:3], TOOLS)
