"""The wording file: what it may contain, and the errors for anything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolwise.errors import ConfigError
from toolwise.routing.actions import ROUTES
from toolwise.routing.prompt_templates import EMPTY_WORDING, PARTS, load_wording

NO_TOOLS = {"entries": "", "avoided": "", "first": [], "others": [], "avoid": [], "hard": True}


def test_the_shipped_file_has_every_template() -> None:
    shipped = load_wording()
    for style in ("rlla", "chat"):
        for route in ROUTES:
            for part in PARTS[style]:
                assert shipped.has_template(style, route, part)  # type: ignore[arg-type]


def test_the_empty_wording_adds_nothing() -> None:
    assert load_wording("silent") is EMPTY_WORDING
    assert EMPTY_WORDING.render("rlla", ROUTES[0], "note", NO_TOOLS) == ""
    assert not EMPTY_WORDING.has_template("rlla", ROUTES[0], "note")


def test_a_copy_overrides_only_what_it_contains(tmp_path: Path) -> None:
    path = tmp_path / "words.toml"
    path.write_text('[rlla.ANSWER]\nnote = "No."\n')
    mine, shipped = load_wording(path), load_wording()
    assert mine.render("rlla", ROUTES[0], "note", NO_TOOLS) == "No."
    assert {key for key in shipped.templates if mine.templates[key] != shipped.templates[key]} == {
        ("rlla", ROUTES[0], "note")
    }


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[chatt.ANSWER]\nnote = ''", "unknown name chatt; did you mean 'chat'\\?; use rlla, chat"),
        ("[chat.ANSWERS]\nnote = ''", "unknown name chat.ANSWERS; did you mean 'ANSWER'\\?"),
        ("[chat.ANSWER]\nblock = ''", "unknown name chat.ANSWER.block; use note, append"),
        ("[chat.ANSWER]\nnote = 3", "chat.ANSWER.note is 3; write a string"),
        ("[chat]\nANSWER = 3", "chat.ANSWER is 3; write a table"),
        ("chat = 3", "chat is 3; write a table"),
        ("[chat.ANSWER]\nnote = '{{ tool }}'", "chat.ANSWER.note: 'tool' is undefined"),
        ("[chat.ANSWER]\nnote = '{% if %}'", "chat.ANSWER.note: "),
        ('[chat.ANSWER]\nnote = "{{ first.__class__.__mro__ }}"', "chat.ANSWER.note: access to attribute"),
        ("[chat", "copy wording.toml from the package"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "words.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told) as error:
        load_wording(path)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        load_wording(tmp_path / "none.toml")
