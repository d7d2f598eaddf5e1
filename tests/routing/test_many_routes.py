"""A dozen routes: they are sampled, not all tried, and a budget that pays for half of the calls is spent well."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
import torch
from learner_cases import tiny_model

from toolwise.config.router import BudgetConfig, RouterConfig
from toolwise.config.schema import RunConfig
from toolwise.messages import Message
from toolwise.routing.budget import Budgets
from toolwise.routing.conditioning import Conditioning
from toolwise.routing.cost import CallsCost
from toolwise.routing.head.head import HeadSettings, RouterHead
from toolwise.routing.head.learner import RouterLearner
from toolwise.routing.learned_router import LearnedRouter
from toolwise.types import EvaluateResult, Rollout, RouteDecision, ScoredRollout, StepData, StopReason, Task, Usage

COUNT, BUDGET, STEPS = 12, 0.5, 30
ROUTES = [
    {"name": f"expert-{i}", "note": f"Answer as expert {i}.", **({"price": 1.0} if i % 2 else {})} for i in range(COUNT)
]
"""Every other one costs 1."""


STEP = StepData(
    system_step_index=0,
    observation_data=None,
    action_taken={"type": "text"},
    resulting_messages_history=[],
    policy_logprobs={"prompt_ids": [1], "token_ids": [2], "logprobs": [-1.0]},
)


def a_router() -> LearnedRouter:
    router = RouterConfig(
        routes=ROUTES, lr=5e-2, lr_schedule="constant", entropy_coef=0.05, entropy_final=0.05, epochs=3
    )
    config = RunConfig(router=router)
    names = tuple(str(route["name"]) for route in ROUTES)
    generator = torch.Generator().manual_seed(0)
    meanings = torch.randn(COUNT, 32, generator=generator)
    learner = RouterLearner(
        tiny_model(),
        RouterHead(HeadSettings(width=32, routes=names, hidden=0, seed=1)),
        config,
        encode=lambda prompts: torch.stack([meanings[prompt[0]] for prompt in prompts]),
    )
    return LearnedRouter(
        learner,
        prompt_of=lambda task: [task.extra_info["expert"]],
        budgets=Budgets([BudgetConfig(limit=BUDGET / 2, rate=0.3, proportional=0.5)]),
        cost=CallsCost(),
        conditioning=Conditioning(router, {}),
        seed=0,
    )


def a_task(index: int, expert: int) -> Task:
    prompt = [Message(role="user", content=f"question {index}")]
    return Task(task_id=f"t{index}", prompt=prompt, extra_info={"expert": expert})


def answered(decision: RouteDecision, offset: int) -> ScoredRollout:
    """Right on the task's own route only."""
    rollout_id, right = (
        f"{decision.group_id}#{offset}",
        decision.route == f"expert-{decision.task.extra_info['expert']}",
    )
    rollout = Rollout(
        *(rollout_id, decision.group_id, 0, offset, decision.task, decision.route, (STEP,), decision.prompt),
        *(StopReason.ANSWERED, Usage()),
    )
    return ScoredRollout(rollout, EvaluateResult(score=float(right)), (STEP,))


def test_a_dozen_routes_are_sampled_and_learned_within_a_budget() -> None:
    router, rng = a_router(), Random(0)
    assert router.sampling == "independent"
    for step in range(STEPS):
        tasks = [a_task(i, rng.randrange(COUNT)) for i in range(24)]
        decisions = router.decide(tasks, 6, step)
        if step == 0:
            tried = Counter(d.route for d in decisions for _ in range(d.n))
            assert sum(tried.values()) == 24 * 6
            assert len(tried) == COUNT, "all of them are tried in a batch, though not for every prompt"
            assert max(len({d.route for d in decisions if d.task is task}) for task in tasks) <= 6
        scored = router.annotate([answered(d, offset) for d in decisions for offset in range(d.n)])
        router.learn(scored)
    predictions = router.model.predict([[expert] for expert in range(COUNT)], router.multipliers)
    right = [prediction.probs[expert] for expert, prediction in enumerate(predictions)]
    assert len(predictions[0].probs) == COUNT
    assert min(right[::2]) > 0.8, "free routes are taken where they are right"
    paid = sum(sum(prediction.probs[1::2]) for prediction in predictions) / COUNT
    assert paid == pytest.approx(BUDGET / 2, abs=0.06), "half of the other questions can be paid for"
    assert sum(right[1::2]) / COUNT == pytest.approx(paid, abs=0.05), "and what is paid for is right"
