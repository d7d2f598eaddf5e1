"""The routes a router chooses from, and the families of tools that they stand for.

The family of a tool comes from the configuration, the tool's declaration, a label file, or the rules in families.toml.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from enum import StrEnum
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

from toolwise.data.rlla_rows import TOOL_ENTRY, gold_calls, gold_kind
from toolwise.errors import ConfigError, DataError, ToolwiseError
from toolwise.rewards.library.calls import expected_calls
from toolwise.tools.base import BaseTool
from toolwise.types import Task

RULES_FILE = Path(__file__).with_name("families.toml")


class RouteAction(StrEnum):
    """A route. Values are the names in files and prompts; the order is that of the head's logits."""

    ANSWER = "ANSWER"
    SEARCH_FAMILY = "SEARCH-FAMILY"
    CALCULATE_FAMILY = "CALCULATE-FAMILY"

    @property
    def index(self) -> int:  # type: ignore[override]  # hides str.index, which no route needs
        return ROUTES.index(self)

    @classmethod
    def parse(cls, written: str | int) -> RouteAction:
        """From the value, the member's name, the short form (`search`), or the index among the logits."""
        if isinstance(written, int) and not isinstance(written, bool) and 0 <= written < len(ROUTES):
            return ROUTES[written]
        route = _SPELLINGS.get(_normalize_spelling(str(written)))
        if route is None:
            raise ToolwiseError(f"unknown route {written!r}; use one of {', '.join(ROUTES)}")
        return route


ROUTES: tuple[RouteAction, ...] = tuple(RouteAction)

MIXED: Literal["MIXED"] = "MIXED"
"""The label of a row that no single route serves: it needs tools of both families, or of neither."""

Target = str
"""The name of a route, or MIXED; of the default routes a `RouteAction`."""


def parse_target(written: str | int) -> Target:
    """A row's label: a route, or MIXED."""
    if isinstance(written, str) and _normalize_spelling(written) == "mixed":
        return MIXED
    try:
        return RouteAction.parse(written)
    except ToolwiseError:
        raise ToolwiseError(f"unknown target action {written!r}; use one of {', '.join(ROUTES)} or {MIXED}") from None


def _normalize_spelling(written: str) -> str:
    return written.strip().lower().replace("_", "-")


_SPELLINGS = {
    spelling: route
    for route in RouteAction
    for spelling in (_normalize_spelling(route.value), _normalize_spelling(route.value).removesuffix("-family"))
}


class Family(StrEnum):
    """The kind of a tool; the values are those of `BaseTool.family`."""

    SEARCH = "SEARCH"
    CALCULATE = "CALCULATE"
    OTHER = "OTHER"

    @classmethod
    def parse(cls, written: str) -> Family:
        try:
            return cls(str(written).strip().upper())
        except ValueError:
            raise ConfigError(f"unknown family {written!r}; use one of {', '.join(cls)}") from None


def parse_family(written: str, *, any_name: bool = False) -> str:
    """A family's name, in upper case. `any_name`: also families that users have made up."""
    name = str(written).strip().upper()
    if not any_name or name in Family.__members__:
        return Family.parse(written)
    if not _FAMILY_NAME.fullmatch(name):
        raise ConfigError(f"the family {written!r:.80} is not a name: use letters, digits, '-' and '_'")
    return name


_FAMILY_NAME = re.compile(r"[\w.-]{1,64}")
ROUTE_FAMILIES: Mapping[RouteAction, Family] = {
    RouteAction.SEARCH_FAMILY: Family.SEARCH,
    RouteAction.CALCULATE_FAMILY: Family.CALCULATE,
}


@cache
def _rules() -> tuple[list[tuple[Family, dict[str, re.Pattern[str]]]], frozenset[str]]:
    """The rules of families.toml, whose header explains them: a family, and a pattern for each field; the first match
    decides. And the words to skip before a description's verb: "This API returns …"."""
    tables = tomllib.loads(RULES_FILE.read_text(encoding="utf-8"))
    rules = [
        (
            Family.parse(table["family"]),
            {
                field: re.compile(
                    rf"(?<!\w)(?:{'|'.join(_word_pattern(w, field == 'verb') for w in table[field])})(?!\w)"
                )
                for field in ("name", "verb", "description")
                if table.get(field)
            },
        )
        for table in tables["rule"]
    ]
    return rules, frozenset(tables["skip"])


def _word_pattern(word: str, verb: bool) -> str:
    stem = re.escape(word.removesuffix("*").lower()).replace(r"\ ", r"\s+")
    if word.endswith("*"):
        return rf"{stem}\w*"
    if not verb:
        return stem
    if stem.endswith("y"):  # simplify, simplifies, simplified, simplifying
        return rf"{stem[:-1]}(?:y|ys|ies|ied|yed|ying)"
    return rf"{stem.removesuffix('e')}ing|{stem}(?:|s|es|d|ed|ing)"


@lru_cache(maxsize=100_000)
def family_of(name: str, description: str = "") -> Family:
    """The family according to the rules alone."""
    rules, skip = _rules()
    text = " ".join(description.split()).lower()
    texts = {
        "name": " ".join(_WORDS.findall(name)).lower(),
        "verb": next((word for word in re.findall("[a-z]+", text) if word not in skip), ""),
        "description": text,
    }
    return next(
        (family for family, rule in rules if any(rule[field].search(texts[field]) for field in rule)), Family.OTHER
    )


_WORDS = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")


def declared_family(tool: BaseTool, *, any_name: bool = False) -> str | None:
    """The family set in the tool's configuration, decorator or class; None if it is set in none of them."""
    if "family" in tool.config:
        return parse_family(tool.config["family"], any_name=any_name)
    declared = tool.family != BaseTool.family or any(
        "family" in vars(kind) for kind in type(tool).__mro__ if issubclass(kind, BaseTool) and kind is not BaseTool
    )
    return parse_family(tool.family, any_name=any_name) if declared else None


def families_of_task(
    task: Task,
    tools: Mapping[str, BaseTool] | None = None,
    overrides: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
    *,
    any_name: bool = False,
) -> dict[str, str]:
    """The family of every tool of a task, in order: real tools, then those that its prompt only describes.

    Precedence: `overrides` (the configuration), the tool's declaration, `labels`, the rules. `any_name`: families may
    have other names than the default three.
    """
    offered = offered_tools(task, tools or {}).items()
    declared = {name: declared_family(tool, any_name=any_name) for name, tool in offered}
    return {
        name: _lookup_family(name, overrides, any_name)
        or declared.get(name)
        or _lookup_family(name, labels, any_name)
        or family_of(name, description)
        for name, description in tool_descriptions(task, tools or {}).items()
    }


def offered_tools(task: Task, tools: Mapping[str, BaseTool]) -> dict[str, BaseTool]:
    return {name: tools[name] for name in (tools if task.tools is None else task.tools) if name in tools}


def tool_descriptions(task: Task, tools: Mapping[str, BaseTool]) -> dict[str, str]:
    """name -> description of a task's tools: real ones, then those in RLLA's text blocks; the first description if a
    name occurs twice."""
    descriptions = {name: tool.tool_schema.function.description for name, tool in offered_tools(task, tools).items()}
    for message in task.prompt:
        if message.role in ("system", "developer"):
            for name, description, _ in TOOL_ENTRY.findall(message.content or ""):
                descriptions.setdefault(name.strip(), description.strip())
    return descriptions


def _lookup_family(name: str, families: Mapping[str, str] | None, any_name: bool) -> str | None:
    return parse_family(families[name], any_name=any_name) if families and name in families else None


def family_of_call(name: str, families: Mapping[str, str]) -> str:
    """The family of a called tool. RLLA's gold calls cut names at a bracket, so a name matches up to its bracket; a
    tool that is not offered is classified by its name alone."""
    if name in families:
        return families[name]
    short = name.strip()
    matches = (f for tool, f in families.items() if tool.startswith(short) and tool[len(short) :].lstrip()[:1] == "(")
    return next(matches, None) or family_of(name) if short else Family.OTHER


def heuristic_target(task: Task, families: Mapping[str, str] | None = None) -> Target | None:
    """The route for a task's gold calls, by their families; None if neither its ground truth nor its plan has calls.

    No calls: ANSWER. Calls of one family, with or without OTHER ones: that family. Calls of both, or of OTHER alone
    (which both routes keep): MIXED.
    """
    names = needed_call_names(task)
    if names is None:
        return None
    if not names:
        return RouteAction.ANSWER
    known_families = families_of_task(task) if families is None else families
    called = {family_of_call(name, known_families) for name in names} - {Family.OTHER}
    return next((route for route, family in ROUTE_FAMILIES.items() if called == {family}), MIXED)


def needed_call_names(task: Task) -> list[str] | None:
    """Names of the tools that solve a task, by its ground truth or its plan; None if neither has calls."""
    names = gold_call_names(task.ground_truth)
    return planned_call_names(task.extra_info.get("plan")) if names is None else names


def gold_call_names(ground_truth: Any) -> list[str] | None:
    """Names of the tools that a ground truth calls; [] if it is an answer, None if it is neither."""
    if isinstance(ground_truth, str) and gold_kind(ground_truth) != "neither":
        return [call["name"] for call in gold_calls(ground_truth)]
    try:
        return [call.name for call in expected_calls(ground_truth)]
    except DataError:
        return None


def planned_call_names(plan: Any) -> list[str] | None:
    """Names of the tools in `extra_info.plan`, a list of [tool, argument]: the calls that solve a task whose ground
    truth is an answer. None if there is no such plan."""
    calls = plan if isinstance(plan, list) else []
    well_formed = all(isinstance(call, list) and call and isinstance(call[0], str) for call in calls)
    return [call[0] for call in calls] if calls and well_formed else None
