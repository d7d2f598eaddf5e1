"""The reader of pages itself: nothing is passed over in silence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.docs import pages
from tests.docs.pages import Reader, commands


@pytest.fixture
def page(reader: Callable[..., Reader], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Reader]:
    """`page(text)`: somebody about to read this text."""
    monkeypatch.setattr(pages, "ROOT", tmp_path)

    def make(text: str, **settings: object) -> Reader:
        (tmp_path / "page.md").write_text(text)
        return reader("page.md", **settings)

    return make


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no snippet at all", "has no snippets"),
        ("a\n\n```yaml\nx: 1\n```\n", r"page.md:3: nothing runs a snippet in 'yaml'"),
        ("```\ntoolwise doctor\n```\n", "no language"),
        ("```sh\nnpx some-server\n```\n", "'npx some-server' is neither run nor listed"),
        ("```sh\ntoolwise nonsense\n```\n", "No such command"),
        ("```python\nundefined_name\n```\n", "undefined_name"),
        ("```python\n# mine.py\nimport no_such_module\n```\n", "no_such_module"),
        ("```toml\n[rollout]\nm = 1\n```\n", "unknown key `rollout.m`"),
        ('```json\n{"promt": "a"}\n```\n', "prompt"),
    ],
)
def test_what_does_not_run_fails_the_page(page: Callable[..., Reader], text: str, said: str) -> None:
    with pytest.raises(Exception, match=said):
        page(text).read()


def test_a_listed_command_must_still_be_there(page: Callable[..., Reader]) -> None:
    with pytest.raises(AssertionError, match="no longer has: make demo"):
        page("```python\nx = 1\n```\n", not_run={"make demo": "too long"}).read()


def test_a_file_grows_snippet_by_snippet(page: Callable[..., Reader], tmp_path: Path) -> None:
    page("```python\n# mine.py\nx = 1\n```\n\n```python\n# mine.py\ny = x + 1\n```\n").read()
    assert (tmp_path / "mine.py").read_text().count("# mine.py") == 2


def test_commands_have_neither_comments_nor_line_breaks() -> None:
    assert list(commands("make demo   # sets itself up\n# nothing\ntoolwise doctor \\\n  --json\n")) == [
        "make demo",
        "toolwise doctor --json",
    ]
