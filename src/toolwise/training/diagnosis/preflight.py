"""Checks before the first step: rows without a ground truth, and routers without a choice."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from difflib import SequenceMatcher

from toolwise.advantages import COMPARE_COSTS
from toolwise.config.imports import did_you_mean
from toolwise.config.router import SECONDS_METER
from toolwise.config.schema import RunConfig
from toolwise.data.profiles import profile_of
from toolwise.data.task_set import count_distinct, distinct_tasks, map_distinct
from toolwise.errors import ConfigError
from toolwise.rewards.combine import CompositeReward
from toolwise.rewards.executor import EPISODE_REWARDS
from toolwise.routing.conditioning import Conditioning
from toolwise.routing.cost import UNREADABLE, PricesCost, build_cost
from toolwise.routing.families import Family, tool_descriptions
from toolwise.routing.meters import METERS
from toolwise.routing.routes import RouteSet, check_prices, check_route_tools, least_cost
from toolwise.tools.base import BaseTool
from toolwise.training.diagnosis.ignored_settings import ignored_settings
from toolwise.training.diagnosis.symptoms import prompt_too_long
from toolwise.types import ScoredRollout, Task
from toolwise.types.findings import Finding

ANSWER_WORDS = frozenset(
    {"answer", "answers", "expected", "gold", "golden", "gt", "label", "labels", "reference"}
    | {"solution", "solutions", "target", "targets", "truth"}
)
"""Words in the names of columns that probably hold the ground truth."""
MAX_NAMED_KINDS = 3
"""Kinds of rows that a finding names."""
MAX_NAMED_TOOLS = 8
"""Tools that an error message names."""


def startup_findings(
    config: RunConfig,
    rewards: CompositeReward,
    tools: Mapping[str, BaseTool],
    *,
    train: Sequence[Task] = (),
    held_out: Sequence[Task] = (),
) -> list[Finding]:
    """Findings about an assembled run before its first step."""
    findings = [
        _no_ground_truth(rewards, {"training": train, "held-out": held_out}),
        _one_family(config, tools, train) if config.router.enable and not config.router.own_routes else None,
        ignored_settings(config, has_held_out=bool(held_out)),
    ]
    return [finding for finding in findings if finding is not None]


def evaluation_findings(
    rewards: CompositeReward, tasks: Sequence[Task], scored: Sequence[ScoredRollout]
) -> list[Finding]:
    """Findings about an evaluation without training."""
    findings = (_no_ground_truth(rewards, {"evaluated": tasks}), prompt_too_long(scored, "this evaluation", 0))
    return [finding for finding in findings if finding is not None]


def check_family_names(config: RunConfig, tools: Mapping[str, BaseTool], tasks: Sequence[Task]) -> None:
    """Raise if `router.families` names a tool that is neither one of the run nor described by a prompt. Not for an
    evaluation, where tools may be left out on purpose."""
    unknown = [name for name in config.router.families if name not in tools] if config.router.enable else []
    if not unknown:
        return
    known = {*tools, *(tool for task in distinct_tasks(tasks) for tool in tool_descriptions(task, tools))}
    for name in unknown:
        if name not in known:
            some = ", ".join([*sorted(known)[:MAX_NAMED_TOOLS], *(["…"] if len(known) > MAX_NAMED_TOOLS else [])])
            raise ConfigError(
                f"router.families names the tool {name!r}, which neither the run nor a prompt has (tools: "
                f"{some or 'none'}){did_you_mean(name, known) or ': correct the name, or leave it out'}"
            )


def check_routable(
    config: RunConfig, tools: Mapping[str, BaseTool], tasks: Sequence[Task], *, learns: bool = True
) -> None:
    """Reject a router if no task has a tool, neither one of the run nor one that its prompt describes; and routes of a
    user that name tools or families that no task has, or that cost more than a budget allows whatever is learned.
    Without a router, prices are checked if the estimator compares costs. Rows that are only evaluated may lack all
    that; some route has to apply to each of them."""
    if not tasks:
        return
    if learns and (config.router.enable or config.algorithm.adv_estimator in COMPARE_COSTS):
        _check_price_list(config, tools, tasks)
    if not config.router.enable:
        return
    if not learns:
        map_distinct(tasks, Conditioning(config.router, tools if config.multi_turn.enable else {}).applicable)
        return
    if config.router.routes:
        _check_own_routes(config, tools, tasks)
        return
    if any(_families(config, tools, task) for task in distinct_tasks(tasks)):
        return
    if tools and not config.multi_turn.enable:
        raise ConfigError(
            "router.enable is true but multi_turn.enable is false: no tool is offered, so all routes are the same; set "
            "multi_turn.enable = true, or router.enable = false"
        )
    why = "no task offers any of them" if tools else "there are no tools"
    raise ConfigError(
        f"router.enable is true, but {why}: a router chooses between tools; add some to `tools`, or set "
        "router.enable = false"
    )


def _check_price_list(config: RunConfig, tools: Mapping[str, BaseTool], tasks: Sequence[Task]) -> None:
    """Raise if a price list names something that no task has, or leaves out one of its tools."""
    router = config.router
    if not router.price_list or not isinstance(cost := build_cost(router, tools), PricesCost):
        return
    conditioning = Conditioning(router, tools if config.multi_turn.enable else {})
    known = {tool: family for task in distinct_tasks(tasks) for tool, family in conditioning.families_of(task).items()}
    families = {name for family in (*known.values(), *Family) for name in (str(family), family.lower())}
    valid = {*known, *tools, *families, *METERS, UNREADABLE, "*"}
    where = f"router.{router.price_list_name}"
    for unit, table in cost.prices.items():
        for name in table:
            if name in METERS and name in known:
                raise ConfigError(
                    f"{where}.{unit}.{name} is the price of what a rollout uses, but a tool has that name: rename the "
                    "tool"
                )
            if name not in valid:
                hint = did_you_mean(name, {*known, *tools}) or did_you_mean(name, valid)
                raise ConfigError(
                    f"{where}.{unit} has a price for {name!r}, which is neither a tool of the tasks "
                    f"({', '.join(known)}), a family, nor one of {', '.join(METERS)}{hint}"
                )
    priced = {key for table in cost.prices.values() for key in table}
    for tool, family in known.items():
        if priced.isdisjoint({tool, str(family), family.lower(), "*", SECONDS_METER}):
            raise ConfigError(f"the tool {tool!r} has no price: add it to a table of {where} (0 if it is free)")


def _check_own_routes(config: RunConfig, tools: Mapping[str, BaseTool], tasks: Sequence[Task]) -> None:
    conditioning = Conditioning(config.router, tools if config.multi_turn.enable else {})
    routes = conditioning.routes
    if config.multi_turn.enable and (missing := _unknown_tool(routes, tools, tasks, conditioning)) is not None:
        raise ConfigError(missing)
    families = map_distinct(tasks, conditioning.families_of)
    check_route_tools(routes, families)
    map_distinct(tasks, conditioning.applicable)
    cost = build_cost(config.router, tools)
    first = next((budget.unit for budget in config.router.budgets), cost.units[0])
    check_prices(routes, cost.units, max_cost=config.router.max_cost, unit=first)
    for unit, limit in config.router.lowest_limits.items():
        if unit in cost.units and (least := least_cost(routes, families, unit)) > limit + 1e-9:
            raise ConfigError(
                f"the budget of {limit:g} in {unit!r} cannot be met: the cheapest routes cost "
                f"{least:.3g} on average even without a call; raise the limit, or add a cheaper route"
            )


def _unknown_tool(
    routes: RouteSet, tools: Mapping[str, BaseTool], tasks: Sequence[Task], conditioning: Conditioning
) -> str | None:
    """A route's tool that is neither one of the run nor described by a prompt."""
    named = {tool: route.name for route in routes for tool in route.tools if tool not in tools}
    described = {tool for task in distinct_tasks(tasks) for tool in conditioning.families_of(task)} if named else set()
    for tool, route in named.items():
        if tool not in described:
            return (
                f"route {route!r} names the tool {tool!r}, but the run's tools are: {', '.join(tools) or 'none'}; add "
                "it to `tools`, or correct the name"
            )
    return None


def _families(config: RunConfig, tools: Mapping[str, BaseTool], task: Task) -> dict[str, str]:
    offered = tools if config.multi_turn.enable else {}
    return Conditioning(config.router, offered).families_of(task)


def _one_family(config: RunConfig, tools: Mapping[str, BaseTool], tasks: Sequence[Task]) -> Finding | None:
    names: dict[str, str] = {}
    for task in distinct_tasks(tasks):
        names |= _families(config, tools, task)
        if len(set(names.values())) > 1:
            return None
    if not names:
        return None
    (family,) = set(names.values())
    other = Family.CALCULATE if family == Family.SEARCH else Family.SEARCH
    same = (
        "the routes to search and to calculate offer the same tools"
        if family == Family.OTHER
        else f"the route to {other.value.lower()} offers no tool, so it is the same as answering"
    )
    fix = (
        "Add a tool of another family, or train without a router"
        if len(names) == 1
        else f'Set the families: router.families = {{ {next(iter(names))} = "{other.value}" }}, or '
        f'@toolwise.tool(family="{other.value}")'
    )
    shown = ", ".join([*list(names)[:5], *(["…"] if len(names) > 5 else [])])
    says = f"All tools ({shown}) are of the family {family}: {same}"
    return Finding("one_family", "warning", says, cure=fix)


def _no_ground_truth(rewards: CompositeReward, tasks: Mapping[str, Sequence[Task]]) -> Finding | None:
    """Rows without a ground truth. If no row has one, reported only if a column looks like it: a reward may not need
    one."""
    # a parameter whose name starts with an underscore is unused by convention
    readers = [
        part.reward
        for part in rewards.parts
        if part.reward.reference not in EPISODE_REWARDS and not part.reward.signature.first[1].startswith("_")
    ]
    lacking = {which: _without_truth(rows) for which, rows in tasks.items()} if readers else {}
    lacking = {which: groups for which, groups in lacking.items() if groups}
    if not lacking:
        return None
    distinct = [task for groups in lacking.values() for task, _ in groups]
    columns = sorted({name for task in distinct for name, value in task.reward_kwargs.items() if value is not None})
    inner = sorted({name for task in distinct for name, value in task.extra_info.items() if value is not None})
    parameters = {name for part in rewards.parts for name in part.reward.signature.names}
    likely = [name for name in columns if _looks_like_answer(name)]
    if parameters & set(likely):
        return None
    takes_any = any(part.reward.signature.takes_any for part in rewards.parts)
    if not likely and not takes_any and len(columns) == 1 and not parameters & set(columns):
        likely = columns
    likely += [f"extra_info.{name}" for name in inner if _looks_like_answer(name)]
    known = {t.data_source for rows in tasks.values() for t in distinct_tasks(rows) if t.ground_truth is not None}
    by_source = "data_source" in parameters and known.isdisjoint({task.data_source for task in distinct})
    if not likely and (not known or by_source):
        return None
    where = " and on ".join(_describe_missing(groups, len(tasks[which]), which) for which, groups in lacking.items())
    available = ", ".join(["prompt", *columns, *(f"extra_info.{name}" for name in inner)])
    return Finding(
        "no_ground_truth",
        "warning",
        f"ground_truth is None on {where}, but {readers[0].name} takes it; the columns are: {available}",
        cure=_cure_of_missing(likely, mixed=bool(known)),
    )


def _without_truth(tasks: Sequence[Task]) -> list[tuple[Task, int]]:
    """One task of each kind without a ground truth, with their number. Kinds are profiles, and files as far as ids
    have the file's name."""
    groups: dict[Hashable, tuple[Task, int]] = {}
    for task, count in count_distinct(tasks):
        if task.ground_truth is None:
            kind = (profile_of(task), task.task_id.rpartition("/")[0])
            first, others = groups.get(kind, (task, 0))
            groups[kind] = (first, others + count)
    return list(groups.values())


def _describe_missing(groups: Sequence[tuple[Task, int]], total: int, which: str) -> str:
    """`all 8 training rows`, or `4 of 8 training rows (4 like a/row-0)`."""
    missing = sum(count for _, count in groups)
    if missing == total:
        return f"all {total} {which} rows"
    examples = [f"{count} like {task.task_id}" for task, count in groups[:MAX_NAMED_KINDS]]
    examples += ["…"] if len(groups) > MAX_NAMED_KINDS else []
    return f"{missing} of {total} {which} rows ({', '.join(examples)})"


def _cure_of_missing(likely: Sequence[str], *, mixed: bool) -> str:
    if not likely:
        return "Give these rows a ground_truth, or leave them out; if the reward needs none, name it _ground_truth"
    column = likely[0].removeprefix("extra_info.")
    if likely[0] != column:
        return f"Move {likely[0]} to a column ground_truth"
    by_name = f", or let the reward take it by name: def score(messages, ground_truth, {column})"
    return f'Set data.columns = {{ ground_truth = "{column}" }}{"" if mixed else by_name}'


def _looks_like_answer(column: str) -> bool:
    named = not ANSWER_WORDS.isdisjoint(re.findall(r"[a-z]+", column.lower()))
    return named or SequenceMatcher(None, column.lower(), "ground_truth").ratio() > 0.8
