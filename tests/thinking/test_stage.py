"""The full stage: rollouts in, `RolloutThinking` and metrics out; λ adapts and is restored from a checkpoint."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from precision import fp32_bound
from thinking_cases import REPLY, ScriptedThinker, scored, writer

from toolwise.advantages import Rlvcr
from toolwise.config.algorithm import RlvcrConfig
from toolwise.config.router import BudgetConfig
from toolwise.routing.budget import Budgets, FollowedMultiplier, Multiplier
from toolwise.thinking.stage import ThinkingStage
from toolwise.types import AnnotatedRollout

DIRECT = "<level>1</level><action>go right</action>"
ROLLOUTS = [
    scored(1.0, [REPLY, DIRECT], name="a", step_kind="hard"),
    scored(0.0, [DIRECT, "nonsense"], name="b", step_kind="easy"),
]


def stage(model: ScriptedThinker | None = None, price: Any = None, **rlvcr: Any) -> ThinkingStage:
    config = RlvcrConfig(**({"max_added_tokens": 0.0, "share": 1.0} | rlvcr))
    return ThinkingStage(writer(model), config, price, total_steps=10)


def think(made: ThinkingStage, training_step: int = 0, usable: Any = None) -> Any:
    return asyncio.run(made.think(ROLLOUTS, ROLLOUTS if usable is None else usable, training_step=training_step))


def test_every_step_has_its_level_and_the_comparable_ones_a_group() -> None:
    found, _ = think(stage())
    assert [step.level for step in found["a"].steps] == [3, 1]
    assert [step.group is not None for step in found["a"].steps] == [True, True]
    assert [(step.level, step.group is None) for step in found["b"].steps] == [(1, False), (None, True)]
    assert [score.level for score in found["a"].steps[0].group.scores] == [1, 2, 3, 4]


def test_only_usable_rollouts_get_alternatives_but_all_are_counted() -> None:
    model = ScriptedThinker()
    found, metrics = think(stage(model), usable=ROLLOUTS[:1])
    assert list(found) == ["a"]
    assert metrics["thinking/steps_compared"] == 2
    assert metrics["thinking/format_valid"] == 0.75


def test_figures() -> None:
    _, metrics = think(stage())
    drawn = [p for rollout in ROLLOUTS for step in rollout.steps for p in (step.policy_logprobs or {})["logprobs"]]
    assert metrics["thinking/level_1_share"] == pytest.approx(2 / 3)
    assert metrics["thinking/hard/level_3_share"] == 0.5
    assert metrics["thinking/easy/level_1_share"] == 1.0
    assert metrics["thinking/alternatives"] == 9
    assert metrics["thinking/failed_alternatives"] == 0
    assert metrics["thinking/groups"] == 3
    assert metrics["thinking/lambda"] == 0.0
    assert metrics["thinking/own_gap"] < fp32_bound(drawn).max()
    assert metrics["thinking/added_tokens_ratio"] > 0
    assert metrics["thinking/names_action"] == 0.0


def test_validation_is_measured_without_alternatives() -> None:
    model = ScriptedThinker()
    found = stage(model).measure(ROLLOUTS)
    assert found["thinking/hard/level_3_share"] == 0.5
    assert found["thinking/tokens_per_step"] > 0
    assert (model.asked, model.scorings) == ([], 0)


def test_a_price_that_follows_the_router_is_paid_for_the_sum_of_the_steps() -> None:
    budgets = Budgets([BudgetConfig(unit="usd", limit=1.0, initial=2.0)])
    followed = FollowedMultiplier(budgets, "usd", 0.05)
    made = stage(price=followed, subtract_thinking_cost=True, budget={"unit": "usd"})
    found, metrics = think(made)
    tokens = [step.thinking_tokens for step in found["a"].steps]
    assert metrics["thinking/lambda"] == pytest.approx(0.1)
    assert sum(found["a"].step_costs) == pytest.approx(0.1 * sum(tokens))
    assert sum(tokens) > 0


def test_a_thought_that_names_the_action_is_counted() -> None:
    words = {2: "I shall go left</think>", 3: "no</think>", 4: "I shall go left</think>"}
    _, metrics = think(stage(ScriptedThinker(words)), usable=ROLLOUTS[:1])
    # Two thoughts at the first step; three at the second, which has a different action.
    assert metrics["thinking/alternatives_name_action"] == pytest.approx(2 / 5)


def test_the_limit_on_added_tokens_holds() -> None:
    for most in (0.5, 1.0):
        _, metrics = think(stage(max_added_tokens=most))
        assert metrics["thinking/added_tokens_ratio"] <= most


def test_diversity_fades_over_the_run() -> None:
    assert [think(stage(), training_step)[0]["a"].anneal for training_step in (0, 5, 10, 20)] == [1.0, 0.5, 0.0, 0.0]


def test_a_budget_moves_lambda_for_the_next_step() -> None:
    price = Multiplier(BudgetConfig(limit=0.5, unit="tokens", rate=0.1, proportional=0.0))
    made = stage(price=price)
    found, metrics = think(made)
    assert (found["a"].price, metrics["thinking/lambda"]) == (0.0, 0.0)
    made.end_step()
    spent = metrics["thinking/tokens_per_step"]
    assert made.current_lambda == pytest.approx(0.1 * (spent - 0.5))
    again, _ = think(made)
    assert again["a"].price == made.current_lambda
    other = stage(price=Multiplier(BudgetConfig(limit=0.5, unit="tokens", rate=0.1, proportional=0.0)))
    other.load_state_dict(made.state_dict())
    assert other.current_lambda == made.current_lambda
    assert metrics["thinking/tokens/budget"] == 0.5


def test_a_fixed_lambda_needs_no_budget() -> None:
    made = stage(budget={"price": 0.25})
    assert think(made)[0]["a"].price == 0.25
    assert set(think(made)[0]["a"].step_costs) == {0.0}
    charged = stage(budget={"price": 0.25}, subtract_thinking_cost=True)
    assert sum(think(charged)[0]["a"].step_costs) > 0.0
    made.end_step()
    assert made.state_dict() == {}


def test_what_comes_out_is_what_the_estimator_reads() -> None:
    found, _ = think(stage())
    annotated = [AnnotatedRollout(s, thinking=found[s.rollout.rollout_id]) for s in ROLLOUTS]
    result = Rlvcr(gate="signed")(annotated)
    credited = result.rollouts
    assert "thinking/advantage_used_3" in result.metrics
    assert [len(a) for a in credited[0].advantages] == [
        len(s.policy_logprobs["token_ids"]) for s in ROLLOUTS[0].steps if s.policy_logprobs
    ]
    first = credited[0].advantages[0]
    head_tokens = annotated[0].thinking.steps[0].head_tokens
    assert len(set(first[:head_tokens].tolist())) == 1
    assert first[0] != first[head_tokens]
    assert len(set(first[head_tokens:].tolist())) == 1
    said = annotated[0].thinking.steps[0].level_tokens
    assert 0 < said < head_tokens  # the level, and not the thought
    successful = Rlvcr(gate="success", success_score=min(s.score for s in ROLLOUTS))
    won = successful(annotated).rollouts[0].advantages[0]
    assert [won[0] == x for x in won.tolist()] == [True] * said + [False] * (len(won) - said)


def test_a_repeated_step_gives_the_same_result() -> None:
    (a, _), (b, _) = think(stage()), think(stage())
    one, two = (x["a"].steps[0].group for x in (a, b))
    assert [s.action_logprob for s in one.scores] == [s.action_logprob for s in two.scores]
