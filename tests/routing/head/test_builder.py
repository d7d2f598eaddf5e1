"""A router from a configuration: every setting is passed on, and contradictions are refused early."""

from __future__ import annotations

from typing import Any

import pytest
from learner_cases import tiny_model

from toolwise.config.loader import build_config
from toolwise.config.schema import RunConfig
from toolwise.errors import ConfigError
from toolwise.learner.optimizer import Optimizer
from toolwise.messages import Message
from toolwise.routing.conditioning import Conditioning
from toolwise.routing.cost import RouteUsage, build_cost
from toolwise.routing.head.builder import build_head, check_router
from toolwise.routing.head.learner import RouterLearner
from toolwise.routing.prompts import EMPTY_WORDING
from toolwise.tools.builtin.calculator import CalculatorTool
from toolwise.tools.builtin.search.tool import SearchTool
from toolwise.types import Task

TOOLS = {"calculator": CalculatorTool({"price": 3.0}), "search": SearchTool({"price": 0.5})}


def config(n: int = 6, **router: Any) -> RunConfig:
    return build_config(
        RunConfig, {"router": {"enable": True, **router}, "rollout": {"n": n}, "seed": 5}, source="test"
    )


def test_every_setting_of_the_head_comes_from_the_configuration() -> None:
    budgets = [{"limit": 0.4}, {"limit": 1.0, "unit": "search"}]
    given = config(mode="value", hidden=8, pool="mean", layers=[0, -1], temperature=0.2, budgets=budgets)
    settings = build_head(given, tiny_model()).settings
    assert (settings.mode, settings.hidden, settings.pool, settings.layers) == ("value", 8, "mean", (0, -1))
    assert settings.units == ("cost", "search")
    assert (settings.width, settings.temperature, settings.seed) == (64, 0.2, 5)


def test_the_defaults_are_the_settings_that_docs_results_reports() -> None:
    s = config(budgets=[{"limit": 0.2}]).router
    assert (s.lr, s.lr_schedule, s.min_lr_ratio, s.average_last) == (3e-3, "cosine", 0.1, 0.25)
    assert (s.entropy_coef, s.final_entropy_coef) == (0.3, 0.03)
    assert (s.hidden, s.sampling_of(3), s.hard) == (64, "stratified", True)
    assert (s.budgets[0].rate, s.budgets[0].proportional, s.budgets[0].every) == (0.1, 1.0, 1)


def test_an_optimizer_of_its_own_or_the_actors() -> None:
    model = tiny_model()
    for which in ("own", "actor"):
        given = config(optimizer=which)
        head = build_head(given, model)
        actor_optimizer = Optimizer([*model.parameters(), *head.parameters()], given.actor, total_steps=1)
        made = RouterLearner(model, head, given, actor_optimizer=actor_optimizer)
        assert (made.optimizer is actor_optimizer) == (which == "actor")


def test_costs_are_the_tools_own_or_as_configured() -> None:
    usage = RouteUsage.of({"search": 2, "calculator": 1}, {})
    assert build_cost(config().router, TOOLS)(usage) == {"cost": 4.0}
    assert build_cost(config(cost="calls", cost_kwargs={"price": 2.0}).router, TOOLS)(usage)["cost"] == 6.0
    assert build_cost(config(cost="any").router, TOOLS)(usage) == {"cost": 1.0}
    with pytest.raises(ConfigError, match="cost_kwargs"):
        build_cost(config(cost_kwargs={"price": 2.0}).router, TOOLS)


def test_conditioning_is_as_configured() -> None:
    made = Conditioning(config(conditioning="append", hard=False, wording="silent", families={"x": "search"}).router)
    assert made.wording == EMPTY_WORDING
    assert made.families == {"x": "SEARCH"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"n": 2}, "stratified over 3 routes but rollout.n is 2"),
        ({"train_actor": False, "backbone": "top"}, "use frozen, or train the actor"),
        ({"mode": "value", "label_coef": 0.1}, "set label_coef and warm_start_epochs to 0"),
        ({"warm_start_epochs": 1}, "no task has a label"),
    ],
)
def test_contradictions_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_router(config(**given), [Task(task_id="t", prompt=[Message(role="user", content="?")])])


def test_a_missing_layer_is_refused() -> None:
    with pytest.raises(ConfigError, match="has layer 7, but the model has layers 0 to 1"):
        build_head(config(layers=[7]), tiny_model())


def test_a_frozen_actor_without_a_router_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing would be trained"):
        config(enable=False, train_actor=False)
