"""The learned router: samples a route per prompt, conditions the prompt on it, and learns from rewards and costs.

    decide   original prompt ─► predict ─► routes ─► conditioned prompts, one group of rollouts per (prompt, route)
    learn    scored rollouts ─► usage, cost ─► r_task − λ·cost ─► advantages of the prompt's routes ─► the head; then λ

`InferenceRouter` routes without learning. The head is behind `RouterModel`; this module handles plain numbers only.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

from toolwise.errors import ToolwiseError
from toolwise.protocols import Metrics
from toolwise.routing.budget_bins import BINS_KEY
from toolwise.routing.calibration import KEY
from toolwise.routing.current_spending import current_costs, current_prediction
from toolwise.routing.families import MIXED, Target
from toolwise.routing.inference_router import InferenceRouter, PredictedPrompt, Spent
from toolwise.routing.pending import RemembersPrompts
from toolwise.routing.route_advantages import (
    KindStandardizer,
    RouteOutcome,
    RouteProbs,
    RouterAdvantages,
    RunningBaseline,
    credit_routes,
    merge_advantages,
    policy_weights,
)
from toolwise.routing.routes import DEFAULT_ROUTES, RouteSet
from toolwise.routing.samples import RoutePrediction, RouterExample, RouterModel, RouteSample
from toolwise.types import RouteDecision, ScoredRollout, Task

WARM_START_BATCH = 64
"""Prompts per supervised step of the warm start."""


@dataclass(frozen=True, slots=True)
class _StepCredit:
    """What a step's rollouts teach the router."""

    given: list[str]
    """Ids of all rollouts of the step."""
    pending: Mapping[str, PredictedPrompt]
    """prompt id -> prompt"""
    rollout_ids: list[str]
    """Those of the outcomes."""
    outcomes: Sequence[RouteOutcome]
    standardized: Sequence[RouteOutcome]
    """With standardized rewards, if they are."""
    probs: RouteProbs
    """Of the prompts with an outcome."""
    lambdas: Sequence[Mapping[str, float]]
    """unit -> λ of each outcome."""
    credit: RouterAdvantages
    spent_by_bin: Mapping[int, Sequence[float]]
    """Random budget -> what the policy spends on the prompts that drew it, in their unit."""

    @property
    def net_rewards(self) -> list[float]:
        """r_task − Σ λ·cost of each outcome."""
        return [
            c.reward - sum(lam * c.costs[unit] for unit, lam in lambdas.items())
            for c, lambdas in zip(self.standardized, self.lambdas, strict=True)
        ]

    @property
    def advantages(self) -> list[float]:
        """Of each outcome: its route's, where those of all routes were estimated."""
        by_route = self.credit.route_advantages
        pairs = zip(self.outcomes, self.credit.rollout_advantages, strict=True)
        return [(by_route[c.prompt_id][c.route] or 0.0) if by_route else advantage for c, advantage in pairs]


@dataclass(eq=False)
class LearnedRouter(InferenceRouter, RemembersPrompts):
    model: RouterModel
    _: KW_ONLY
    tasks: Sequence[Task] = ()
    """For the warm start."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Saved with the head."""
    stale: bool = False
    """Whether rollouts may come from an older head: λ then sees what the current one would spend."""
    baseline: RunningBaseline = field(default_factory=RunningBaseline, init=False)
    scale: KindStandardizer = field(default_factory=KindStandardizer, init=False)
    _warm_started: bool = field(default=False, init=False)
    _pending: dict[str, PredictedPrompt] = field(default_factory=dict, init=False)
    """group id -> prompt whose rollouts are in progress"""
    _step: _StepCredit | None = field(default=None, init=False)
    """The credit of the step that `annotate` saw, until `learn` uses it."""

    def decide(
        self, tasks: Sequence[Task], n: int, step: int, *, label: str = "step", explore: bool = True
    ) -> list[RouteDecision]:
        """One decision per (prompt, route). With `explore=False` each prompt gets one route and nothing is learned.

        A prompt that does not fit the context gets random routes, which are not learned from: its rollouts end with
        `prompt_too_long`."""
        if not explore:
            return super().decide(tasks, n, step, label=label, explore=False)
        decisions: list[RouteDecision] = []
        for prompt in self._prompts(tasks, step, label, averaged=False):
            counts = sorted(self._route_counts(prompt.prediction, n, prompt.rng).items())
            prompt_decisions = [self._decision(prompt, route, count) for route, count in counts]
            if prompt.fits:
                self._pending |= {decision.group_id: prompt for decision in prompt_decisions}
            decisions += prompt_decisions
        return decisions

    def plan_ahead(self) -> None:
        """The tasks that were prepared are all that `decide` will be asked for next."""
        self.model.plan_ahead([tokens for _, tokens in self._prepared.values()])

    def read_ahead(self) -> None:
        """The actor has been updated, and will not be again before `decide`."""
        self.model.read_ahead()

    def pending_of(self, groups: Sequence[str]) -> dict[str, Any]:
        return {group: self._pending[group] for group in groups if group in self._pending}

    def add_pending(self, pending: Mapping[str, Any]) -> None:
        prompts = {prompt.prompt_id for prompt in pending.values()}
        others = {group: prompt for group, prompt in self._pending.items() if prompt.prompt_id not in prompts}
        self._pending = others | dict(pending)

    def forget(self, groups: Sequence[str]) -> None:
        for group in groups:
            self._pending.pop(group, None)

    @property
    def sampling(self) -> str:
        return self.config.sampling_of(len(self.routes))

    def _route_counts(self, prediction: RoutePrediction, n: int, rng: Random) -> Counter[int]:
        """route -> rollouts"""
        if self.sampling == "one":
            return Counter({prediction.sample(rng): n})
        if self.sampling == "independent":
            return Counter(prediction.sample(rng) for _ in range(n))
        # A remainder goes to routes in random order, so that no route is always sampled less.
        routes = [index for index in range(len(self.routes)) if prediction.applies(index)]
        order = rng.sample(routes, len(routes))
        return Counter(order[i % len(order)] for i in range(n))

    def annotate(self, scored: Sequence[ScoredRollout]) -> Sequence[ScoredRollout]:
        """With the router's reward and advantage for each rollout that it will learn from."""
        if not any(s.rollout.group_id in self._pending for s in scored):
            return super().annotate(scored)
        spent = self._spent(scored)
        step = self._step = self._credit(scored, spent)
        learned = dict(zip(step.rollout_ids, zip(step.net_rewards, step.advantages, strict=True), strict=True))
        nothing = None, None
        return [
            replace(s, router=each.credit(*learned.get(s.rollout.rollout_id, nothing)))
            for s, each in zip(scored, spent, strict=True)
        ]

    def learn(self, scored: Sequence[ScoredRollout]) -> Metrics:
        """Learns from all finished rollouts, including groups of one, which the actor learns nothing from."""
        step, self._step = self._step, None
        if step is None or step.given != [s.rollout.rollout_id for s in scored]:
            step = self._credit(scored, self._spent(scored))
        finished = {s.rollout.group_id for s in scored}  # in asynchronous training others are under way
        self._pending = {group: prompt for group, prompt in self._pending.items() if group not in finished}
        examples, metrics = self._examples(step)
        metrics |= self._report(step.pending, step.outcomes, lost=len(scored) - len(step.outcomes))
        metrics = self.model.learn(examples, self.multipliers) | metrics
        # Last: the examples use the λ that the routes were sampled with.
        metrics |= self._dual_step()
        return metrics | self.budgets.metrics() | ({} if self.bins is None else self.bins.metrics())

    def _dual_step(self) -> Metrics:
        limits = self.budgets.limits
        if self.bins is not None:
            self.bins.step()
            self.budgets.set_lambdas({self.bins.unit: self.bins.default_lambda})
        if not (self.config.budget_window and limits):
            self.budgets.step()
            return {}
        means, solved = self.model.dual_estimates(list(limits.values()), self.multipliers)
        self.budgets.step(means, solved)
        return {f"router/{unit}/window_mean": mean for unit, mean in zip(limits, means, strict=False)}

    def _credit(self, scored: Sequence[ScoredRollout], spent: Sequence[Spent]) -> _StepCredit:
        """The advantages of a step's rollouts; updates the running means."""
        finished = {s.rollout.group_id for s in scored}
        groups = {group: prompt for group, prompt in self._pending.items() if group in finished}
        usable = [
            (s, each.costs)
            for s, each in zip(scored, spent, strict=True)
            if s.rollout.group_id in groups and s.result.has_valid_score and s.rollout.trainable
        ]
        outcomes = [
            RouteOutcome(
                groups[s.rollout.group_id].prompt_id,
                self.routes.index(s.rollout.route or ""),
                s.score,
                costs,
            )
            for s, costs in usable
        ]
        pending = {prompt.prompt_id: prompt for prompt in groups.values()}
        prompt_ids = dict.fromkeys(c.prompt_id for c in outcomes)
        probs = {prompt_id: pending[prompt_id].prediction.probs for prompt_id in prompt_ids}
        lambdas = {prompt_id: self._lambdas(pending[prompt_id]) for prompt_id in prompt_ids}
        standardized = outcomes
        if self.config.standardize_by_kind:
            tasks = [pending[c.prompt_id].task for c in outcomes]
            kinds = [str(task.extra_info.get("kind") or task.data_source) for task in tasks]
            rewards = self.scale([c.reward for c in outcomes], kinds).tolist()
            standardized = [replace(c, reward=reward) for c, reward in zip(outcomes, rewards, strict=True)]
        credit, spent_by_bin = self._credit_by_bin(standardized, probs, pending)
        return _StepCredit(
            given=[s.rollout.rollout_id for s in scored],
            pending=pending,
            rollout_ids=[s.rollout.rollout_id for s, _ in usable],
            outcomes=outcomes,
            standardized=standardized,
            probs=probs,
            lambdas=[lambdas[c.prompt_id] for c in outcomes],
            credit=credit,
            spent_by_bin=spent_by_bin,
        )

    def _lambdas(self, prompt: PredictedPrompt) -> dict[str, float]:
        """unit -> λ that a prompt pays."""
        return self.budgets.lambdas if self.bins is None else self.bins.lambdas(self.budgets.lambdas, prompt.bin)

    def _credit_by_bin(
        self, outcomes: Sequence[RouteOutcome], probs: RouteProbs, pending: Mapping[str, PredictedPrompt]
    ) -> tuple[RouterAdvantages, dict[int, Sequence[float]]]:
        """Prompts with different budgets pay different λ; also returns what those of each budget spend."""

        def credit(part: Sequence[RouteOutcome], lambdas: Mapping[str, float]) -> RouterAdvantages:
            members = {c.prompt_id: probs[c.prompt_id] for c in part}
            return credit_routes(part, members, lambdas, self.config, self.baseline, self.cost.units)

        bins = self.bins
        if bins is None:
            return credit(outcomes, self.budgets.lambdas), {}
        by_bin: dict[int, list[int]] = defaultdict(list)
        for index, outcome in enumerate(outcomes):
            by_bin[pending[outcome.prompt_id].bin or 0].append(index)
        credits = {
            drawn: credit([outcomes[i] for i in members], bins.lambdas(self.budgets.lambdas, drawn))
            for drawn, members in sorted(by_bin.items())
        }
        merged = merge_advantages([(by_bin[drawn], each) for drawn, each in credits.items()], self.cost.units)
        return merged, {drawn: each.spent[bins.unit] for drawn, each in credits.items()}

    def _examples(self, step: _StepCredit) -> tuple[list[RouterExample], Metrics]:
        """One example per prompt with a finished rollout; and the policy's mean reward and costs."""
        pending, credit, probs, units = step.pending, step.credit, step.probs, tuple(self.budgets.lambdas)
        spent_now, spent_by_bin = credit.spent, step.spent_by_bin
        if self.stale:
            now = {p: current_prediction(self.model, pending[p].prediction, self.multipliers).probs for p in probs}
            costs = partial(current_costs, sampled_from=probs, now=now, sampling=self.sampling, units=self.cost.units)
            spent_now = costs(step.outcomes)
            if self.bins is not None:
                parts = {b: [c for c in step.outcomes if (pending[c.prompt_id].bin or 0) == b] for b in spent_by_bin}
                spent_by_bin = {drawn: costs(part)[self.bins.unit] for drawn, part in parts.items()}
        self.budgets.observe(spent_now, without=None if self.bins is None else self.bins.unit)
        for drawn, spent in spent_by_bin.items():
            self.bins.multipliers[drawn].observe(spent)  # type: ignore[union-attr]
        members: dict[str, list[RouteSample]] = {prompt_id: [] for prompt_id in probs}
        for c, advantage in zip(step.standardized, credit.rollout_advantages, strict=True):
            members[c.prompt_id].append(
                RouteSample(c.route, c.reward, tuple([c.costs[unit] for unit in units]), advantage)
            )
        examples = [
            RouterExample(
                pending[p].prediction, tuple(members[p]), credit.route_advantages.get(p), self._label(pending[p])
            )
            for p in probs
        ]
        weights = policy_weights(step.outcomes, probs, self.sampling)
        rewards = [c.reward for c in step.outcomes]
        r_task = sum(r * w for r, w in zip(rewards, weights, strict=True)) / sum(weights) if weights else 0.0
        metrics = {"router/r_task": r_task}
        metrics |= {f"router/{unit}/mean": _mean(each) for unit, each in credit.spent.items()}
        if self.bins is not None:
            bins = [pending[c.prompt_id].bin or 0 for c in step.outcomes]
            metrics |= self.bins.feasibility(bins, [c.costs[self.bins.unit] for c in step.outcomes], weights)
        return examples, metrics

    def _label(self, prompt: PredictedPrompt) -> int | None:
        """The labelled route of a prompt, if it applies to it."""
        label = label_index(prompt.task, self.routes)
        return label if label is not None and prompt.prediction.applies(label) else None

    def _report(
        self, pending: Mapping[str, PredictedPrompt], outcomes: Sequence[RouteOutcome], *, lost: int
    ) -> Metrics:
        probs = [a.prediction.probs for a in pending.values()]
        targets = [target_of(a.task, self.routes) for a in pending.values()]
        labelled = [target for target in targets if target is not None]
        metrics = {
            **{f"router/share/{route}": _mean([p[i] for p in probs]) for i, route in enumerate(self.routes.names)},
            "router/prompts": float(len(pending)),
            "router/rollouts_lost": float(lost),
            **{
                f"router/rollouts/{route}": float(sum(c.route == i for c in outcomes))
                for i, route in enumerate(self.routes.names)
            },
        }
        if labelled:
            routed = [(p, t) for p, t in zip(probs, targets, strict=True) if t is not None and t != MIXED]
            agreement = [p[self.routes.index(target)] for p, target in routed]
            metrics["router/mixed_share"] = _mean([float(target == MIXED) for target in labelled])
            metrics["router/label_agreement"] = _mean(agreement)
        return metrics

    def warm_start(self) -> None:
        """Trains the head on the labels, once, before the first route is sampled."""
        if self._warm_started or not self.config.warm_start_epochs:
            return
        self._warm_started = True
        labelled = [(task, label) for task in self.tasks if (label := label_index(task, self.routes)) is not None]
        examples: list[tuple[RoutePrediction, int]] = []
        for part in _batches(labelled):  # one forward pass per prompt, for all epochs
            predictions = self._predict([self.prompt_of(task) for task, _ in part])
            for prediction, (task, label) in zip(predictions, part, strict=True):
                known = None if prediction is None else prediction.restricted(self.conditioning.applicable(task))
                if known is not None and known.applies(label):
                    examples.append((known, label))
        for epoch in range(self.config.warm_start_epochs):
            rng = Random(f"warm start/{self.seed}/{epoch}")
            rng.shuffle(examples)
            if self.bins is not None:
                examples = [(prediction.at(self.bins.draw(rng)), label) for prediction, label in examples]
            for batch in _batches(examples):
                self.model.supervised_step([prediction for prediction, _ in batch], [label for _, label in batch])

    def save(self, folder: Any) -> None:
        """Saves the head next to a model's weights, with the metadata needed to route the same way elsewhere."""
        calibration: dict[str, Any] = {} if self.calibration is None else {KEY: self.calibration.to_json()}
        if self.bins is not None:
            calibration[BINS_KEY] = self.bins.calibrations_to_json()
        self.model.save(folder, {**self.metadata, "multipliers": self.budgets.lambdas, **calibration})

    def load(self, folder: Any) -> None:
        super().load(folder)
        self._warm_started = True

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "budgets": self.budgets.state_dict(),
            "baseline": self.baseline.state_dict(),
            "scale": self.scale.state_dict(),
            "warmed": self._warm_started,
            KEY: None if self.calibration is None else self.calibration.to_json(),
            **({} if self.bins is None else {"bins": self.bins.state_dict()}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.budgets.load_state_dict(state["budgets"])
        self.baseline.load_state_dict(state["baseline"])
        self.scale.load_state_dict(state["scale"])
        self._warm_started = state["warmed"]
        self.calibration = self._read_calibration(state)
        if self.bins is not None:
            self.bins.load_state_dict(state.get("bins") or {})
        self._pending, self._step = {}, None


def target_of(task: Task, routes: RouteSet = DEFAULT_ROUTES, *, key: str = "router_target_action") -> Target | None:
    """The label of a row, from its columns or from a joined label file; None if it has none, or one for other routes
    than a user's."""
    written = task.extra_info.get(key)
    if written is None:
        return None
    try:
        return routes.parse_target(written)
    except ToolwiseError:
        if routes.own:
            return None
        raise


def label_index(task: Task, routes: RouteSet) -> int | None:
    """The index of the labelled route; None without a label, or if it is MIXED."""
    target = target_of(task, routes)
    return None if target is None or target == MIXED else routes.index(target)


def _batches(items: Sequence[Any]) -> list[Any]:
    return [items[start : start + WARM_START_BATCH] for start in range(0, len(items), WARM_START_BATCH)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
