"""Documentation pages, read as a person would: every snippet in order, in one folder, as it is written.

- A snippet that begins with `# name.py` or `# name.toml` is that file; another one with the same name is appended.
  A JSON snippet after a paragraph that ends with "`name.jsonl`:" is a row of that file.
- Python without a file name is executed, in one namespace for the page.
- TOML is merged onto the page's base configuration, which says no more than what a run cannot do without, and that
  configuration is tried with `toolwise train --dry-run`.
- Shell commands are run. Those that cannot run in a test are listed with the reason.

A snippet in any other language fails the page, and so does a command that is neither run nor listed.
"""

from __future__ import annotations

import copy
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from toolwise.config.imports import load_module
from toolwise.data import load_tasks

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FIRST_COMMENT = re.compile(r"# ([\w/.-]+\.(?:py|toml))\b")
NAMED_BEFORE = re.compile(r"`([\w/.-]+\.jsonl)`:\s*\Z")

BASE: dict[str, Any] = {
    "model": {"path": "builtin:small", "device": "cpu"},
    "data": {"train": "train.jsonl", "batch_size": 1},
    "rollout": {"n": 2, "max_new_tokens": 32},
    "multi_turn": {"max_turns": 3},
    "reward": {"function": "toolwise.demo.reward:small_world_reward"},
    "trainer": {"total_steps": 1},
}
"""What a snippet of a configuration is merged onto: a model, tasks, a reward, and sizes for a test."""


@dataclass(frozen=True)
class Snippet:
    page: str
    line: int
    language: str
    text: str
    file: str | None
    """The file that the page says it is."""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def read_snippets(page: str) -> Iterator[Snippet]:
    """All fenced snippets of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        before, language, body = text[: found.start()], found[1].strip(), found[2]
        named = FIRST_COMMENT.match(body) or (NAMED_BEFORE.search(before) if language == "json" else None)
        yield Snippet(page, before.count("\n") + 1, language, body, named[1] if named else None)


def commands(text: str) -> Iterator[str]:
    """The command lines of a shell snippet, without comments."""
    for line in text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield shlex.join(words)


class Reader:
    """Follows a page in `folder`, which must be the working directory."""

    def __init__(
        self,
        page: str,
        folder: Path,
        cli: Callable[..., Any],
        *,
        base: Mapping[str, Any] | None = None,
        not_run: Mapping[str, str] | None = None,
        handlers: Mapping[str, Callable[[Snippet], None]] | None = None,
    ) -> None:
        """`not_run`: command -> why it cannot run here. `handlers`: language -> what to do instead of the usual."""
        self.page, self.folder, self.cli = page, folder, cli
        self.base = dict(base or {})
        self.not_run = dict(not_run or {})
        self.names: dict[str, Any] = {"__name__": "page"}
        self.output: dict[str, str] = {}
        """What each command printed."""
        self._handlers = {"python": self._python, "toml": self._toml, "sh": self._sh, "json": self._json}
        self._handlers.update(handlers or {})
        self._left_out: set[str] = set()
        self._rows: dict[Path, list[Any]] = {}

    def read(self) -> None:
        """Every snippet of the page; the first that fails is named."""
        snippets = list(read_snippets(self.page))
        assert snippets, f"{self.page} has no snippets"
        for snippet in snippets:
            handler = self._handlers.get(snippet.language)
            assert handler is not None, (
                f"{snippet.place}: nothing runs a snippet in {snippet.language or 'no language'!r}"
            )
            try:
                handler(snippet)
            except Exception as fault:
                fault.add_note(f"in the snippet at {snippet.place}")
                raise
        stale = self.not_run.keys() - self._left_out
        assert not stale, f"{self.page} no longer has: {', '.join(stale)}"

    def _python(self, snippet: Snippet) -> None:
        if snippet.file is None:
            exec(compile(snippet.text, snippet.place, "exec"), self.names)
            return
        path = self.folder / snippet.file
        before = f"{path.read_text()}\n\n" if path.exists() else ""
        path.write_text(before + snippet.text)
        for name, module in list(sys.modules.items()):  # those that load this file shall find what is new in it
            if getattr(module, "__file__", None) == str(path):
                del sys.modules[name]
        load_module(str(path), what=snippet.place)

    def _toml(self, snippet: Snippet) -> None:
        settings = merged(self.base, tomllib.loads(snippet.text))
        path = self.folder / (snippet.file or "snippet.toml")
        path.write_text(tomli_w.dumps(settings))
        self._run(f"toolwise train {path.name} --dry-run", snippet)

    def _json(self, snippet: Snippet) -> None:
        """A row of a dataset, which must load."""
        path = self.folder / (snippet.file or "snippet.jsonl")
        self._rows.setdefault(path, []).append(json.loads(snippet.text))
        path.write_text("".join(f"{json.dumps(row)}\n" for row in self._rows[path]))
        load_tasks(path)

    def _sh(self, snippet: Snippet) -> None:
        for command in commands(snippet.text):
            if command in self.not_run:
                self._left_out.add(command)
            else:
                self._run(command, snippet)

    def _run(self, command: str, snippet: Snippet) -> None:
        program, *arguments = shlex.split(command)
        assert program == "toolwise", f"{snippet.place}: {command!r} is neither run nor listed in not_run"
        ended = self.cli(*arguments)
        assert ended.status == 0, f"{snippet.place}: {command}\n{ended.out}\n{ended.err}"
        self.output[command] = ended.out


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Settings over others, table by table."""
    result = copy.deepcopy(dict(below))
    for key, value in above.items():
        both_tables = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both_tables else value
    return result
