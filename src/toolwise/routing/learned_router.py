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
from toolwise.routing.budget import Budgets
from toolwise.routing.cost import CallsCost, Cost
from toolwise.routing.options import Conditioning, RouterTraining
from toolwise.routing.outcomes import RouteOutcome, credit_routes, policy_weights
from toolwise.routing.overspend import overspend
from toolwise.routing.prompts import allowed_tools
from toolwise.routing.reward_baselines import KindStandardizer, RunningBaseline
from toolwise.routing.route_advantages import mixed_share
from toolwise.routing.samples import RoutePrediction, RouterExample, RouterModel, RouteSample
from toolwise.routing.usage import counts_written_calls, usage_of
from toolwise.tools.base import BaseTool
from toolwise.types import Rollout, RouteDecision, ScoredRollout, Task

_UNIFORM = RoutePrediction((-math.log(len(ROUTES)),) * len(ROUTES))
"""For a prompt that the head has not seen."""


@dataclass(frozen=True, slots=True)
class _PendingPrompt:
    """A prompt that rollouts are out for."""

    task: Task
    prediction: RoutePrediction
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
        training: RouterTraining | None = None,
        seed: int = 0,
        tasks: Sequence[Task] = (),
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.prompt_of = prompt_of
        self.tools = tools
        self.budgets = budgets
        self.cost = cost or CallsCost()
        self.conditioning = conditioning or Conditioning()
        self.training = training or RouterTraining()
        self.seed = seed
        self.tasks = tasks
        self.metadata = dict(metadata or {})
        budgets.check_units(self.cost.units)
        self.baseline = RunningBaseline(self.training.baseline_decay)
        self.scale = KindStandardizer()
        self._warm_started = False
        self._pending: dict[str, _PendingPrompt] = {}
        self._route_of_group: dict[str, tuple[str, int]] = {}
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
        weighed = self._predict([self.prompt_of(task) for task in tasks], averaged=not explore)
        decisions: list[RouteDecision] = []
        for place, (task, read) in enumerate(zip(tasks, weighed, strict=True)):
            found = read if read is not None else _UNIFORM
            prompt_id = f"{label}-{step}/{place}/{task.task_id}"
            rng = Random(f"route/{self.seed}/{prompt_id}")
            counts = self._route_counts(found, n, rng) if explore else {self._choose(found, rng): n}
            made = [
                self._decision(task, route, count, prompt_id, found.logprobs[route], rng.getrandbits(48))
                for route, count in sorted(counts.items())
            ]
            if explore and read is not None:
                self._pending[prompt_id] = _PendingPrompt(task, found, target_of(task))
                self._route_of_group |= {d.group_id: (prompt_id, RouteAction.parse(d.route or "").index) for d in made}
            decisions += made
        return decisions

    def _predict(self, prompts: Sequence[Sequence[int]], *, averaged: bool = False) -> list[RoutePrediction | None]:
        """None for prompts that do not fit the context; one of them does not keep the others from being read."""
        try:
            return list(self.model.predict(prompts, self.multipliers, averaged=averaged))
        except ContextFullError:
            if len(prompts) == 1:
                return [None]
            half = len(prompts) // 2
            return [
                *self._predict(prompts[:half], averaged=averaged),
                *self._predict(prompts[half:], averaged=averaged),
            ]

    def _route_counts(self, prediction: RoutePrediction, n: int, rng: Random) -> Counter[int]:
        """route -> rollouts"""
        if self.training.routes == "one":
            return Counter({prediction.sample(rng): n})
        if self.training.routes == "independent":
            return Counter(prediction.sample(rng) for _ in range(n))
        # What does not go round falls to routes in random order: none is always the one that is looked at least.
        order = rng.sample(range(len(ROUTES)), len(ROUTES))
        return Counter(order[i % len(order)] for i in range(n))

    def _choose(self, prediction: RoutePrediction, rng: Random) -> int:
        return prediction.sample(rng) if self.training.evaluate == "sample" else prediction.argmax()

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
        asked, group = self._pending, self._route_of_group
        self._pending, self._route_of_group = {}, {}
        usable = [s for s in scored if s.rollout.group_id in group and s.result.has_valid_score and s.rollout.trainable]
        outcomes = [self._outcome(s, *group[s.rollout.group_id]) for s in usable]
        examples, figures = self._examples(asked, outcomes)
        figures |= self._report(asked, outcomes, lost=len(scored) - len(outcomes))
        metrics = self.model.learn(examples, self.multipliers)
        self.budgets.step()  # after the lessons, which are priced as the routes were drawn
        return metrics | figures | self.budgets.metrics("router")

    def _outcome(self, scored: ScoredRollout, prompt_id: str, route: int) -> RouteOutcome:
        return RouteOutcome(prompt_id, route, scored.score, self._costs(scored.rollout, ROUTES[route]))

    def _costs(self, rollout: Rollout, route: RouteAction) -> Mapping[str, float]:
        """unit -> what a rollout under `route` cost"""
        families = self.conditioning.families_of(rollout.task, self.tools)
        allowed = allowed_tools(route, families, hard=self.conditioning.hard)
        return self.cost(usage_of(rollout, families, allowed=allowed, source=self.training.usage))

    def overspend(self, scored: Sequence[ScoredRollout]) -> float | None:
        """By how much rollouts whose routes this router chose exceed its budgets; None where it has none."""
        answered = [s.rollout for s in scored if not s.rollout.unanswered]
        routed = [(rollout, RouteAction.parse(rollout.route)) for rollout in answered if rollout.route is not None]
        limits = {unit: multiplier.budget.limit for unit, multiplier in self.budgets.multipliers.items()}
        if not routed or not limits:
            return None
        costs = [self._costs(rollout, route) for rollout, route in routed]
        return overspend({unit: [cost[unit] for cost in costs] for unit in limits}, limits)

    def _examples(
        self, asked: Mapping[str, _PendingPrompt], outcomes: Sequence[RouteOutcome]
    ) -> tuple[list[RouterExample], Metrics]:
        """Each prompt of which anything came back, with its credit; and what the policy earned and spent."""
        training, prices = self.training, self.budgets.prices
        probs = {c.prompt_id: asked[c.prompt_id].prediction.probs for c in outcomes}
        scaled = self._standardized(asked, outcomes)
        outcome = credit_routes(scaled, probs, prices, training, self.baseline, self.cost.units)
        self.budgets.observe(outcome.spent)
        members: dict[str, list[RouteSample]] = {prompt_id: [] for prompt_id in probs}
        for c, advantage in zip(scaled, outcome.rollout_advantages, strict=True):
            paid = tuple(c.costs[unit] for unit in prices)
            members[c.prompt_id].append(RouteSample(c.route, c.reward, paid, advantage))
        examples = [
            RouterExample(
                asked[p].prediction, tuple(members[p]), outcome.route_advantages.get(p), _label(asked[p].target)
            )
            for p in probs
        ]
        weights = policy_weights(outcomes, probs, training.routes)
        figures = {"router/r_task": _mean([c.reward for c in outcomes], weights)}
        return examples, figures | {f"router/{unit}/mean": _mean(each) for unit, each in outcome.spent.items()}

    def _standardized(
        self, asked: Mapping[str, _PendingPrompt], outcomes: Sequence[RouteOutcome]
    ) -> Sequence[RouteOutcome]:
        if not self.training.standardize_by_kind:
            return outcomes
        rewards = self.scale(
            [c.reward for c in outcomes], [kind_of(asked[c.prompt_id].task) for c in outcomes]
        ).tolist()
        return [replace(c, reward=reward) for c, reward in zip(outcomes, rewards, strict=True)]

    def _report(self, asked: Mapping[str, _PendingPrompt], outcomes: Sequence[RouteOutcome], *, lost: int) -> Metrics:
        probs = [a.prediction.probs for a in asked.values()]
        targets = [a.target for a in asked.values()]
        figures = {f"router/share/{route}": _mean([p[i] for p in probs]) for i, route in enumerate(ROUTES)}
        figures |= {"router/prompts": float(len(asked)), "router/rollouts_lost": float(lost)}
        for i, route in enumerate(ROUTES):
            figures[f"router/rollouts/{route}"] = float(sum(c.route == i for c in outcomes))
        if any(target is not None for target in targets):
            agreed = [p[t.index] for p, t in zip(probs, targets, strict=True) if isinstance(t, RouteAction)]
            figures |= {"router/mixed_share": mixed_share(targets), "router/label_agreement": _mean(agreed)}
        return figures

    def with_written_usage(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Where nothing executes, what was written is what was spent, in the first budget's unit; figures of rollouts
        that go by the tools' own accounts would all be 0."""
        unit = next(iter(self.budgets.prices), self.cost.units[0])
        return [self._with_text_usage(r, unit) if counts_written_calls(r, self.training.usage) else r for r in rollouts]

    def _with_text_usage(self, rollout: Rollout, unit: str) -> Rollout:
        usage = usage_of(rollout, self.conditioning.families_of(rollout.task, self.tools), source="text")
        told = replace(rollout.usage, calls=dict(usage.calls_by_tool), cost=self.cost(usage)[unit])
        return replace(rollout, usage=told)

    def warm_start(self) -> None:
        """Once, before the first route is tried: the head learns the labels by heart, in batches of its own."""
        if self._warm_started or not self.training.warm_start_epochs:
            return
        self._warm_started = True
        size = self.training.warm_start_batch
        labelled = [(task, label) for task in self.tasks if (label := _label(target_of(task))) is not None]
        known: list[tuple[RoutePrediction, int]] = []
        for start in range(0, len(labelled), size):  # each prompt through the trunk once, however many epochs
            part = labelled[start : start + size]
            weighed = self._predict([self.prompt_of(task) for task, _ in part])
            known += [(read, label) for read, (_, label) in zip(weighed, part, strict=True) if read is not None]
        for epoch in range(self.training.warm_start_epochs):
            Random(f"warm start/{self.seed}/{epoch}").shuffle(known)
            for start in range(0, len(known), size):
                some = known[start : start + size]
                self.model.supervised_step([weighed for weighed, _ in some], [label for _, label in some])

    def save(self, folder: Any) -> None:
        """The head beside a model's weights, with all that routing the same way elsewhere takes."""
        self.model.save(folder, {**self.metadata, "multipliers": self.budgets.prices})

    def load(self, folder: Any) -> None:
        """What `save` wrote: routes are chosen as they were there."""
        self.budgets.set_prices(self.model.load(folder).get("multipliers") or {})
        self._warm_started = True

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "budgets": self.budgets.state_dict(),
            "baseline": self.baseline.state_dict(),
            "scale": self.scale.state_dict(),
            "warmed": self._warm_started,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.budgets.load_state_dict(state["budgets"])
        self.baseline.load_state_dict(state["baseline"])
        self.scale.load_state_dict(state["scale"])
        self._warm_started = state["warmed"]
        self._pending, self._route_of_group = {}, {}


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
