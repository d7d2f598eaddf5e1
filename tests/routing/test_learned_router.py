"""The learned router with a scripted head: decisions, examples, budgets, state."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from toolwise.advantages import Grpo
from toolwise.config.router import BudgetConfig, RouterConfig
from toolwise.messages import Message
from toolwise.routing import learned_router
from toolwise.routing.budget import Budgets
from toolwise.routing.budget_bins import BudgetBins
from toolwise.routing.conditioning import Conditioning
from toolwise.routing.cost import CallsCost
from toolwise.routing.families import ROUTES
from toolwise.routing.learned_router import LearnedRouter, target_of
from toolwise.routing.prompts import condition
from toolwise.routing.samples import RoutePrediction, RouterExample
from toolwise.tools.builtin.calculator import CalculatorTool
from toolwise.tools.builtin.search.tool import SearchTool
from toolwise.types import (
    AnnotatedRollout,
    EvaluateResult,
    Rollout,
    RouteDecision,
    ScoredRollout,
    StepData,
    StopReason,
    Task,
    Usage,
)

TOOLS = {"calculator": CalculatorTool({}), "search": SearchTool({})}
CALLS = ({}, {"search": 1}, {"calculator": 2})


class ToldModel:
    """Gives every prompt the same probabilities and records its examples."""

    def __init__(self, probs: Sequence[float] = (0.5, 0.3, 0.2)) -> None:
        self.logprobs = tuple(math.log(p) if p else -math.inf for p in probs)
        self.asked: list[list[Sequence[int]]] = []
        self.averaged: list[bool] = []
        self.examples: list[list[RouterExample]] = []
        self.multipliers: list[Sequence[float]] = []
        self.imitated: list[list[int]] = []

    def predict(
        self, prompts: Sequence[Sequence[int]], multipliers: Sequence[float], *, averaged: bool = False
    ) -> list[RoutePrediction]:
        self.asked.append(list(prompts))
        self.averaged.append(averaged)
        return [RoutePrediction(self.logprobs, tuple(prompt)) for prompt in prompts]

    def learn(self, examples: Sequence[RouterExample], multipliers: Sequence[float]) -> dict[str, float]:
        self.examples.append(list(examples))
        self.multipliers.append(multipliers)
        return {"router/loss": 0.0}

    def dual_estimates(
        self, limits: Sequence[float], multipliers: Sequence[float]
    ) -> tuple[list[float], list[float | None]]:
        return [limit + 0.25 for limit in limits], [0.6 for _ in limits]

    def supervised_step(self, predictions: Sequence[RoutePrediction], labels: Sequence[int]) -> dict[str, float]:
        self.imitated.append(list(labels))
        return {}

    def save(self, folder: Any, metadata: dict[str, Any]) -> None:
        raise NotImplementedError

    def load(self, folder: Any) -> dict[str, Any]:
        return {"multipliers": {"cost": 0.7, "gone": 2.0}}

    def state_dict(self) -> dict[str, Any]:
        return {"told": len(self.examples)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert "told" in state


def tasks(count: int, **info: Any) -> list[Task]:
    return [
        Task(task_id=f"t{i}", prompt=[Message(role="user", content=f"question {i}?")], extra_info=dict(info))
        for i in range(count)
    ]


def router(model: ToldModel | None = None, *, limit: float | None = 0.4, **how: Any) -> LearnedRouter:
    budgets = Budgets([] if limit is None else [BudgetConfig(limit=limit, rate=0.5, proportional=0.0)])
    return LearnedRouter(
        model or ToldModel(),
        prompt_of=lambda task: [int(task.task_id[1:])],
        budgets=budgets,
        cost=CallsCost(),
        conditioning=Conditioning(RouterConfig(**{name: how[name] for name in how if name != "tasks"}), TOOLS),
        seed=7,
        tasks=how.get("tasks", ()),
    )


def rolled_out(decisions: Sequence[RouteDecision], rewards: Sequence[float] = (0.0, 1.0, 0.5)) -> list[ScoredRollout]:
    """The reward and the calls of every rollout depend on its route only."""
    made = []
    for place, decision in enumerate(decisions):
        index = ROUTES.index(decision.route)  # type: ignore[arg-type]
        for offset in range(decision.n):
            step = StepData(
                system_step_index=0,
                observation_data=None,
                action_taken={"type": "text"},
                resulting_messages_history=[],
                policy_logprobs={"prompt_ids": [1], "token_ids": [2, 3], "logprobs": [-1.0, -1.0]},
            )
            rollout = Rollout(
                f"{decision.group_id}#{offset}",
                decision.group_id,
                place,
                offset,
                decision.task,
                decision.route,
                (step,),
                decision.prompt,
                StopReason.ANSWERED,
                Usage(calls=CALLS[index]),
            )
            made.append(ScoredRollout(rollout, EvaluateResult(score=rewards[index]), (step,)))
    return made


def test_one_prediction_per_prompt() -> None:
    model = ToldModel()
    decisions = router(model).decide(tasks(5), 8, 0)
    assert sum(d.n for d in decisions) == 40
    assert model.asked == [[[0], [1], [2], [3], [4]]]


def test_stratified_routes_are_even_with_a_random_remainder() -> None:
    decisions = router().decide(tasks(300), 8, 0)
    counts = Counter((d.prompt_id, d.n) for d in decisions)
    assert len(decisions) == 900
    assert {n for _, n in counts} == {2, 3}
    fewest = Counter(d.route for d in decisions if d.n == 2)
    assert all(60 < fewest[route] < 140 for route in ROUTES)


def test_independent_routes_follow_their_probabilities() -> None:
    decisions = router(routes="independent").decide(tasks(300), 8, 0)
    total = Counter[str]()
    for d in decisions:
        total[d.route or ""] += d.n
    assert [total[route] / 2400 for route in ROUTES] == pytest.approx([0.5, 0.3, 0.2], abs=0.04)
    assert any(d.n == 1 for d in decisions)


def test_one_route_is_used_for_all_rollouts() -> None:
    decisions = router(routes="one").decide(tasks(200), 8, 0)
    assert [d.n for d in decisions] == [8] * 200
    assert Counter(d.route for d in decisions)["ANSWER"] == pytest.approx(100, abs=30)


def test_decisions_have_conditioned_prompts() -> None:
    by_route = {d.route: d for d in router().decide(tasks(1), 6, 0)}
    answer, search = by_route["ANSWER"], by_route["SEARCH-FAMILY"]
    assert answer.tools == ()
    assert search.tools == ("search",)
    assert answer.prompt != search.prompt
    assert search.log_prob == pytest.approx(math.log(0.3))
    assert len({d.group_id for d in by_route.values()}) == 3
    assert len({d.prompt_id for d in by_route.values()}) == 1
    assert len({d.seed for d in by_route.values()}) == 3


def test_the_same_seed_decides_the_same_and_another_step_otherwise() -> None:
    first, again, later = (router(routes="independent").decide(tasks(40), 4, step) for step in (1, 1, 2))
    assert first == again
    assert [(d.route, d.n) for d in first] != [(d.route, d.n) for d in later]
    assert {d.seed for d in first}.isdisjoint(d.seed for d in later)


def test_token_ids_are_used_for_the_prediction_only() -> None:
    [task] = tasks(1)
    decisions = router().decide([task.model_copy(update={"prompt_ids": [1, 2, 3]})], 3, 0)
    assert all(d.task.prompt_ids is None for d in decisions)


def test_without_exploration_each_prompt_gets_one_route() -> None:
    sampled = router()
    decisions = sampled.decide(tasks(200), 1, 0, label="eval", explore=False)
    assert [d.n for d in decisions] == [1] * 200
    assert Counter(d.route for d in decisions)["ANSWER"] == pytest.approx(100, abs=30)
    assert sampled.learn(rolled_out(decisions))["router/prompts"] == 0
    greedy = router(eval_mode="argmax").decide(tasks(50), 1, 0, explore=False)
    assert {d.route for d in greedy} == {"ANSWER"}


def test_evaluation_uses_the_averaged_head() -> None:
    made = router(model := ToldModel())
    made.decide(tasks(2), 6, 0)
    made.decide(tasks(2), 1, 0, explore=False)
    assert model.averaged == [False, True]


def test_stratified_examples_by_hand() -> None:
    model = ToldModel()
    made = router(model)
    metrics = made.learn(rolled_out(made.decide(tasks(2), 6, 0)))
    [[example, _]] = model.examples
    value = 0.3 * 1.0 + 0.2 * 0.5  # λ is still 0
    assert example.advantages == pytest.approx((-value, 1.0 - value, 0.5 - value))
    assert [t.costs for t in example.samples] == [(0.0,)] * 2 + [(1.0,)] * 2 + [(2.0,)] * 2
    spent = 0.3 * 1 + 0.2 * 2
    assert metrics["router/r_task"] == pytest.approx(value)
    assert metrics["router/cost/mean"] == pytest.approx(spent)
    assert metrics["router/cost/gap"] == pytest.approx(spent - 0.4)
    assert metrics["router/cost/lambda"] == pytest.approx(0.5 * (spent - 0.4))
    assert metrics["router/share/SEARCH-FAMILY"] == pytest.approx(0.3)


def test_the_current_lambda_is_in_the_next_example() -> None:
    model = ToldModel()
    made = router(model)
    for step in range(2):
        made.learn(rolled_out(made.decide(tasks(1), 6, step)))
    price = 0.5 * 0.3
    assert model.multipliers == [[0.0], [pytest.approx(price)]]
    q = [0.0, 1.0 - price, 0.5 - 2 * price]
    value = sum(p * x for p, x in zip((0.5, 0.3, 0.2), q, strict=True))
    assert model.examples[1][0].advantages == pytest.approx([x - value for x in q])


def test_sampled_examples_are_centred_within_the_prompt() -> None:
    model = ToldModel()
    made = router(model, routes="independent", limit=None)
    made.learn(rolled_out(made.decide(tasks(20), 6, 0)))
    for example in model.examples[0]:
        assert example.advantages is None
        assert sum(t.advantage for t in example.samples) == pytest.approx(0.0, abs=1e-12)


def test_a_single_rollout_of_a_route_is_an_example() -> None:
    model = ToldModel()
    made = router(model)
    made.learn(rolled_out(made.decide(tasks(1), 3, 0)))
    assert [a is not None for a in model.examples[0][0].advantages or ()] == [True] * 3


def test_failed_rollouts_are_not_learned_from() -> None:
    model = ToldModel()
    made = router(model)
    scored = rolled_out(made.decide(tasks(1), 6, 0))
    broken = replace(scored[0].rollout, stop_reason=StopReason.DEADLINE)
    unscored = EvaluateResult(score=None, is_score_valid=False)
    scored = [replace(scored[0], rollout=broken), replace(scored[1], result=unscored), *scored[2:]]
    metrics = made.learn(scored)
    [example] = model.examples[0]
    assert example.advantages is not None
    assert example.advantages[0] is None  # both rollouts of ANSWER are lost
    assert metrics["router/rollouts_lost"] == 2


def test_labels_reach_the_examples_and_mixed_ones_do_not() -> None:
    model = ToldModel()
    made = router(model)
    labelled = [*tasks(2, router_target_action="SEARCH-FAMILY"), *tasks(1, router_target_action="MIXED"), *tasks(1)]
    metrics = made.learn(rolled_out(made.decide(labelled, 6, 0)))
    assert [example.label for example in model.examples[0]] == [1, 1, None, None]
    assert metrics["router/mixed_share"] == pytest.approx(1 / 3)
    assert metrics["router/label_agreement"] == pytest.approx(0.3)
    assert target_of(labelled[2]) == "MIXED"


def test_loading_restores_lambda() -> None:
    made = router(model := ToldModel(), warm_start_epochs=1, tasks=tasks(1, router_target_action="ANSWER"))
    made.load("anywhere")
    assert made.budgets.lambdas == {"cost": 0.7}
    made.warm_start()
    assert model.imitated == []  # no second warm start


def test_a_warm_start_predicts_each_prompt_once() -> None:
    made = router(model := ToldModel(), warm_start_epochs=3, tasks=tasks(5, router_target_action="ANSWER"))
    made.warm_start()
    assert sum(map(len, model.asked)) == 5
    assert sum(map(len, model.imitated)) == 15


def test_a_warm_start_happens_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ToldModel()
    labelled = [*tasks(3, router_target_action="ANSWER"), *tasks(2, router_target_action="MIXED")]
    monkeypatch.setattr(learned_router, "WARM_START_BATCH", 2)
    made = router(model, warm_start_epochs=2, tasks=labelled)
    made.decide(tasks(1), 3, 0)
    assert model.imitated == []
    made.warm_start()
    made.warm_start()
    assert model.imitated == [[0, 0], [0], [0, 0], [0]]
    again = router(model2 := ToldModel(), warm_start_epochs=2, tasks=labelled)
    again.load_state_dict(made.state_dict())
    again.warm_start()
    assert model2.imitated == []


def test_rewards_can_be_standardized_by_kind() -> None:
    model = ToldModel()
    made = router(model, standardize_by_kind=True, limit=None)
    made.learn(rolled_out(made.decide(tasks(2, kind="easy"), 6, 0), rewards=(0.0, 100.0, 50.0)))
    rewards = [t.reward for example in model.examples[0] for t in example.samples]
    assert sum(rewards) == pytest.approx(0.0, abs=1e-9)
    assert max(rewards) < 2


def test_an_actors_advantage_does_not_depend_on_other_routes_rewards() -> None:
    """Groups are (prompt, route), and the actor is credited within its group."""
    made = router()
    decisions = made.decide(tasks(2), 9, 0)

    def advantages(others: float) -> list[float]:
        scored = rolled_out(decisions)
        noisy = [
            replace(
                s,
                result=EvaluateResult(
                    score=float(i % 2) if s.rollout.route == "SEARCH-FAMILY" else others * (i % 3), reason=None
                ),
            )
            for i, s in enumerate(scored)
        ]
        credited = Grpo()([AnnotatedRollout(s) for s in noisy]).rollouts
        return [float(c.advantages[0][0]) for c in credited if c.rollout.route == "SEARCH-FAMILY"]

    assert advantages(0.0) == advantages(1.0) == advantages(-50.0)
    assert any(advantages(0.0))


def test_resuming_is_identical() -> None:
    first = router(standardize_by_kind=True, routes="one")
    for step in range(3):
        first.learn(rolled_out(first.decide(tasks(4), 4, step)))
    again = router(standardize_by_kind=True, routes="one")
    again.load_state_dict(first.state_dict())
    found = [made.learn(rolled_out(made.decide(tasks(4), 4, 3))) for made in (first, again)]
    assert found[0] == found[1]
    assert first.state_dict() == again.state_dict() | {"model": first.state_dict()["model"]}


def test_with_a_window_lambda_follows_the_model_s_estimates() -> None:
    made = router(budget_window=100)
    metrics = made.learn(rolled_out(made.decide(tasks(4), 6, 0)))
    assert metrics["router/cost/window_mean"] == 0.4 + 0.25
    assert made.budgets.lambdas["cost"] == 0.6 + 0.5 * 0.25  # the solved λ, and η times the excess
    assert metrics["router/cost/mean"] != metrics["router/cost/window_mean"]


def test_without_budgets_a_window_does_nothing() -> None:
    made = router(limit=None, budget_window=100)
    assert "router/cost/window_mean" not in made.learn(rolled_out(made.decide(tasks(4), 6, 0)))


@pytest.mark.parametrize("how", [{"routes": "one"}, {"routes": "independent"}, {"backbone": "top"}])
def test_a_window_needs_every_route_and_features_that_stay(how: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="budget_window needs the outcome of every route"):
        RouterConfig(budget_window=100, **how)


class BinnedModel(ToldModel):
    """The same for every prompt, but other probabilities for each random budget."""

    def predict(
        self, prompts: Sequence[Sequence[int]], multipliers: Sequence[float], *, averaged: bool = False
    ) -> list[RoutePrediction]:
        return [RoutePrediction.for_bins([[0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 2.0, 0.0]]) for _ in prompts]


def binned() -> LearnedRouter:
    settings = {"budgets": [{"limit": 0.5, "rate": 0.5, "proportional": 0.0}], "cost": "calls"}
    config = RouterConfig.model_validate(settings | {"random_budgets": {"low": 0.0, "high": 1.0, "bins": 3}})
    return LearnedRouter(
        BinnedModel(),
        prompt_of=lambda task: [int(task.task_id[1:])],
        budgets=Budgets(config.budgets),
        cost=CallsCost(),
        conditioning=Conditioning(config, TOOLS),
        seed=7,
        bins=BudgetBins(config),
    )


def test_every_prompt_is_routed_and_charged_for_the_budget_it_drew() -> None:
    made = binned()
    assert made.bins is not None
    for index, multiplier in enumerate(made.bins.multipliers):
        multiplier.value = multiplier.integral = float(index)
    scored = rolled_out(made.decide(tasks(12), 3, 1))
    by_prompt = {prompt.prompt_id: prompt for prompt in made._pending.values()}
    assert {prompt.bin for prompt in by_prompt.values()} == {0, 1, 2}
    for prompt in by_prompt.values():
        weight = math.exp(float(prompt.bin or 0))
        assert prompt.prediction.probs == pytest.approx((1 / (2 + weight), weight / (2 + weight), 1 / (2 + weight)))
    drawn = {group: prompt.bin or 0 for group, prompt in made._pending.items()}
    for s in made.annotate(scored):
        assert s.router is not None
        assert s.router.reward == pytest.approx(
            s.score - drawn[s.rollout.group_id] * sum(s.rollout.usage.calls.values())
        )
        assert s.router.cost == sum(s.rollout.usage.calls.values())


def test_only_the_budgets_that_were_drawn_move_and_once_a_step() -> None:
    made = binned()
    assert made.bins is not None
    scored = rolled_out(made.decide(tasks(1), 3, 1))
    (drawn,) = {prompt.bin for prompt in made._pending.values()}
    assert drawn is not None
    probs = next(iter(made._pending.values())).prediction.probs
    metrics = made.learn(made.annotate(scored))
    spent = probs[1] + 2 * probs[2]
    expected = max(0.0, 0.5 * (spent - made.bins.values[drawn]))
    assert made.bins.multipliers[drawn].value == pytest.approx(expected)
    assert [m.value for i, m in enumerate(made.bins.multipliers) if i != drawn] == [0.0, 0.0]
    assert metrics["router/cost/lambda"] == made.bins.default_lambda
    value = made.bins.values[drawn]
    assert metrics[f"router/cost@{value:g}/within"] == pytest.approx(probs[0] + probs[1] * (value >= 1))
    again = binned()
    again.load_state_dict(made.state_dict())
    assert again.bins is not None
    assert again.bins.state_dict() == made.bins.state_dict()


def test_rollouts_that_used_the_same_share_what_they_cost() -> None:
    made = router()
    scored = rolled_out(made.decide(tasks(4), 9, 0))
    unstarted = replace(scored[-1], rollout=replace(scored[-1].rollout, steps=()))
    spent = made._spent([*scored, unstarted])
    for s, each in zip([*scored, unstarted], spent, strict=True):
        assert each == made._spent_by(s.rollout, made.unit)
        assert each.costs == made.costs_of(s.rollout)
    assert len({id(each) for each in spent[:-1]}) == 3
    assert spent[-1] is not spent[-2]


def test_a_prompt_that_was_prepared_is_conditioned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    conditioned: list[str] = []
    monkeypatch.setattr(
        "toolwise.routing.conditioning.condition",
        lambda messages, route, *args, **how: (
            conditioned.append(route.name) or condition(messages, route, *args, **how)
        ),
    )
    prepared, plain = router(), router()
    (task,) = tasks(1)
    prepared.prepare(task.model_copy())
    assert conditioned == list(ROUTES)
    decisions = prepared.decide([task], 6, 0)
    assert conditioned == list(ROUTES)
    assert decisions == plain.decide([task], 6, 0)
    assert [d.task for d in decisions] == [task] * 3
    prepared.decide([task.model_copy(update={"extra_info": {"tool_families": {"search": "OTHER"}}})], 6, 1)
    assert len(conditioned) == 9


def test_a_prompt_that_was_prepared_is_not_tokenized_again_unless_the_task_is_another() -> None:
    asked: list[str] = []
    prepared, plain = router(), router()
    original = prepared.prompt_of
    prepared.prompt_of = lambda task: asked.append(task.task_id) or original(task)  # type: ignore[func-returns-value]
    batch = tasks(3)
    for task in (*batch[:2], batch[2].model_copy(update={"ground_truth": "another row"})):
        prepared.prepare(task.model_copy())
    assert asked == ["t0", "t1", "t2"]
    assert prepared.decide(batch, 6, 0) == plain.decide(batch, 6, 0)
    assert asked == ["t0", "t1", "t2", "t2"]
    prepared.decide(batch, 6, 1)
    assert asked[4:] == ["t0", "t1", "t2"]
