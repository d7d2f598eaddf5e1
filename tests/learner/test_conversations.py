"""Conversations as tokens for SFT: which tokens are trained on, and that they are the tokens of a rollout."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chat_tokenizers import KINDS, chat_tokenizer, tokenizer
from hypothesis import given
from hypothesis import strategies as st

from toolwise.config.schema import load_config
from toolwise.errors import DataError
from toolwise.learner.batch import with_zero_advantages
from toolwise.learner.conversations import Example, _overlap, reply_tokens, tokenize_conversation
from toolwise.learner.rows import build_rows
from toolwise.messages import Message, ToolCall
from toolwise.models import load_chat
from toolwise.rollout.chat_tokenizer import ChatTokenizer

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def chat() -> ChatTokenizer:
    return load_chat("builtin:small")


def say(role: Any, content: str, **more: Any) -> Message:
    return Message(role=role, content=content, **more)


CONVERSATION = [
    say("user", "How many wells does Alder have?"),
    say("assistant", "", tool_calls=[ToolCall(id="call_0", name="search", arguments={"query": "Alder wells"})]),
    say("tool", "Alder has 31 wells.", tool_call_id="call_0"),
    say("assistant", "Answer: 31"),
]
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"properties": {"query": {}}}}}]


def same(one: list[Example], other: list[Example]) -> bool:
    return len(one) == len(other) and all(
        a.ids.tolist() == b.ids.tolist() and a.loss_mask.tolist() == b.loss_mask.tolist()
        for a, b in zip(one, other, strict=True)
    )


def test_only_assistant_tokens_are_trained_on_including_the_end_token(chat: ChatTokenizer) -> None:
    [row] = tokenize_conversation(chat, CONVERSATION)
    taught: list[list[int]] = [[]]
    for token, here in zip(row.ids.tolist(), row.loss_mask, strict=True):
        if here:
            taught[-1].append(token)
        elif taught[-1]:
            taught.append([])
    assert len(taught) == 2
    assert all(turn[-1] == chat.end_id for turn in taught)
    assert all(turn.count(chat.end_id) == 1 for turn in taught)
    call, answer = (chat.decode(turn) for turn in taught)
    assert answer == "Answer: 31"
    assert '"name": "search"' in call
    assert "Alder wells" in call
    untaught = chat.tokenizer.decode(row.ids[~row.loss_mask].tolist())
    assert "How many wells" in untaught
    assert "Alder has 31 wells." in untaught
    assert "Answer" not in untaught
    assert row.targets == row.loss_mask.sum() == sum(map(len, taught))


def test_a_conversation_decodes_to_the_template_s_text(chat: ChatTokenizer) -> None:
    [row] = tokenize_conversation(chat, CONVERSATION, TOOLS)
    whole = chat.tokenizer.apply_chat_template(
        [chat.style.convert(m, chat.controls) for m in CONVERSATION],
        tools=TOOLS,
        tokenize=False,
        add_generation_prompt=False,
    )
    text = chat.tokenizer.decode(row.ids.tolist(), skip_special_tokens=False)
    assert whole.startswith(text)
    assert not whole[len(text) :].strip()


def test_what_comes_after_the_last_reply_is_left_out(chat: ChatTokenizer) -> None:
    assert same(
        tokenize_conversation(chat, [*CONVERSATION, say("user", "Thanks.")]), tokenize_conversation(chat, CONVERSATION)
    )


@pytest.mark.parametrize("messages", [[], [say("user", "Hello?")], [say("system", "Be brief."), say("user", "Hm")]])
def test_a_conversation_without_an_assistant_message_is_rejected(messages: list[Message], chat: ChatTokenizer) -> None:
    with pytest.raises(DataError, match="no assistant message"):
        tokenize_conversation(chat, messages)


def test_replies_in_the_prompt_are_context(chat: ChatTokenizer) -> None:
    [row] = tokenize_conversation(chat, CONVERSATION, context=3)
    [whole] = tokenize_conversation(chat, CONVERSATION)
    assert row.ids.tolist() == whole.ids.tolist()
    trained = row.ids[row.loss_mask].tolist()
    assert chat.decode(trained) == "Answer: 31"


THOUGHTFUL = "<think>\nhmm\n</think>\n\nb"


def test_a_template_that_drops_thoughts_gives_one_row_or_one_per_turn() -> None:
    """As in a rollout: rollout.on_template_change."""
    chat = chat_tokenizer("forgetful")
    turns = [say("user", "a"), say("assistant", THOUGHTFUL), say("user", "c"), say("assistant", "d")]
    [row] = tokenize_conversation(chat, turns)
    assert THOUGHTFUL in chat.tokenizer.decode(row.ids.tolist())
    first, second = tokenize_conversation(chat, turns, on_change="fork")
    assert chat.decode(first.ids[first.loss_mask].tolist()) == THOUGHTFUL
    assert "<think>" not in chat.tokenizer.decode(second.ids.tolist())
    assert chat.decode(second.ids[second.loss_mask].tolist()) == "d"


def test_text_that_the_template_drops_is_trained_on_all_the_same() -> None:
    """A thought, alone or before a call; what the template does write is not written twice."""
    chat = chat_tokenizer("forgetful")
    call = ToolCall(id="call_0", name="search", arguments={"query": "x"})
    for message in (say("assistant", THOUGHTFUL), say("assistant", THOUGHTFUL, tool_calls=[call])):
        written = chat.decode(reply_tokens(chat, message))
        assert written.startswith(THOUGHTFUL)
        assert written.count("hmm") == 1
        assert bool(message.tool_calls) == ("search" in written)
    plain = say("assistant", "b")
    assert reply_tokens(chat, plain) == chat.reply(plain)


def test_the_end_of_the_conversation_is_no_part_of_its_last_reply() -> None:
    """Phi-3's template ends each turn, and the conversation besides; a rollout ends at the first of the two."""
    changed = tokenizer("chatml")
    changed.eos_token = "<|endoftext|>"
    changed.chat_template = (
        "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor -%}"
        "{{ '<|im_start|>assistant\n' if add_generation_prompt else eos_token }}"
    )
    chat = ChatTokenizer(changed)
    conversation = [say("user", "a"), say("assistant", "b"), say("user", "c"), say("assistant", "d")]
    [row] = tokenize_conversation(chat, conversation)
    assert chat.tokenizer.decode(row.ids[row.loss_mask].tolist()) == "b<|im_end|>d<|im_end|>"
    whole = chat.tokenizer.decode(chat.encode(chat.render(conversation, generation_prompt=False)))
    assert chat.tokenizer.decode(row.ids.tolist()) + "\n<|endoftext|>" == whole


def test_text_before_a_call_is_left_out_where_rollouts_would_not_read_the_call_after_it() -> None:
    """Llama 3 writes calls bare, at the start of a reply; its template drops the text beside them."""
    chat = chat_tokenizer("llama3")
    call = ToolCall(id="call_0", name="search", arguments={"query": "x"})
    messages = [say("user", "a"), say("assistant", "Let me see.", tool_calls=[call])]
    thoughtful = [say("user", "a"), say("assistant", THOUGHTFUL, tool_calls=[call])]
    for conversation, content in ((messages, ""), (thoughtful, THOUGHTFUL.partition("</think>")[0] + "</think>")):
        [row] = tokenize_conversation(chat, conversation)
        text, calls = chat.find_format("auto").parse(chat.decode(row.ids[row.loss_mask].tolist()))
        assert [(found.name, found.arguments) for found in calls] == [("search", {"query": "x"})]
        assert text.startswith(content)
        assert "Let me see." not in text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", ["chatml", "qwen3", "forgetful"])
@pytest.mark.parametrize("content", ["The cafe\u0301 is open.", "x \ufdd0 y", "The CAPS", "\u4e00 <|im_end|>"])
def test_text_that_the_tokenizer_changes_is_written_once(template: str, kind: str, content: str) -> None:
    chat, message = chat_tokenizer(template, kind), say("assistant", content)
    assert reply_tokens(chat, message) == chat.reply(message)
    thoughtful = say("assistant", f"<think>\nHmm\n</think>\n\n{content}")
    alone = chat.decode(reply_tokens(chat_tokenizer("chatml", kind), message))
    written = chat.decode(reply_tokens(chat, thoughtful))
    assert (written.lower().count("hmm"), written.count(alone)) == (1, 1)
    assert written.endswith(alone)


def with_template(source: str) -> ChatTokenizer:
    changed = tokenizer("chatml")
    changed.chat_template = source
    return ChatTokenizer(changed)


def test_text_that_the_template_changes_is_refused() -> None:
    source = chat_tokenizer("chatml").tokenizer.chat_template
    chat = with_template(source.replace("+ m.content", "+ m.content | replace('secret', '*')"))
    assert reply_tokens(chat, say("assistant", "open")) == chat.reply(say("assistant", "open"))
    with pytest.raises(DataError, match="changes the text"):
        reply_tokens(chat, say("assistant", "the secret is out"))


def test_long_text_that_the_template_drops_takes_linear_time() -> None:
    chat = chat_tokenizer("forgetful")
    content = f"<think>\n{'a ' * 100_000}\n</think>\n\n{'a ' * 50_000}b"
    start = time.process_time()
    assert _overlap(content, "a " * 50_000 + "b<|im_end|>") == 100_001
    assert time.process_time() - start < 2.0  # 0.1 s; comparing every end takes minutes
    assert chat.decode(reply_tokens(chat, say("assistant", content[-2000:]))) == content[-2000:]


@given(st.text("ab", max_size=12), st.text("ab", max_size=12))
def test_the_overlap_is_the_longest_end_that_is_a_start(text: str, other: str) -> None:
    assert _overlap(text, other) == max(n for n in range(len(text) + 1) if other.startswith(text[len(text) - n :]))


def test_a_truncated_row_shares_no_memory_with_the_whole() -> None:
    whole = Example.of(list(range(10)), [False] * 5 + [True] * 5)
    cut = whole.truncated(7)
    assert cut.ids.tolist() == list(range(7))
    assert (len(cut), cut.targets, whole.targets) == (7, 2, 5)
    assert not np.shares_memory(cut.ids, whole.ids)
    assert Example.of([5, 6], [True, True]).targets == 1  # nothing predicts a first token


def test_a_rollout_s_messages_give_the_rollout_s_tokens_and_mask(
    tmp_path: Path, make_config: Callable[..., Path]
) -> None:
    """What the model that ships samples, with tools and several turns, trained on as `train` and as `sft` see it."""
    from toolwise.training.evaluate import validate
    from toolwise.training.run import assemble

    config = load_config(
        make_config(tmp_path, {"rollout": {"n": 1, "max_new_tokens": 96}, "reward": {"sandbox": {"tier": "off"}}})
    )
    run = assemble(config)
    try:
        scored = asyncio.run(validate(run))
    finally:
        run.close()
    tools = [tool.get_openai_tool_schema().model_dump() for tool in run.scheduler.tools.values()]
    turns = []
    for one in scored:
        rollout = one.rollout
        rows = build_rows(with_zero_advantages([one]))
        assert all(row.ids[-1] in run.chat.stop_ids for row in rows), "a reply was cut off"
        examples = tokenize_conversation(run.chat, rollout.messages, tools, context=rollout.prompt_length)
        assert [e.ids.tolist() for e in examples] == [row.ids.tolist() for row in rows]
        assert [e.loss_mask.tolist() for e in examples] == [row.sampled.tolist() for row in rows]
        turns.append(len(rollout.steps))
    assert max(turns) > 1
