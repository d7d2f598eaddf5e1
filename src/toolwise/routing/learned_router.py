"""The learned router: samples a route per prompt, conditions the prompt on it, and learns from rewards and costs.

    decide   original prompt ─► predict ─► routes ─► conditioned prompts, one group of rollouts per (prompt, route)
    learn    scored rollouts ─► usage, cost ─► r_task − λ·cost ─► advantages of the prompt's routes ─► the head; then λ

The head is behind `RouterModel`; this module handles plain numbers only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from toolwise.config.router import RouterConfig
from toolwise.errors import ContextFullError
from toolwise.protocols import Metrics
from toolwise.routing.actions import MIXED, ROUTES, RouteAction, Target, parse_target
from toolwise.routing.budget import Budgets
from toolwise.routing.cost import CallsCost, Cost
from toolwise.routing.options import Conditioning
from toolwise.routing.outcomes import RouteOutcome, credit_routes, policy_weights
from toolwise.routing.overspend import overspend
from toolwise.routing.prompts import allowed_tools
from toolwise.routing.reward_baselines import KindStandardizer, RunningBaseline
from toolwise.routing.route_advantages import mixed_share
from toolwise.routing.samples import RoutePrediction, RouterExample, RouterModel, RouteSample
from toolwise.routing.usage import counts_written_calls, usage_of
from toolwise.tools.base import BaseTool
from toolwise.types import Rollout, RouteDecision, ScoredRollout, Task

WARM_START_BATCH = 64
"""Prompts per supervised step of the warm start."""
_UNIFORM = RoutePrediction((-math.log(len(ROUTES)),) * len(ROUTES))
"""For a prompt that does not fit the context."""


@dataclass(frozen=True, slots=True)
class _PendingPrompt:
    """A prompt whose rollouts are in progress."""

    task: Task
    prediction: RoutePrediction
    target: Target | None


class LearnedRouter:
    """`prompt_of` returns the tokens of a task's original prompt; `tasks` are used by the warm start."""

    def __init__(
        self,
        model: RouterModel,
        *,
        prompt_of: Callable[[Task], Sequence[int]],
        tools: Mapping[str, BaseTool],
        budgets: Budgets,
        cost: Cost | None = None,
        conditioning: Conditioning | None = None,
        training: RouterConfig | None = None,
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
        self.training = training or RouterConfig()
        self.seed = seed
        self.tasks = tasks
        self.metadata = dict(metadata or {})
        budgets.check_units(self.cost.units)
        self.baseline = RunningBaseline()
        self.scale = KindStandardizer()
        self._warm_started = False
        self._pending: dict[str, _PendingPrompt] = {}
        self._route_of_group: dict[str, tuple[str, int]] = {}
        """group id -> prompt id, route"""

    @property
    def multipliers(self) -> list[float]:
        return list(self.budgets.lambdas.values())

    def decide(
        self, tasks: Sequence[Task], n: int, step: int, *, label: str = "step", explore: bool = True
    ) -> list[RouteDecision]:
        """One decision per (prompt, route). With `explore=False` each prompt gets one route and nothing is learned.

        A prompt that does not fit the context gets random routes, which are not learned from: its rollouts end with
        `prompt_too_long`."""
        if explore:
            self.warm_start()
        predictions = self._predict([self.prompt_of(task) for task in tasks], averaged=not explore)
        decisions: list[RouteDecision] = []
        for index, (task, prediction) in enumerate(zip(tasks, predictions, strict=True)):
            used = prediction if prediction is not None else _UNIFORM
            prompt_id = f"{label}-{step}/{index}/{task.task_id}"
            rng = Random(f"route/{self.seed}/{prompt_id}")
            counts = self._route_counts(used, n, rng) if explore else {self._choose(used, rng): n}
            task_decisions = [
                self.conditioning.decision(
                    task,
                    ROUTES[route],
                    self.tools,
                    group_id=f"{prompt_id}/{ROUTES[route]}",
                    n=count,
                    seed=rng.getrandbits(48),
                    prompt_id=prompt_id,
                    log_prob=used.logprobs[route],
                )
                for route, count in sorted(counts.items())
            ]
            if explore and prediction is not None:
                self._pending[prompt_id] = _PendingPrompt(task, used, target_of(task))
                self._route_of_group |= {
                    d.group_id: (prompt_id, RouteAction.parse(d.route or "").index) for d in task_decisions
                }
            decisions += task_decisions
        return decisions

    def _predict(self, prompts: Sequence[Sequence[int]], *, averaged: bool = False) -> list[RoutePrediction | None]:
        """None for prompts that do not fit the context; the others are still predicted."""
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
        # A remainder goes to routes in random order, so that no route is always sampled less.
        order = rng.sample(range(len(ROUTES)), len(ROUTES))
        return Counter(order[i % len(order)] for i in range(n))

    def _choose(self, prediction: RoutePrediction, rng: Random) -> int:
        return prediction.sample(rng) if self.training.evaluate == "sample" else prediction.argmax()

    def learn(self, scored: Sequence[ScoredRollout]) -> Metrics:
        """Learns from all finished rollouts, including groups of one, which the actor learns nothing from."""
        pending, route_of_group = self._pending, self._route_of_group
        self._pending, self._route_of_group = {}, {}
        usable = [
            s
            for s in scored
            if s.rollout.group_id in route_of_group and s.result.has_valid_score and s.rollout.trainable
        ]
        outcomes = [
            RouteOutcome(prompt_id, route, s.score, self._costs(s.rollout, ROUTES[route]))
            for s in usable
            for prompt_id, route in [route_of_group[s.rollout.group_id]]
        ]
        examples, metrics = self._examples(pending, outcomes)
        metrics |= self._report(pending, outcomes, lost=len(scored) - len(outcomes))
        model_metrics = self.model.learn(examples, self.multipliers)
        self.budgets.step()  # last: the examples use the λ that the routes were sampled with
        return model_metrics | metrics | self.budgets.metrics("router")

    def _costs(self, rollout: Rollout, route: RouteAction) -> Mapping[str, float]:
        """unit -> cost of a rollout under `route`"""
        families = self.conditioning.families_of(rollout.task, self.tools)
        allowed = allowed_tools(route, families, hard=self.conditioning.hard)
        return self.cost(usage_of(rollout, families, allowed=allowed, source=self.training.usage))

    def overspend(self, scored: Sequence[ScoredRollout]) -> float | None:
        """How far rollouts routed by this router exceed its budgets; None without budgets or rollouts."""
        answered = [s.rollout for s in scored if not s.rollout.unanswered]
        routed = [(rollout, RouteAction.parse(rollout.route)) for rollout in answered if rollout.route is not None]
        limits = {unit: multiplier.budget.limit for unit, multiplier in self.budgets.multipliers.items()}
        if not routed or not limits:
            return None
        costs = [self._costs(rollout, route) for rollout, route in routed]
        return overspend({unit: [cost[unit] for cost in costs] for unit in limits}, limits)

    def _examples(
        self, pending: Mapping[str, _PendingPrompt], outcomes: Sequence[RouteOutcome]
    ) -> tuple[list[RouterExample], Metrics]:
        """One example per prompt with a finished rollout; and the policy's mean reward and costs."""
        training, lambdas = self.training, self.budgets.lambdas
        probs = {c.prompt_id: pending[c.prompt_id].prediction.probs for c in outcomes}
        standardized = self._standardized(pending, outcomes)
        credit = credit_routes(standardized, probs, lambdas, training, self.baseline, self.cost.units)
        self.budgets.observe(credit.spent)
        members: dict[str, list[RouteSample]] = {prompt_id: [] for prompt_id in probs}
        for c, advantage in zip(standardized, credit.rollout_advantages, strict=True):
            costs = tuple(c.costs[unit] for unit in lambdas)
            members[c.prompt_id].append(RouteSample(c.route, c.reward, costs, advantage))
        examples = [
            RouterExample(
                pending[p].prediction, tuple(members[p]), credit.route_advantages.get(p), _label(pending[p].target)
            )
            for p in probs
        ]
        weights = policy_weights(outcomes, probs, training.routes)
        metrics = {"router/r_task": _mean([c.reward for c in outcomes], weights)}
        return examples, metrics | {f"router/{unit}/mean": _mean(each) for unit, each in credit.spent.items()}

    def _standardized(
        self, pending: Mapping[str, _PendingPrompt], outcomes: Sequence[RouteOutcome]
    ) -> Sequence[RouteOutcome]:
        if not self.training.standardize_by_kind:
            return outcomes
        rewards = self.scale(
            [c.reward for c in outcomes], [kind_of(pending[c.prompt_id].task) for c in outcomes]
        ).tolist()
        return [replace(c, reward=reward) for c, reward in zip(outcomes, rewards, strict=True)]

    def _report(self, pending: Mapping[str, _PendingPrompt], outcomes: Sequence[RouteOutcome], *, lost: int) -> Metrics:
        probs = [a.prediction.probs for a in pending.values()]
        targets = [a.target for a in pending.values()]
        metrics = {f"router/share/{route}": _mean([p[i] for p in probs]) for i, route in enumerate(ROUTES)}
        metrics |= {"router/prompts": float(len(pending)), "router/rollouts_lost": float(lost)}
        for i, route in enumerate(ROUTES):
            metrics[f"router/rollouts/{route}"] = float(sum(c.route == i for c in outcomes))
        if any(target is not None for target in targets):
            agreement = [p[t.index] for p, t in zip(probs, targets, strict=True) if isinstance(t, RouteAction)]
            metrics |= {"router/mixed_share": mixed_share(targets), "router/label_agreement": _mean(agreement)}
        return metrics

    def with_written_usage(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Rollouts with the usage of their written calls, in the first budget's unit. Where no tool is executed, the
        tools' own accounting would be 0 everywhere."""
        unit = next(iter(self.budgets.lambdas), self.cost.units[0])
        return [self._with_text_usage(r, unit) if counts_written_calls(r, self.training.usage) else r for r in rollouts]

    def _with_text_usage(self, rollout: Rollout, unit: str) -> Rollout:
        usage = usage_of(rollout, self.conditioning.families_of(rollout.task, self.tools), source="text")
        written = replace(rollout.usage, calls=dict(usage.calls_by_tool), cost=self.cost(usage)[unit])
        return replace(rollout, usage=written)

    def warm_start(self) -> None:
        """Trains the head on the labels, once, before the first route is sampled."""
        if self._warm_started or not self.training.warm_start_epochs:
            return
        self._warm_started = True
        size = WARM_START_BATCH
        labelled = [(task, label) for task in self.tasks if (label := _label(target_of(task))) is not None]
        examples: list[tuple[RoutePrediction, int]] = []
        for start in range(0, len(labelled), size):  # one forward pass per prompt, for all epochs
            part = labelled[start : start + size]
            predictions = self._predict([self.prompt_of(task) for task, _ in part])
            examples += [
                (prediction, label)
                for prediction, (_, label) in zip(predictions, part, strict=True)
                if prediction is not None
            ]
        for epoch in range(self.training.warm_start_epochs):
            Random(f"warm start/{self.seed}/{epoch}").shuffle(examples)
            for start in range(0, len(examples), size):
                batch = examples[start : start + size]
                self.model.supervised_step([prediction for prediction, _ in batch], [label for _, label in batch])

    def save(self, folder: Any) -> None:
        """Saves the head next to a model's weights, with the metadata needed to route the same way elsewhere."""
        self.model.save(folder, {**self.metadata, "multipliers": self.budgets.lambdas})

    def load(self, folder: Any) -> None:
        """Loads what `save` wrote."""
        self.budgets.set_lambdas(self.model.load(folder).get("multipliers") or {})
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
    """The label of a row, from its columns or from a joined label file; None if it has none."""
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
