"""Validation of a worker's answers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolwise.messages import Message, ToolCall
from toolwise.sandbox.faults import KINDS
from toolwise.sandbox.wire import pack, read_answer

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(JSON | st.fixed_dictionaries({"result": JSON}) | st.fixed_dictionaries({"fault": JSON}))
def test_no_answer_raises(answer: Any) -> None:
    result = read_answer(answer)
    assert (
        result.has_valid_score or (result.error is not None and result.error.kind in KINDS) or not result.is_score_valid
    )


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[]", "bad_type"),
        ("{", "bad_type"),
        ("[" * 99_999, "bad_type"),
        ("1" * 9_999, "bad_type"),
        ('{"score": NaN}', "non_finite"),
        ('{"score": "high"}', "bad_type"),
        ('{"score": 1, "error": {"kind": "mine", "message": "m"}}', "exception"),
        ('{"score": 1' + "0" * 400 + "}", "non_finite"),
    ],
)
def test_forged_results_have_a_kind(text: str, kind: str) -> None:
    error = read_answer({"result": text}).error
    assert error is not None
    assert error.kind == kind


def test_a_range_is_held() -> None:
    assert read_answer({"result": '{"score": 0.5}'}, (0, 1)).score == 0.5
    error = read_answer({"result": '{"score": 2}'}, (0, 1)).error
    assert error is not None
    assert error.kind == "out_of_range"


def test_messages_travel_in_openai_form() -> None:
    message = Message(role="assistant", tool_calls=[ToolCall(name="add", arguments={"a": 1})])
    packed = pack([message, {"role": "user", "content": "x"}], 1, {"k": 2})
    assert Message.model_validate(packed["messages"][0]) == message
    assert packed["messages"][1] == {"role": "user", "content": "x"}
    assert (packed["ground_truth"], packed["kwargs"]) == (1, {"k": 2})
