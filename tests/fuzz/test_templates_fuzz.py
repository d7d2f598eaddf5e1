"""Any conversation is rendered by any template, or refused by name; no text of a message becomes a control token."""

from __future__ import annotations

from typing import Any

import chat_tokenizers as made
from fuzzing import JSON, TEXT, fuzz
from hypothesis import strategies as st
from pydantic import ValidationError

from toolwise.errors import ToolwiseError
from toolwise.messages import Message

CALL = st.fixed_dictionaries(
    {"name": TEXT, "arguments": st.one_of(st.dictionaries(TEXT, JSON, max_size=3), TEXT)}, optional={"id": TEXT}
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool"]), "content": st.one_of(TEXT, st.none())},
    optional={
        "tool_calls": st.lists(CALL, min_size=1, max_size=2),
        "tool_call_id": TEXT,
        "name": TEXT,
        "reasoning_content": TEXT,
    },
)
TOOL = st.fixed_dictionaries(
    {"name": TEXT, "description": TEXT, "parameters": st.one_of(JSON, st.just({"type": "object", "properties": {}}))}
).map(lambda function: {"type": "function", "function": function})


@fuzz(
    st.sampled_from(sorted(made.CONTROLS)),
    st.lists(MESSAGE, min_size=1, max_size=5),
    st.one_of(st.none(), st.lists(TOOL, max_size=2)),
    examples=50,
)
def test_any_conversation_is_rendered_or_refused(template: str, given: list[dict[str, Any]], tools: Any) -> None:
    try:
        messages = [Message.model_validate(message) for message in given]
    except ValidationError:
        return
    chat = made.chat_tokenizer(template)
    try:
        ids = chat.start(messages, tools)
        chat.encode_continuation(messages[-1:], tools, after=messages[:-1])
    except ToolwiseError:
        return
    assert all(isinstance(token, int) for token in ids)
