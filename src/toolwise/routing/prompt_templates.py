"""The text that routes add to prompts: Jinja templates in a TOML file that users can replace."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from toolwise.config.imports import did_you_mean
from toolwise.errors import ConfigError
from toolwise.routing.actions import ROUTES, RouteAction

WORDING_FILE = Path(__file__).with_name("wording.toml")

Style = Literal["rlla", "chat"]
Part = Literal["block", "note", "append"]
PARTS: Mapping[str, tuple[Part, ...]] = {"rlla": ("block", "note", "append"), "chat": ("note", "append")}


@dataclass(frozen=True)
class Wording:
    """Templates by (style, route, part); a missing one renders to nothing."""

    templates: Mapping[tuple[str, RouteAction, str], str]

    def has_template(self, style: Style, route: RouteAction, part: Part) -> bool:
        """Whether there is a template, even an empty one."""
        return (style, route, part) in self.templates

    def render(self, style: Style, route: RouteAction, part: Part, values: Mapping[str, Any]) -> str:
        text = self.templates.get((style, route, part), "")
        return _compile(text).render(**values) if text else ""


EMPTY_WORDING = Wording({})
"""Adds no text: tool blocks are removed and schemas hidden, nothing else."""


def load_wording(path: str | Path | None = None) -> Wording:
    """The shipped wording, overridden by the templates in `path`; "silent" is the empty wording."""
    if path == "silent":
        return EMPTY_WORDING
    shipped = _default_wording()
    if path is None:
        return shipped
    return Wording({**shipped.templates, **_read_templates(Path(path))})


@cache
def _default_wording() -> Wording:
    return Wording(_read_templates(WORDING_FILE))


def _read_templates(path: Path) -> dict[tuple[str, RouteAction, str], str]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as fault:
        raise ConfigError(f"{path}: {fault}; copy {WORDING_FILE.name} from the package and edit the copy") from fault
    templates = {}
    for style, routes in tables.items():
        _check_known(path, style, PARTS, routes)
        for name, parts in routes.items():
            where = f"{style}.{name}"
            _check_known(path, name, ROUTES, parts, where)
            for part, text in parts.items():
                _check_known(path, part, PARTS[style], {}, f"{where}.{part}")
                if not isinstance(text, str):
                    raise ConfigError(f"{path}: {where}.{part} is {text!r}; write a string")
                _check_template(path, f"{where}.{part}", text)
                templates[style, RouteAction.parse(name), part] = text
    return templates


def _check_known(path: Path, name: str, known: Any, table: Any, where: str | None = None) -> None:
    names = [str(item) for item in known]
    if name not in names:
        raise ConfigError(f"{path}: unknown name {where or name}{did_you_mean(name, names)}; use {', '.join(names)}")
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {where or name} is {table!r}; write a table")


def _check_template(path: Path, where: str, text: str) -> None:
    from jinja2 import TemplateError

    try:
        _compile(text).render(entries="", avoided="", first=[], others=[], avoid=[], hard=True)
    except TemplateError as fault:
        raise ConfigError(f"{path}: {where}: {' '.join(str(fault).split())}") from fault


@cache
def _compile(text: str) -> Any:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # The file may come from someone other than the user who runs it: sandboxed, so templates can only render text.
    return ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True).from_string(text)
