"""Settings that another one leaves without effect are named."""

from __future__ import annotations

from typing import Any

import pytest

from toolwise.config.schema import RunConfig
from toolwise.training.diagnosis.ignored_settings import ignored_settings


@pytest.mark.parametrize(
    ("settings", "names", "reason"),
    [
        (
            {"router": {"budgets": [{"limit": 0.5}], "max_cost": 0.0}},
            "router.budgets, router.max_cost",
            "enable is false",
        ),
        ({"router": {"name": "a.b:C", "hidden": 8}}, "router.hidden", "a router of your own"),
        ({"rollout": {"vllm": {"base_url": "http://127.0.0.1:1"}}}, "rollout.vllm.base_url", "engine is 'toolwise'"),
        ({"env": {"kwargs": {"size": 3}}}, "env.kwargs", "env.name is 'tools'"),
        ({"env": {"interaction_kwargs": {"a": 1}}}, "env.interaction_kwargs", "env.interaction is empty"),
        ({"model": {"path": "builtin:small", "revision": "v2"}}, "model.revision", "the model is builtin:small"),
        ({"validation": {"every": 5}}, "validation.every", "set data.val"),
    ],
)
def test_each_is_named_with_its_reason(settings: dict[str, Any], names: str, reason: str) -> None:
    finding = ignored_settings(RunConfig.model_validate(settings), has_held_out=False)
    assert finding is not None
    assert f"settings without effect: {names} (since " in finding.says
    assert reason in finding.says


def test_a_router_is_calibrated_in_validations_without_held_out_tasks() -> None:
    settings = {"router": {"enable": True}, "validation": {"do_sample": True, "every": 5}}
    assert ignored_settings(RunConfig.model_validate(settings), has_held_out=False) is None


def test_several_are_one_finding() -> None:
    settings = {"router": {"max_cost": 1.0}, "env": {"kwargs": {"size": 3}}}
    finding = ignored_settings(RunConfig.model_validate(settings), has_held_out=True)
    assert finding is not None
    assert "router.max_cost (since router.enable is false); env.kwargs (since" in finding.says


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"router": {"enable": True, "budgets": [{"limit": 0.5}]}},
        {"router": {"prices": {"cost": {"*": 1.0}}, "families": {"x": "OTHER"}}},
        {"router": {"name": "a.b:C", "kwargs": {"a": 1}}},
        {"rollout": {"engine": "vllm", "vllm": {"base_url": "http://127.0.0.1:1"}}},
        {"env": {"name": "gsm8k", "kwargs": {"a": 1}}},
        {"validation": {"every": 5}},
    ],
)
def test_what_has_an_effect_is_not(settings: dict[str, Any]) -> None:
    assert ignored_settings(RunConfig.model_validate(settings), has_held_out=True) is None
