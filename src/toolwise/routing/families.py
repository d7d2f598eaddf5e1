"""Which family a tool is of: by configuration, by the tool's own word, by a label file, or by rules that are data."""

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
    """What kind of help a tool is; the values are those that tools carry (`tools/base.py`)."""

    SEARCH = "SEARCH"
    CALCULATE = "CALCULATE"
    OTHER = "OTHER"

    @classmethod
    def parse(cls, written: str) -> Family:
        try:
            return cls(str(written).strip().upper())
        except ValueError:
            raise ConfigError(f"there is no family {written!r}; write {', '.join(cls)}") from None


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of families.toml, whose head says how to read it."""

    family: Family
    name: re.Pattern[str] | None = None
    verb: re.Pattern[str] | None = None
    description: re.Pattern[str] | None = None

    def matches(self, name: str, verb: str, description: str) -> bool:
        pairs = ((self.name, name), (self.verb, verb), (self.description, description))
        return any(pattern is not None and pattern.search(text) for pattern, text in pairs)


@dataclass(frozen=True, slots=True)
class Rules:
    """Tried from the first to the last."""

    rules: tuple[Rule, ...]
    skip: frozenset[str] = frozenset()
    """Words before a description's verb: "This API returns …"."""

    def family_of(self, name: str, description: str) -> Family:
        words = " ".join(_WORDS.findall(name)).lower()
        told = " ".join(description.split()).lower()
        verb = next((word for word in _LETTERS.findall(told) if word not in self.skip), "")
        return next((rule.family for rule in self.rules if rule.matches(words, verb, told)), Family.OTHER)


def load_rules(path: str | Path = RULES_FILE) -> Rules:
    """The rules of a file in the form of families.toml."""
    path = Path(path)
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as fault:
        raise ConfigError(f"{path}: {fault}; write [[rule]] tables as families.toml has them") from fault
    rules, skip = given.pop("rule", []), given.pop("skip", [])
    if given or not isinstance(rules, list) or not isinstance(skip, list):
        raise ConfigError(f"{path}: it may hold `skip`, a list of words, and [[rule]] tables; nothing else")
    return Rules(tuple(_parse_rule(path, number, table) for number, table in enumerate(rules, 1)), frozenset(skip))


def _parse_rule(path: Path, number: int, table: Mapping[str, Any]) -> Rule:
    words = {key: value for key, value in table.items() if key != "family"}
    for key, value in words.items():
        if key not in ("name", "verb", "description") or not isinstance(value, list):
            raise ConfigError(f"{path}: rule {number}: {key!r} must be a list under name, verb or description")
    patterns: dict[str, Any] = {
        "name": _words_pattern(words.get("name"), verbs=False),
        "verb": _words_pattern(words.get("verb"), verbs=True),
        "description": _words_pattern(words.get("description"), verbs=False),
    }
    return Rule(Family.parse(table.get("family", "")), **patterns)


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


@cache
def default_rules() -> Rules:
    return load_rules()


@lru_cache(maxsize=100_000)
def family_of(name: str, description: str = "", rules: Rules | None = None) -> Family:
    """By the rules alone."""
    return (default_rules() if rules is None else rules).family_of(name, description)


_WORDS = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+|\d+")
_LETTERS = re.compile(r"[a-z]+")


def declared_family(tool: BaseTool) -> Family | None:
    """What the tool itself says: its configuration, its decorator or its class; None where none of them does."""
    if "family" in tool.config:
        return Family.parse(tool.config["family"])
    said = tool.family != BaseTool.family or any("family" in vars(kind) for kind in _tool_classes(type(tool)))
    return Family.parse(tool.family) if said else None


def _tool_classes(kind: type) -> list[type]:
    return [each for each in kind.__mro__ if issubclass(each, BaseTool) and each is not BaseTool]


def families_of_task(
    task: Task,
    tools: Mapping[str, BaseTool] | None = None,
    overrides: Mapping[str, Family | str] | None = None,
    labels: Mapping[str, Family | str] | None = None,
    *,
    rules: Rules | None = None,
) -> dict[str, Family]:
    """The family of every tool that a task offers, in its order: real tools, then those its prompt only describes.

    The first that knows decides: `overrides` (the configuration), the tool's own word, `labels`, the rules.
    """
    found: dict[str, Family] = {}
    for name, tool in offered_tools(task, tools or {}).items():
        own = declared_family(tool)
        said = _lookup_family(name, overrides) or own or _lookup_family(name, labels)
        found[name] = said or family_of(name, tool.tool_schema.function.description, rules)
    for name, description in described_tools(task).items():
        if name not in found:
            said = _lookup_family(name, overrides) or _lookup_family(name, labels)
            found[name] = said or family_of(name, description, rules)
    return found


def offered_tools(task: Task, tools: Mapping[str, BaseTool]) -> dict[str, BaseTool]:
    names = list(tools) if task.tools is None else task.tools
    return {name: tools[name] for name in names if name in tools}


def described_tools(task: Task) -> dict[str, str]:
    """name -> description of the tools in RLLA's text blocks; the first where a name is there twice."""
    found: dict[str, str] = {}
    for message in task.prompt:
        if message.role in ("system", "developer"):
            for name, description, _ in TOOL_ENTRY.findall(message.content or ""):
                found.setdefault(name.strip(), description.strip())
    return found


def _lookup_family(name: str, given: Mapping[str, Family | str] | None) -> Family | None:
    return Family.parse(given[name]) if given and name in given else None


def family_of_call(name: str, families: Mapping[str, Family]) -> Family:
    """The family of a tool that was called. A name nobody offered is judged by itself; RLLA's own gold calls cut
    names at a bracket, so a name up to its bracket will do."""
    if name in families:
        return families[name]
    short = name.strip()
    cut = (f for tool, f in families.items() if tool.startswith(short) and tool[len(short) :].lstrip()[:1] == "(")
    return next(cut, None) or family_of(name) if short else Family.OTHER


def heuristic_target(task: Task, families: Mapping[str, Family] | None = None) -> Target | None:
    """The route that a task's gold calls would take, by their families; None where neither its ground truth nor its
    plan tells of calls.

    No call: ANSWER. Calls of one family, with or without OTHER ones: that family. Of both, or of OTHER alone (which
    both routes keep): MIXED.
    """
    names = gold_call_names(task.ground_truth)
    names = planned_call_names(task.extra_info.get("plan")) if names is None else names
    if names is None:
        return None
    known = families if families is not None else families_of_task(task)
    called = {family_of_call(name, known) for name in names} - {Family.OTHER}
    if not names:
        return RouteAction.ANSWER
    if len(called) != 1:
        return MIXED
    return RouteAction.SEARCH_FAMILY if called == {Family.SEARCH} else RouteAction.CALCULATE_FAMILY


def gold_call_names(ground_truth: Any) -> list[str] | None:
    """Names of the tools that a ground truth calls; [] where it answers, None where it does not say either."""
    if isinstance(ground_truth, str) and gold_kind(ground_truth) != "neither":
        return [call["name"] for call in gold_calls(ground_truth)]
    try:
        return [call.name for call in expected_calls(ground_truth)]
    except DataError:
        return None


def planned_call_names(plan: Any) -> list[str] | None:
    """Names of the tools in `extra_info.plan`: the calls that would settle a task whose ground truth is an answer, as
    [tool, argument] each; None where there is no such plan."""
    if not isinstance(plan, list) or not plan:
        return None
    named = all(isinstance(call, list) and call and isinstance(call[0], str) for call in plan)
    return [call[0] for call in plan] if named else None
