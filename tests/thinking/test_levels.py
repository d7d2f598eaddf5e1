"""The built-in levels, valid template files, and error messages for invalid ones."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolwise.errors import ConfigError
from toolwise.thinking.levels import DEFAULT_LEVELS, LEVELS_FILE, load_levels
from toolwise.thinking.reply import parse_reply

words = st.text(st.characters(exclude_characters="<>", exclude_categories=("Cs",)), min_size=1).filter(
    lambda text: text == text.strip() and text != ""
)


def test_there_are_four_and_each_thinks_more_than_the_one_before() -> None:
    assert DEFAULT_LEVELS.numbers == (1, 2, 3, 4)
    parts = [set(level.parts) for level in DEFAULT_LEVELS]
    assert parts[0] == set()
    assert all(less < more for less, more in pairwise(parts))
    assert [level.thinks for level in DEFAULT_LEVELS] == [False, True, True, True]


def test_what_forces_a_level_stops_where_its_thought_or_its_action_begins() -> None:
    assert [level.opening for level in DEFAULT_LEVELS] == [
        "<level>1</level>",
        "<level>2</level><think>",
        "<level>3</level><think>",
        "<level>4</level><think>",
    ]
    assert DEFAULT_LEVELS.by_number(2).head("door open") == "<level>2</level><think>door open</think>"
    assert DEFAULT_LEVELS.by_number(1).head() == "<level>1</level>"


@given(number=st.sampled_from(DEFAULT_LEVELS.numbers), action=words, part=words)
def test_what_a_level_writes_is_read_back(number: int, action: str, part: str) -> None:
    level = DEFAULT_LEVELS.by_number(number)
    parts = dict.fromkeys(("state", "goal", "reflection", "candidates"), part)
    reading = parse_reply(level.write(action, parts))
    assert (reading.level, reading.action, reading.kind, reading.faults) == (number, action, "action", ())
    assert reading.thought == (level.thought(parts).strip() if number > 1 else None)


def test_a_part_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match=r"level 3 \(reflect\) needs the part 'goal' in its thought"):
        DEFAULT_LEVELS.by_number(3).write("go", {"state": "here"})


def test_the_prompt_explains_every_level() -> None:
    told = DEFAULT_LEVELS.explain()
    for level in DEFAULT_LEVELS:
        assert level.instruction in told
        assert f"<level>{level.number}</level>" in told
    assert "{" not in told


def changed(tmp_path: Path, old: str, new: str) -> Path:
    text = LEVELS_FILE.read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    return path


def test_a_custom_file_replaces_the_built_in_one(tmp_path: Path) -> None:
    levels = load_levels(changed(tmp_path, "<think>State: {state}</think>", "<think>Ich sehe {sight} — gut.</think>"))
    assert levels.by_number(2).parts == ("sight",)
    assert levels.by_number(2).write("geh", {"sight": "die Tür"}) == (
        "<level>2</level><think>Ich sehe die Tür — gut.</think><action>geh</action>"
    )
    assert levels.by_number(3) == DEFAULT_LEVELS.by_number(3)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('name = "act"\n', "", "`level[0].name` is required: add it"),
        ('name = "act"', "name = 3", "`level[0].name` must be a valid string, got 3"),
        (
            'instruction = "say what the state is"',
            'instruction = " "',
            "`level[1].instruction`: String should have at least 1 character",
        ),
        ("<level>2</level>", "<level>3</level>", "level 2: the skeleton must be <level>2</level><think>…</think>"),
        ("<level>1</level>", "<level>1</level><think>hm</think>", "level 1: the skeleton must be"),
        ("<think>State: {state}</think>", "", "level 2: the skeleton must be"),
        ("<think>State:", "<think><think>State:", "level 2: the skeleton must be"),
        ("<action>{action}", "<action>action", "level 1: the skeleton must be"),
        ("State: {state}</think>", "I {action}</think>", "level 2: the skeleton has {action} in its thought"),
        ("{levels}", "levels", "`prompt`: String should match pattern '\\{levels\\}'"),
        ("prompt =", "promt =", "unknown key `promt` (did you mean `prompt`?)"),
        ("[[level]]", "[level]", "is not valid TOML"),
    ],
)
def test_errors_in_a_file_are_one_line(tmp_path: Path, old: str, new: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_levels(changed(tmp_path, old, new))
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_three_levels_are_not_enough(tmp_path: Path) -> None:
    path = tmp_path / "three.toml"
    path.write_text(LEVELS_FILE.read_text(encoding="utf-8").rpartition("[[level]]")[0], encoding="utf-8")
    with pytest.raises(ConfigError, match="`level`: List should have at least 4 items after validation, not 3"):
        load_levels(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml does not exist"):
        load_levels(tmp_path / "none.toml")
