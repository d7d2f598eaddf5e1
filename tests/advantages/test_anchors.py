"""State anchors: which steps are in the same state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolwise.advantages import StateAnchor, last_messages, last_observation
from toolwise.advantages.anchors import as_anchor
from toolwise.advantages.arrays import CreditError
from toolwise.errors import ToolwiseError
from toolwise.messages import Message, Prefix, ToolCall
from toolwise.types import StepData

Step = Callable[..., StepData]


def say(role: Any, content: str, **more: Any) -> Message:
    return Message(role=role, content=content, **more)


def codes(anchor: StateAnchor, steps: list[StepData], groups: list[int] | None = None) -> list[int]:
    return anchor.codes(steps, np.array(groups or [0] * len(steps))).tolist()


def test_the_environment_s_own_name_comes_first(step: Step) -> None:
    steps = [step(state="cave"), step(state="attic"), step(state="cave")]
    assert codes(StateAnchor(), steps) == [0, 1, 0]
    assert codes(StateAnchor("state_key"), steps) == [0, 1, 0]


def test_a_state_key_need_not_be_text(step: Step) -> None:
    steps = [step(state={"at": [1, 2]}), step(state={"at": [1, 2]}), step(state={"at": [2, 1]})]
    assert codes(StateAnchor(), steps) == [0, 0, 1]


def test_an_environment_that_names_no_state_is_told_of(step: Step) -> None:
    with pytest.raises(CreditError, match="no step has a state_key; use last_observation"):
        codes(StateAnchor("state_key"), [step(), step()])


def test_a_step_that_has_no_name_where_others_do_meets_nobody(step: Step) -> None:
    found = codes(StateAnchor("state_key"), [step(state="a"), step(), step(), step(state="a")])
    assert len(set(found)) == 3
    assert found[0] == found[3]


def test_else_the_last_observation_however_the_agent_came_there(step: Step) -> None:
    by_north = [say("user", "go"), say("assistant", "north"), say("tool", "A dark room.")]
    by_south = [say("user", "go"), say("assistant", "south"), say("tool", "A  dark\nroom. ")]
    elsewhere = [say("user", "go"), say("assistant", "north"), say("tool", "A hall.")]
    steps = [step(observation_data=seen) for seen in (by_north, by_south, elsewhere)]
    assert codes(StateAnchor(), steps) == [0, 0, 1]
    assert codes(StateAnchor("last_observation"), steps) == [0, 0, 1]


def test_all_results_of_one_turn_are_one_observation() -> None:
    one = [say("assistant", "a"), say("tool", "1", tool_call_id="x"), say("tool", "2", tool_call_id="y")]
    same = [say("assistant", "b"), say("tool", "1", tool_call_id="p"), say("tool", "2", tool_call_id="q")]
    less = [say("assistant", "b"), say("tool", "2", tool_call_id="q")]
    assert last_observation(one) == last_observation(same)
    assert last_observation(one) != last_observation(less)


def test_who_said_it_counts() -> None:
    assert last_observation([say("tool", "yes")]) != last_observation([say("user", "yes")])


def test_messages_may_be_dictionaries_or_shared_prefixes() -> None:
    messages = [say("user", "go"), say("assistant", "n"), say("tool", "hall"), say("assistant", "later")]
    seen = last_observation(messages[:3])
    assert seen == last_observation([m.to_openai() for m in messages[:3]])
    assert seen == last_observation(Prefix(messages, 3))


def test_the_last_n_messages_take_in_what_the_agent_did() -> None:
    def seen(first: str, did: str, id_: str) -> list[Message]:
        call = ToolCall(name="go", arguments={"where": did}, id=id_)
        return [say("user", first), Message(role="assistant", tool_calls=[call]), say("tool", "hall")]

    last_two = last_messages(2)
    assert last_two(seen("a", "north", "1")) == last_two(seen("b", "north", "2"))
    assert last_two(seen("a", "north", "1")) != last_two(seen("a", "south", "1"))
    assert last_messages(9)(seen("a", "north", "1")) != last_messages(9)(seen("b", "north", "1"))
    with pytest.raises(CreditError, match="anchor_messages is 0"):
        last_messages(0)


def test_a_call_reads_the_same_from_a_dictionary() -> None:
    call = Message(role="assistant", content=None, tool_calls=[ToolCall(name="go", arguments={"b": 1, "a": 2}, id="1")])
    plain = {"role": "assistant", "content": None, "tool_calls": [{"name": "go", "arguments": {"a": 2, "b": 1}}]}
    assert last_messages(1)([call]) == last_messages(1)([plain])


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        ("a  b", " a b", "ab"),
        (3, 3, 4),
        ((1, 2), (1, 2), (2, 1)),
        ([1, [2]], [1, [2]], [[1], 2]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1}),
        (np.array([1, 2]), np.array([1, 2]), np.array([2, 1])),
        (([1], 2), ([1], 2), ([2], 1)),
    ],
)
def test_observations_that_are_no_conversation_are_compared_by_value(one: Any, same: Any, other: Any) -> None:
    assert last_observation(one) == last_observation(same)
    assert last_observation(one) != last_observation(other)


def test_an_object_that_hashes_by_identity_is_refused_rather_than_made_unique(step: Step) -> None:
    with pytest.raises(CreditError, match=r"states of type object cannot be compared; give a state_hashing_func"):
        codes(StateAnchor(), [step(observation_data=object())])


def test_a_function_of_one_s_own(step: Step) -> None:
    steps = [step(observation_data={"x": x, "noise": i}) for i, x in enumerate([1, 2, 1])]
    assert codes(StateAnchor(lambda seen: seen["x"]), steps) == [0, 1, 0]
    assert codes(StateAnchor(lambda seen: [seen["x"]]), steps) == [0, 1, 0]


def test_a_function_that_says_none_means_no_state(step: Step) -> None:
    assert len(set(codes(StateAnchor(lambda seen: None), [step(), step(), step()]))) == 3


def test_a_function_that_raises_is_named_with_its_step(step: Step) -> None:
    def broken(seen: Any) -> Any:
        return seen["room"]

    with pytest.raises(ToolwiseError, match="cannot compute the state of step 5: broken: TypeError"):
        codes(StateAnchor(broken), [step(5)])


def test_a_function_by_name(step: Step, tmp_path: Path) -> None:
    source = tmp_path / "rooms.py"
    source.write_text("def room(seen):\n    return seen['room']\n")
    steps = [step(observation_data={"room": room}) for room in "aba"]
    assert codes(StateAnchor(f"{source}:room"), steps) == [0, 1, 0]
    with pytest.raises(ToolwiseError, match="state_anchor"):
        codes(StateAnchor(f"{source}:no_such"), steps)


def test_a_name_that_is_none_is_guessed_at(step: Step) -> None:
    with pytest.raises(CreditError, match="did you mean 'last_messages'"):
        codes(StateAnchor("last_message"), [step()])


def test_what_a_caller_may_give() -> None:
    assert as_anchor(None) == StateAnchor("auto")
    assert as_anchor("last_messages").by == "last_messages"
    assert as_anchor(len).by is len
    assert as_anchor(StateAnchor("state_key")).by == "state_key"


# Similar texts.

PAGE = "Results for red shoes: 1. Runner, size 42, 59.99. 2. Walker, size 43, 49.99. 3. Hiker, size 44, 99.99. Page {}"


def test_texts_alike_are_one_state_within_their_group(step: Step) -> None:
    steps = [step(observation_data=text) for text in (PAGE.format(1), PAGE.format(2), "Nothing found", PAGE.format(1))]
    exact = codes(StateAnchor(), steps)
    assert exact[0] != exact[1]
    alike = codes(StateAnchor(similarity=0.95), steps)
    assert alike[0] == alike[1] == alike[3] != alike[2]


def test_names_of_states_are_never_alike(step: Step) -> None:
    found = codes(StateAnchor(similarity=0.5), [step(state="room 1"), step(state="room 2")])
    assert found[0] != found[1]


@given(st.lists(st.text("ab", min_size=5, max_size=9), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_what_is_alike_does_not_depend_on_order_or_on_other_groups(step: Step, texts: list[str], rng: Any) -> None:
    def met(order: list[int]) -> set[frozenset[int]]:
        steps = [step(observation_data=texts[i]) for i in order] + [step(observation_data="ababab")]
        found = codes(StateAnchor(similarity=0.8), steps, [0] * len(order) + [1])[:-1]
        return {frozenset(i for i, c in zip(order, found, strict=True) if c == code) for code in found}

    order = list(range(len(texts)))
    before = met(order)
    rng.shuffle(order)
    assert met(order) == before
