"""Observations as text, actions from text: every kind of space, and anything a model may write."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from toolwise.envs.gymnasium import ActionReader, extract_action, observation_text, rendered_text
from toolwise.errors import ConfigError

SPACES: list[Any] = [
    spaces.Discrete(4),
    spaces.Discrete(3, start=-1),
    spaces.MultiDiscrete([3, 4]),
    spaces.MultiBinary(3),
    spaces.Box(-1.0, 1.0, (2, 2)),
    spaces.Text(5),
    spaces.Tuple((spaces.Discrete(2), spaces.Box(0.0, 1.0, (1,)))),
    spaces.Dict({"move": spaces.Discrete(2), "speed": spaces.Box(0.0, 1.0, (1,))}),
]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is\n", "as it is\n"),
        (3, "3"),
        (np.int64(3), "3"),
        (0.123456, "0.1235"),
        ((20, 7, 0), "[20, 7, 0]"),
        (np.array([0.5, -1.25]), "[0.5, -1.25]"),
        (np.array([[1, 2], [3, 4]]), "[1, 2]\n[3, 4]"),
        ({"cell": np.int64(4), "wind": np.array([0.1, 0.2])}, "cell: 4\nwind: [0.1, 0.2]"),
        ({"near": {"door": True}}, "near: {door: True}"),
    ],
)
def test_observations_are_readable(value: Any, text: str) -> None:
    assert observation_text(value) == text


def test_an_image_is_not_turned_into_text() -> None:
    with pytest.raises(ConfigError, match="format_observation"):
        observation_text(np.zeros((64, 64, 3)))


def test_what_is_no_drawing_is_refused() -> None:
    with pytest.raises(ConfigError, match="renders NoneType, not text"):
        rendered_text(None)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("left", "left"),
        ("  left \n", "left"),
        ("<think>right?</think> left", "left"),
        ("<think>x</think>I go <action>left</action>.", "left"),
        ("<action>right</action> no, <action>left</action>", "left"),
        ("<think><action>right</action></think><action>left</action>", "left"),
    ],
)
def test_the_action_is_found_in_what_was_written(text: str, action: str) -> None:
    assert extract_action(text) == action


@pytest.mark.parametrize("space", SPACES, ids=repr)
def test_examples_of_every_space_are_read_back_into_it(space: Any) -> None:
    reader = ActionReader(space)
    examples = reader.examples()
    assert examples
    assert all(space.contains(reader.read(example)) for example in examples)
    assert reader.menu().startswith("actions: ")


@pytest.mark.parametrize("space", SPACES, ids=repr)
@settings(max_examples=40, deadline=None)
@given(text=st.text() | st.recursive(st.integers() | st.floats(), st.lists).map(json.dumps))
def test_whatever_is_written_is_in_the_space_or_a_valueerror(space: Any, text: str) -> None:
    try:
        action = ActionReader(space).read(text)
    except ValueError as misread:
        said_of_it = str(misread)
    else:
        said_of_it = ""
        assert space.contains(action)
    assert len(said_of_it) < 1000


def test_many_actions_are_not_all_listed() -> None:
    menu = ActionReader(spaces.Discrete(500), [f"go {i}" for i in range(500)]).menu()
    assert menu.endswith("…")
    assert len(menu) < 1000
