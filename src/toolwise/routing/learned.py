"""The router that learns: draws a route for each prompt, lets rollouts begin as the route wants, and is taught by what
they earned and cost. What weighs prompts stands behind `RouterModel`; here are plain numbers only.

    decide   original prompt ─► weigh ─► routes ─► conditioned prompts, one group of rollouts for each (prompt, route)
    learn    scored rollouts ─► usage, cost ─► r_task − λ·cost ─► credit over the prompt's routes ─► the head; then λ
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from toolwise.errors import ContextFullError
from toolwise.protocols import Metrics
from toolwise.routing.actions import MIXED, ROUTES, RouteAction, Target, parse_target
from toolwise.routing.baselines import KindScale, RunningBaseline
from toolwise.routing.budget import Budgets
from toolwise.routing.conditioning import Conditioning, Teaching
from toolwise.routing.cost import CallsCost, Cost
from toolwise.routing.credit import mixed_share
from toolwise.routing.lessons import Lesson, RouterModel, Taken, Weighed
from toolwise.routing.outcomes import Came, credit_routes, policy_weights
from toolwise.routing.overspend import overspend
from toolwise.routing.prompts import allowed_tools
from toolwise.routing.usage import counts_text, usage_of
from toolwise.tools.base import BaseTool
from toolwise.types import Rollout, RouteDecision, ScoredRollout, Task

_UNREAD = Weighed((-math.log(len(ROUTES)),) * len(ROUTES))
"""For a prompt that the head has not seen."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A prompt that rollouts are out for."""

    task: Task
    weighed: Weighed
    target: Target | None


class LearnedRouter:
    """`prompt_of` gives the tokens of a task's original prompt; `tasks` are those that a warm start goes over."""

    def __init__(
        self,
        model: RouterModel,
        *,
        prompt_of: Callable[[Task], Sequence[int]],
        tools: Mapping[str, BaseTool],
        budgets: Budgets,
        cost: Cost | None = None,
        conditioning: Conditioning | None = None,
        teaching: Teaching | None = None,
        seed: int = 0,
        tasks: Sequence[Task] = (),
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.prompt_of = prompt_of
        self.tools = tools
        self.budgets = budgets
        self.cost = cost or CallsCost()
        self.conditioning = conditioning or Conditioning()
        self.teaching = teaching or Teaching()
        self.seed = seed
        self.tasks = tasks
        self.facts = dict(facts or {})
        budgets.check_units(self.cost.units)
        self.baseline = RunningBaseline(self.teaching.baseline_decay)
        self.scale = KindScale()
        self._warmed = False
        self._asked: dict[str, _Asked] = {}
        self._group: dict[str, tuple[str, int]] = {}
        """group id -> prompt id, route"""

    @property
    def multipliers(self) -> list[float]:
        return list(self.budgets.prices.values())

    def decide(
        self, tasks: Sequence[Task], n: int, step: int, *, label: str = "step", explore: bool = True
    ) -> list[RouteDecision]:
        """One decision for each (prompt, route). With `explore=False` each prompt gets one route, and is forgotten.

        A prompt that does not fit the context gets routes at random, and nothing is learned from them: its rollouts end
        as `prompt_too_long`."""
        if explore:
            self.warm_start()
        weighed = self._weigh([self.prompt_of(task) for task in tasks], settled=not explore)
        decisions: list[RouteDecision] = []
        for place, (task, read) in enumerate(zip(tasks, weighed, strict=True)):
            found = read if read is not None else _UNREAD
            prompt_id = f"{label}-{step}/{place}/{task.task_id}"
            rng = Random(f"route/{self.seed}/{prompt_id}")
            counts = self._counts(found, n, rng) if explore else {self._choose(found, rng): n}
            made = [
                self._decision(task, route, count, prompt_id, found.logprobs[route], rng.getrandbits(48))
                for route, count in sorted(counts.items())
            ]
            if explore and read is not None:
                self._asked[prompt_id] = _Asked(task, found, target_of(task))
                self._group |= {d.group_id: (prompt_id, RouteAction.parse(d.route or "").index) for d in made}
            decisions += made
        return decisions

    def _weigh(self, prompts: Sequence[Sequence[int]], *, settled: bool = False) -> list[Weighed | None]:
        """None for prompts that do not fit the context; one of them does not keep the others from being read."""
        try:
            return list(self.model.weigh(prompts, self.multipliers, settled=settled))
        except ContextFullError:
            if len(prompts) == 1:
                return [None]
            half = len(prompts) // 2
            return [*self._weigh(prompts[:half], settled=settled), *self._weigh(prompts[half:], settled=settled)]

    def _counts(self, weighed: Weighed, n: int, rng: Random) -> Counter[int]:
        """route -> rollouts"""
        if self.teaching.routes == "one":
            return Counter({weighed.draw(rng): n})
        if self.teaching.routes == "independent":
            return Counter(weighed.draw(rng) for _ in range(n))
        # What does not go round falls to routes in random order: none is always the one that is looked at least.
        order = rng.sample(range(len(ROUTES)), len(ROUTES))
        return Counter(order[i % len(order)] for i in range(n))

    def _choose(self, weighed: Weighed, rng: Random) -> int:
        return weighed.draw(rng) if self.teaching.evaluate == "sample" else weighed.best()

    def _decision(self, task: Task, number: int, n: int, prompt_id: str, logprob: float, seed: int) -> RouteDecision:
        route = ROUTES[number]
        routed = self.conditioning(task, route, self.tools)
        return RouteDecision(
            # A prompt that came tokenised is the original's; what is rolled out is the route's.
            task=task.model_copy(update={"prompt_ids": None}) if task.prompt_ids is not None else task,
            group_id=f"{prompt_id}/{route}",
            n=n,
            seed=seed,
            prompt=routed.messages,
            tools=routed.tools,
            route=route.value,
            log_prob=logprob,
            prompt_id=prompt_id,
            forbidden=routed.forbidden,
        )

    def learn(self, scored: Sequence[ScoredRollout]) -> Metrics:
        """From all that came back, groups of one included, which teach the actor nothing."""
        asked, group = self._asked, self._group
        self._asked, self._group = {}, {}
        usable = [s for s in scored if s.rollout.group_id in group and s.result.counts and s.rollout.trainable]
        came = [self._came(s, *group[s.rollout.group_id]) for s in usable]
        lessons, figures = self._lessons(asked, came)
        figures |= self._report(asked, came, lost=len(scored) - len(came))
        metrics = self.model.learn(lessons, self.multipliers)
        self.budgets.step()  # after the lessons, which are priced as the routes were drawn
        return metrics | figures | self.budgets.metrics("router")

    def _came(self, scored: ScoredRollout, prompt_id: str, route: int) -> Came:
        return Came(prompt_id, route, scored.score, self._costs(scored.rollout, ROUTES[route]))

    def _costs(self, rollout: Rollout, route: RouteAction) -> Mapping[str, float]:
        """unit -> what a rollout under `route` cost"""
        families = self.conditioning.families_of(rollout.task, self.tools)
        allowed = allowed_tools(route, families, hard=self.conditioning.hard)
        return self.cost(usage_of(rollout, families, allowed=allowed, source=self.teaching.usage))

    def overspend(self, scored: Sequence[ScoredRollout]) -> float | None:
        """By how much rollouts whose routes this router chose exceed its budgets; None where it has none."""
        answered = [s.rollout for s in scored if not s.rollout.unanswered]
        routed = [(rollout, RouteAction.parse(rollout.route)) for rollout in answered if rollout.route is not None]
        limits = {unit: multiplier.budget.limit for unit, multiplier in self.budgets.multipliers.items()}
        if not routed or not limits:
            return None
        costs = [self._costs(rollout, route) for rollout, route in routed]
        return overspend({unit: [cost[unit] for cost in costs] for unit in limits}, limits)

    def _lessons(self, asked: Mapping[str, _Asked], came: Sequence[Came]) -> tuple[list[Lesson], Metrics]:
        """Each prompt of which anything came back, with its credit; and what the policy earned and spent."""
        teaching, prices = self.teaching, self.budgets.prices
        probs = {c.prompt_id: asked[c.prompt_id].weighed.probs for c in came}
        scaled = self._scaled(asked, came)
        outcome = credit_routes(scaled, probs, prices, teaching, self.baseline, self.cost.units)
        self.budgets.observe(outcome.spent)
        members: dict[str, list[Taken]] = {prompt_id: [] for prompt_id in probs}
        for c, advantage in zip(scaled, outcome.drawn, strict=True):
            paid = tuple(c.costs[unit] for unit in prices)
            members[c.prompt_id].append(Taken(c.route, c.reward, paid, advantage))
        lessons = [
            Lesson(asked[p].weighed, tuple(members[p]), outcome.by_route.get(p), _label(asked[p].target)) for p in probs
        ]
        weights = policy_weights(came, probs, teaching.routes)
        figures = {"router/r_task": _mean([c.reward for c in came], weights)}
        return lessons, figures | {f"router/{unit}/mean": _mean(each) for unit, each in outcome.spent.items()}

    def _scaled(self, asked: Mapping[str, _Asked], came: Sequence[Came]) -> Sequence[Came]:
        if not self.teaching.standardize_by_kind:
            return came
        rewards = self.scale([c.reward for c in came], [kind_of(asked[c.prompt_id].task) for c in came]).tolist()
        return [replace(c, reward=reward) for c, reward in zip(came, rewards, strict=True)]

    def _report(self, asked: Mapping[str, _Asked], came: Sequence[Came], *, lost: int) -> Metrics:
        probs = [a.weighed.probs for a in asked.values()]
        targets = [a.target for a in asked.values()]
        figures = {f"router/share/{route}": _mean([p[i] for p in probs]) for i, route in enumerate(ROUTES)}
        figures |= {"router/prompts": float(len(asked)), "router/rollouts_lost": float(lost)}
        for i, route in enumerate(ROUTES):
            figures[f"router/rollouts/{route}"] = float(sum(c.route == i for c in came))
        if any(target is not None for target in targets):
            agreed = [p[t.index] for p, t in zip(probs, targets, strict=True) if isinstance(t, RouteAction)]
            figures |= {"router/mixed_share": mixed_share(targets), "router/label_agreement": _mean(agreed)}
        return figures

    def account(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Where nothing executes, what was written is what was spent, in the first budget's unit; figures of rollouts
        that go by the tools' own accounts would all be 0."""
        unit = next(iter(self.budgets.prices), self.cost.units[0])
        return [self._written(r, unit) if counts_text(r, self.teaching.usage) else r for r in rollouts]

    def _written(self, rollout: Rollout, unit: str) -> Rollout:
        usage = usage_of(rollout, self.conditioning.families_of(rollout.task, self.tools), source="text")
        told = replace(rollout.usage, calls=dict(usage.calls_by_tool), cost=self.cost(usage)[unit])
        return replace(rollout, usage=told)

    def warm_start(self) -> None:
        """Once, before the first route is tried: the head learns the labels by heart, in batches of its own."""
        if self._warmed or not self.teaching.warm_start_epochs:
            return
        self._warmed = True
        size = self.teaching.warm_start_batch
        labelled = [(task, label) for task in self.tasks if (label := _label(target_of(task))) is not None]
        known: list[tuple[Weighed, int]] = []
        for start in range(0, len(labelled), size):  # each prompt through the trunk once, however many epochs
            part = labelled[start : start + size]
            weighed = self._weigh([self.prompt_of(task) for task, _ in part])
            known += [(read, label) for read, (_, label) in zip(weighed, part, strict=True) if read is not None]
        for epoch in range(self.teaching.warm_start_epochs):
            Random(f"warm start/{self.seed}/{epoch}").shuffle(known)
            for start in range(0, len(known), size):
                some = known[start : start + size]
                self.model.imitate([weighed for weighed, _ in some], [label for _, label in some])

    def save(self, folder: Any) -> None:
        """The head beside a model's weights, with all that routing the same way elsewhere takes."""
        self.model.save(folder, {**self.facts, "multipliers": self.budgets.prices})

    def load(self, folder: Any) -> None:
        """What `save` wrote: routes are chosen as they were there."""
        self.budgets.begin_at(self.model.load(folder).get("multipliers") or {})
        self._warmed = True

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "budgets": self.budgets.state_dict(),
            "baseline": self.baseline.state_dict(),
            "scale": self.scale.state_dict(),
            "warmed": self._warmed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.budgets.load_state_dict(state["budgets"])
        self.baseline.load_state_dict(state["baseline"])
        self.scale.load_state_dict(state["scale"])
        self._warmed = state["warmed"]
        self._asked, self._group = {}, {}


def target_of(task: Task) -> Target | None:
    """The label of a row, where it has one: it came with the row's columns, or was joined from a file of labels."""
    written = task.extra_info.get("router_target_action")
    return None if written is None else parse_target(written)


def kind_of(task: Task) -> str:
    return str(task.extra_info.get("kind") or task.data_source)


def _label(target: Target | None) -> int | None:
    return None if target is None or target == MIXED else RouteAction.parse(target).index


def _mean(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    if weights is not None:
        return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights) if weights else 0.0
    return sum(values) / len(values) if values else 0.0
