"""Budgets that nothing can meet are named before the first step."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolwise.config.schema import RunConfig
from toolwise.demo.tasks import write_rows
from toolwise.errors import ConfigError
from toolwise.rollout.scheduler import RolloutScheduler
from toolwise.training.budget_probe import describe_unmet, probe_budgets
from toolwise.training.run import Run, assemble
from toolwise.types import StopReason

CHEAP_OR_SHORT = np.array([[0.0, 40.0], [1.0, 10.0]])
"""Costs of two routes in calls and tokens: one saves calls, the other tokens."""


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"calls": 0.5, "tokens": 25.0}, ""),  # half of the prompts each: exactly met
        ({"calls": 1.0, "tokens": 10.0}, ""),
        ({"calls": 0.0, "tokens": 40.0}, ""),
        ({"calls": 1.0, "tokens": 9.0}, "the budget of 9 in 'tokens' cannot be met: the cheapest routes cost 10 "),
        ({"calls": 0.4, "tokens": 24.0}, "the budgets of 0.4 in 'calls' and 24 in 'tokens' cannot be met together"),
    ],
)
def test_budgets_of_two_routes_by_hand(limits: dict[str, float], said: str) -> None:
    found = describe_unmet([CHEAP_OR_SHORT] * 4, limits)
    assert found.startswith(said)
    assert bool(found) == bool(said)
    if said:
        assert "measured on 4 tasks before training" in found


def test_a_budget_within_two_standard_errors_is_not_called_impossible() -> None:
    tasks = [np.array([[cost]]) for cost in (0.0, 1.0, 2.0, 1.0)]  # 1 ± 0.41
    assert describe_unmet(tasks, {"tokens": 0.5}) == ""
    assert "cost 1 (" in describe_unmet(tasks, {"tokens": 0.1})
    assert describe_unmet([], {"tokens": 0.1}) == ""


def test_a_third_budget_is_not_named_where_two_exclude_each_other() -> None:
    tasks = [np.c_[CHEAP_OR_SHORT, [1.0, 1.0]]] * 4
    found = describe_unmet(tasks, {"calls": 0.1, "tokens": 12.0, "money": 5.0})
    assert "0.1 in 'calls' and 12 in 'tokens'" in found
    assert "money" not in found


def a_run(folder: Path, **router: object) -> Run:
    settings = {
        "model": {"path": "builtin:small"},
        "data": {"train": str(write_rows(folder / "train.jsonl", 8, seed=0, split="train")), "batch_size": 4},
        "tools": ["calculator", "search"],
        "rollout": {"n": 6, "max_new_tokens": 16},
        "multi_turn": {"max_turns": 2},
        "reward": {"function": "toolwise.demo.reward:small_world_reward", "sandbox": {"tier": "off"}},
        "router": {"enable": True, **router},
    }
    return assemble(RunConfig.model_validate(settings))


def probe(run: Run) -> str:
    return asyncio.run(probe_budgets(run, run.calibration.train))


def test_a_price_of_tokens_is_probed_by_rollouts(tmp_path: Path) -> None:
    prices = {"cost": {"calculator": 1.0, "search": 1.0, "tokens": 1.0}}
    run = a_run(tmp_path, prices=prices, budgets=[{"unit": "cost", "limit": 0.5}])
    found = probe(run)
    assert found.startswith("the budget of 0.5 in 'cost' cannot be met: the cheapest routes cost ")
    assert found.endswith("(measured on 8 tasks before training); raise the limit, or add a cheaper route")
    assert probe(a_run(tmp_path, prices=prices, budgets=[{"unit": "cost", "limit": 500.0}])) == ""


def test_a_route_that_failed_makes_no_budget_impossible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the cheapest one."""
    run = a_run(
        tmp_path,
        prices={"cost": {"calculator": 1.0, "search": 1.0, "tokens": 1.0}},
        budgets=[{"unit": "cost", "limit": 0.5}],
    )
    real = RolloutScheduler.roll_out

    async def without_answers(self: RolloutScheduler, decisions: Any, **how: Any) -> Any:
        rollouts = await real(self, decisions, **how)
        return [
            replace(rollout, stop_reason=StopReason.POLICY_FAULT) if decision.route == "ANSWER" else rollout
            for decision, rollout in zip(decisions, rollouts, strict=True)
        ]

    monkeypatch.setattr(RolloutScheduler, "roll_out", without_answers)
    assert probe(run) == ""


def test_a_budget_of_calls_needs_no_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run(tmp_path, budgets=[{"limit": 0.0}])
    monkeypatch.setattr(RolloutScheduler, "roll_out", None)
    assert probe(run) == ""


def test_the_lowest_random_budget_has_to_be_met(tmp_path: Path) -> None:
    routes = [{"name": "plain", "price": 0.7}, {"name": "look-up", "tools": ["search"], "price": 0.9}]
    drawn = {"low": 0.2, "high": 0.9, "bins": 3}
    with pytest.raises(ConfigError, match=r"the budget of 0\.2 in 'cost' cannot be met: .* cost 0\.7 "):
        a_run(tmp_path, routes=routes, budgets=[{"limit": 0.8}], random_budgets=drawn)
    a_run(tmp_path, routes=routes, budgets=[{"limit": 0.8}], random_budgets=drawn | {"low": 0.7})
    prices = {"cost": {"calculator": 1.0, "search": 1.0, "tokens": 1.0}}
    drawn = {"low": 0.5, "high": 500.0, "bins": 3}
    run = a_run(tmp_path, prices=prices, budgets=[{"unit": "cost", "limit": 400.0}], random_budgets=drawn)
    assert probe(run).startswith("the budget of 0.5 in 'cost' cannot be met: the cheapest routes cost ")
