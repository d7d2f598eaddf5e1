"""The family of a tool: from the configuration, the tool's declaration, a label file, or the rules in families.toml."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from toolwise.data.rlla_rows import TOOL_ENTRY, gold_calls, gold_kind
from toolwise.errors import ConfigError, DataError
from toolwise.rewards.library.call_syntax import expected_calls
from toolwise.routing.actions import MIXED, RouteAction, Target
from toolwise.tools.base import BaseTool
from toolwise.types import Task

RULES_FILE = Path(__file__).with_name("families.toml")


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


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of families.toml; its header explains the fields."""

    family: Family
    name: re.Pattern[str] | None = None
    verb: re.Pattern[str] | None = None
    description: re.Pattern[str] | None = None

    def matches(self, name: str, verb: str, description: str) -> bool:
        pairs = ((self.name, name), (self.verb, verb), (self.description, description))
        return any(pattern is not None and pattern.search(text) for pattern, text in pairs)


@cache
def _rules() -> tuple[list[Rule], frozenset[str]]:
    """The rules, of which the first match decides, and the words to skip before a description's verb: "This API
    returns …"."""
    tables = tomllib.loads(RULES_FILE.read_text(encoding="utf-8"))
    rules = [
        Rule(
            Family.parse(table["family"]),
            _words_pattern(table.get("name"), verbs=False),
            _words_pattern(table.get("verb"), verbs=True),
            _words_pattern(table.get("description"), verbs=False),
        )
        for table in tables["rule"]
    ]
    return rules, frozenset(tables["skip"])


def _words_pattern(words: list[str] | None, *, verbs: bool) -> re.Pattern[str] | None:
    return re.compile(rf"(?<!\w)(?:{'|'.join(_word_pattern(w, verbs) for w in words)})(?!\w)") if words else None


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
    words = " ".join(_WORDS.findall(name)).lower()
    text = " ".join(description.split()).lower()
    verb = next((word for word in _LETTERS.findall(text) if word not in skip), "")
    return next((rule.family for rule in rules if rule.matches(words, verb, text)), Family.OTHER)


_WORDS = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")
_LETTERS = re.compile(r"[a-z]+")


def declared_family(tool: BaseTool) -> Family | None:
    """The family set in the tool's configuration, decorator or class; None if it is set in none of them."""
    if "family" in tool.config:
        return Family.parse(tool.config["family"])
    declared = tool.family != BaseTool.family or any(
        "family" in vars(kind) for kind in type(tool).__mro__ if issubclass(kind, BaseTool) and kind is not BaseTool
    )
    return Family.parse(tool.family) if declared else None


def families_of_task(
    task: Task,
    tools: Mapping[str, BaseTool] | None = None,
    overrides: Mapping[str, Family | str] | None = None,
    labels: Mapping[str, Family | str] | None = None,
) -> dict[str, Family]:
    """The family of every tool of a task, in order: real tools, then those that its prompt only describes.

    Precedence: `overrides` (the configuration), the tool's declaration, `labels`, the rules.
    """
    families: dict[str, Family] = {}
    for name, tool in offered_tools(task, tools or {}).items():
        declared = declared_family(tool)
        family = _lookup_family(name, overrides) or declared or _lookup_family(name, labels)
        families[name] = family or family_of(name, tool.tool_schema.function.description)
    for name, description in described_tools(task).items():
        if name not in families:
            family = _lookup_family(name, overrides) or _lookup_family(name, labels)
            families[name] = family or family_of(name, description)
    return families


def offered_tools(task: Task, tools: Mapping[str, BaseTool]) -> dict[str, BaseTool]:
    names = list(tools) if task.tools is None else task.tools
    return {name: tools[name] for name in names if name in tools}


def described_tools(task: Task) -> dict[str, str]:
    """name -> description of the tools in RLLA's text blocks; the first description if a name occurs twice."""
    descriptions: dict[str, str] = {}
    for message in task.prompt:
        if message.role in ("system", "developer"):
            for name, description, _ in TOOL_ENTRY.findall(message.content or ""):
                descriptions.setdefault(name.strip(), description.strip())
    return descriptions


def _lookup_family(name: str, families: Mapping[str, Family | str] | None) -> Family | None:
    return Family.parse(families[name]) if families and name in families else None


def family_of_call(name: str, families: Mapping[str, Family]) -> Family:
    """The family of a called tool. RLLA's gold calls cut names at a bracket, so a name matches up to its bracket; a
    tool that is not offered is classified by its name alone."""
    if name in families:
        return families[name]
    short = name.strip()
    matches = (f for tool, f in families.items() if tool.startswith(short) and tool[len(short) :].lstrip()[:1] == "(")
    return next(matches, None) or family_of(name) if short else Family.OTHER


def heuristic_target(task: Task, families: Mapping[str, Family] | None = None) -> Target | None:
    """The route for a task's gold calls, by their families; None if neither its ground truth nor its plan has calls.

    No calls: ANSWER. Calls of one family, with or without OTHER ones: that family. Calls of both, or of OTHER alone
    (which both routes keep): MIXED.
    """
    names = gold_call_names(task.ground_truth)
    names = planned_call_names(task.extra_info.get("plan")) if names is None else names
    if names is None:
        return None
    known_families = families if families is not None else families_of_task(task)
    called_families = {family_of_call(name, known_families) for name in names} - {Family.OTHER}
    if not names:
        return RouteAction.ANSWER
    if len(called_families) != 1:
        return MIXED
    return RouteAction.SEARCH_FAMILY if called_families == {Family.SEARCH} else RouteAction.CALCULATE_FAMILY


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
    if not isinstance(plan, list) or not plan:
        return None
    well_formed = all(isinstance(call, list) and call and isinstance(call[0], str) for call in plan)
    return [call[0] for call in plan] if well_formed else None
