"""References to Python code in configuration files, and errors for references that do not resolve."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from toolwise.config.imports import did_you_mean, load_module, load_reference
from toolwise.errors import ConfigError


def write(folder: Path, text: str, name: str = "mine.py") -> str:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_a_module_s_name() -> None:
    import json

    assert load_reference("json:dumps", what="reward") is json.dumps


def test_a_dotted_name_inside_a_module() -> None:
    assert load_reference("pathlib:Path.home", what="tool")() == Path.home()


def test_a_file_s_name(tmp_path: Path) -> None:
    assert load_reference(f"{write(tmp_path, 'answer = 42')}:answer", what="reward") == 42


def test_a_relative_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "answer = 43")
    monkeypatch.chdir(tmp_path)
    assert load_reference("mine.py:answer", what="reward") == 43


def test_two_references_into_one_file_share_one_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = write(tmp_path, "seen = []\ndef add(x):\n    seen.append(x)\n")
    load_reference(f"{place}:add", what="tool")(1)
    monkeypatch.chdir(tmp_path)
    assert load_reference("./mine.py:seen", what="tool") == [1]


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    one, two = write(tmp_path, "answer = 1"), write(tmp_path / "other", "answer = 2")
    assert [load_reference(f"{place}:answer", what="x") for place in (one, two)] == [1, 2]


def test_a_file_s_classes_know_their_module(tmp_path: Path) -> None:
    found = load_reference(f"{write(tmp_path, 'class Tool: pass')}:Tool", what="tool")
    assert sys.modules[found.__module__].Tool is found


@pytest.mark.parametrize("reference", ["", "json", "json:", ":dumps", "json.dumps"])
def test_what_names_nothing_is_refused_with_the_form_to_use(reference: str) -> None:
    with pytest.raises(ConfigError, match=r"package\.module:name or path/to/file\.py:name"):
        load_reference(reference, what="reward")


def test_a_missing_name_is_told_with_a_guess() -> None:
    with pytest.raises(ConfigError, match=r"reward: json has no 'dump_s'; did you mean 'dumps'\?"):
        load_reference("json:dump_s", what="reward")


def test_a_missing_name_without_anything_like_it() -> None:
    with pytest.raises(ConfigError, match=r"json has no 'qqqqqqq'$"):
        load_reference("json:qqqqqqq", what="reward")


def test_a_missing_module() -> None:
    with pytest.raises(ConfigError, match="cannot import 'no_such_module_here'"):
        load_reference("no_such_module_here:f", what="reward")


def test_a_missing_file() -> None:
    with pytest.raises(ConfigError, match=r"tools: file 'nowhere/x\.py' does not exist"):
        load_reference("nowhere/x.py:f", what="tools")


@pytest.mark.parametrize(
    ("text", "said"),
    [("1 / 0", "ZeroDivisionError"), ("def f(:", "SyntaxError"), ("import no_such_module_here", "no_such_module_here")],
)
def test_a_file_that_fails_on_import_is_told_in_one_line_and_not_kept(tmp_path: Path, text: str, said: str) -> None:
    place = write(tmp_path, text)
    with pytest.raises(ConfigError, match=said) as caught:
        load_module(place, what="reward")
    assert place in str(caught.value)
    assert "\n" not in str(caught.value)
    write(tmp_path, "answer = 1")
    assert load_reference(f"{place}:answer", what="reward") == 1


def test_a_guess_only_where_something_is_close() -> None:
    assert did_you_mean("calculater", ["calculator", "search"]) == "; did you mean 'calculator'?"
    assert did_you_mean("xyz", ["calculator", "search"]) == ""


def test_an_edited_file_is_loaded_again(tmp_path: Path) -> None:
    """Even an edit within the same second that keeps the size."""
    found = [load_reference(f"{write(tmp_path, f'answer = {n}')}:answer", what="x") for n in (1, 2, 3, 1)]
    assert found == [1, 2, 3, 1]
