"""A user's router: how it is created, and what its errors become."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar

import pytest
import torch

from toolwise import Message, RouteDecision, Router, ScoredRollout, Task
from toolwise.config.router import RouterConfig
from toolwise.errors import ConfigError, RouterError
from toolwise.routing.conditioning import Conditioning
from toolwise.routing.routers import DirectRouter, build_user_router
from toolwise.tools.catalog import build_tools

TASKS = [Task(task_id=name, prompt=[Message(role="user", content="?")]) for name in "abb"]


class Mine(Router):
    def __init__(self, seed: int = 0, tools: Any = (), scale: int = 1) -> None:
        self.inner, self.tools, self.scale = DirectRouter(seed), tools, scale

    def decide(
        self, tasks: Sequence[Task], n: int, step: int, *, label: str = "step", explore: bool = True
    ) -> list[RouteDecision]:
        return self.inner.decide(tasks, n, step, label=label, explore=explore)


class Plain:
    """Every method, without the base class."""

    decide = Mine.decide
    inner = DirectRouter(1)
    learn = Router.learn
    warm_start = Router.warm_start
    overspend = Router.overspend
    save = load = load_state_dict = Router.load_state_dict
    state_dict = Router.state_dict


def build(source: Any, tools: Any = ("look",), **kwargs: Any) -> Any:
    return build_user_router(source, kwargs, provided={"seed": 7, "tools": tools, "policy": None}, tools=tools)


@pytest.mark.parametrize("source", [Mine, Mine(), Plain, lambda: Mine(), lambda seed: Mine(seed)])
def test_it_is_a_class_a_function_or_an_object(source: Any) -> None:
    router = build(source)
    assert len(router.decide(TASKS, 4, 0)) == 3
    assert (router.learn([]), router.overspend([]), router.state_dict()) == ({}, None, {})


def test_a_class_gets_what_it_has_parameters_for_and_its_options() -> None:
    router = build(Mine, scale=3).router
    assert (router.inner.seed, router.tools, router.scale) == (7, ("look",), 3)


def fails() -> Router:
    raise OSError("no file")


@pytest.mark.parametrize(
    ("source", "kwargs", "message"),
    [
        (fails, {}, "router: fails could not be created: OSError: no file"),
        (int, {}, "int is not a router: subclass toolwise.Router and define decide"),
        (Router, {}, "Router could not be created: TypeError"),
        (Mine, {"sclae": 3}, "has no option 'sclae'; did you mean 'scale'"),
        (Mine, {"seed": 3}, "has no option 'seed'"),
        (Mine(), {"scale": 3}, "Mine is an object, not a class; set scale where it is created"),
    ],
)
def test_what_cannot_be_one_is_refused(source: Any, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(source, **kwargs)


class Edits(Mine):
    """Changes the decisions that it returns."""

    def __init__(self, edit: Any) -> None:
        super().__init__()
        self.edit = edit

    def decide(self, *arguments: Any, **options: Any) -> Any:
        return self.edit(super().decide(*arguments, **options))

    def learn(self, scored: Sequence[ScoredRollout]) -> Any:
        return self.edit({})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: 1 / 0, "decide failed: ZeroDivisionError"),
        (lambda d: None, "returned None: return a list of toolwise.RouteDecision"),
        (lambda d: [*d, "x"], "return a list of toolwise.RouteDecision"),
        (lambda d: [], "decisions for 0 prompts, but there are 3 tasks"),
        (lambda d: d[:2], "decisions for 2 prompts, but there are 3 tasks"),
        (lambda d: [*d, replace(d[0], group_id="new")], "decisions for 4 prompts, but there are 3 tasks"),
        (lambda d: [d[0], d[0], d[2]], "decisions for 2 prompts"),
        (lambda d: [*d, d[0]], "used a group_id twice"),
        (lambda d: [replace(x, n=-1) for x in d], "a decision with n = -1: give each at least one rollout"),
        (lambda d: [replace(x, n=4.0) for x in d], "a decision with n = 4.0"),
        (lambda d: [replace(x, n=3) for x in d], "planned 3 rollouts for 'step-0/0/a': each task has 4 in all"),
        (lambda d: [replace(x, route="to the moon\n") for x in d], r"returned the route 'to the moon\\n'"),
        (lambda d: [replace(x, route=3) for x in d], "returned the route 3: use a short name"),
        (lambda d: [replace(x, tools=("lok",)) for x in d], "offers the unknown tool 'lok'; there are look"),
        (lambda d: [replace(x, task=None) for x in d], "with task = None: use a value of type Task"),
        (lambda d: [replace(x, group_id=7) for x in d], "with group_id = 7: use a value of type str"),
        (lambda d: [replace(x, seed="a") for x in d], "with seed = 'a': use a value of type int"),
        (lambda d: [replace(x, prompt="?") for x in d], "a prompt that is not a list of toolwise.Message"),
    ],
)
def test_decisions_that_cannot_be_rolled_out_are_one_line(edit: Any, message: str) -> None:
    with pytest.raises(RouterError, match=message) as caught:
        build(Edits(edit)).decide(TASKS, 4, 0)
    assert str(caught.value).startswith("router Edits: decide ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("metrics", [None, {"loss": "high"}, [1.0]])
def test_metrics_are_numbers(metrics: Any) -> None:
    with pytest.raises(RouterError, match=r"learn returned .*: return names and numbers"):
        build(Edits(lambda _: metrics)).learn([])


def test_an_error_names_the_line_of_the_file() -> None:
    with pytest.raises(RouterError, match=rf"decide failed: ZeroDivisionError: division by zero \({__file__}:\d+\)"):
        build(Edits(lambda d: 1 / 0)).decide(TASKS, 4, 0)


def test_a_call_that_does_not_return_is_ended() -> None:
    router = build_user_router(Edits(lambda _: time.sleep(60)), {}, provided={}, tools=None, limit_s=0.02)
    told = rf"^router Edits: learn took longer than router.timeout_s = 0.02 \({__file__}:\d+\)$"
    with pytest.raises(RouterError, match=told):
        router.learn([])


@pytest.mark.parametrize("share", ["much", float("nan"), [0.1]])
def test_overspending_is_a_number(share: Any) -> None:
    class Spends(Mine):
        def overspend(self, scored: Sequence[ScoredRollout]) -> Any:
            return share

    with pytest.raises(RouterError, match=r"Spends: overspend returned .*: return a number or None"):
        build(Spends).overspend([])


def test_a_saved_state_does_not_change_any_more() -> None:
    class Counts(Mine):
        state: ClassVar[dict[str, Any]] = {"seen": [1], "weights": torch.ones(2)}

        def state_dict(self) -> dict[str, Any]:
            return self.state

    saved = build(Counts).state_dict()
    Counts.state["seen"].append(2)
    Counts.state["weights"] += 1
    assert (saved["seen"], saved["weights"].tolist()) == ([1], [1.0, 1.0])


def test_its_state_can_be_saved() -> None:
    class Keeps(Mine):
        def state_dict(self) -> dict[str, Any]:
            return {"rate": 0.5, "inner": self.inner}

    with pytest.raises(RouterError, match=r"Keeps: cannot be saved in a checkpoint: state_dict\.inner"):
        build(Keeps).state_dict()


def test_tools_of_an_environment_are_not_known_here() -> None:
    router = build(Edits(lambda d: [replace(x, tools=("open_door",), route="DOOR") for x in d]), tools=None)
    assert router.decide(TASKS, 1, 0, explore=False)[0].tools == ("open_door",)


QUESTIONS = [Task(task_id=f"t{i}", prompt=[Message(role="user", content=str(i))], tools=["a"]) for i in range(5)]


def test_prompts_and_tools_are_unchanged() -> None:
    decisions = DirectRouter(3).decide(QUESTIONS, 8, 2)
    for task, decision in zip(QUESTIONS, decisions, strict=True):
        assert decision.task is task
        assert decision.prompt is task.prompt
        assert decision.n == 8
        assert decision.tools is None
        assert decision.route is None
        assert decision.log_prob is None


def test_groups_are_fresh_for_every_prompt_step_and_label() -> None:
    router = DirectRouter(0)
    twice = [QUESTIONS[0], QUESTIONS[0]]
    ids = [
        decision.group_id
        for step, label in product(range(4), ("step", "step-more", "eval"))
        for decision in router.decide(twice, 2, step, label=label)
    ]
    assert len(set(ids)) == len(ids) == 24


def test_seeds_do_not_depend_on_the_tasks_or_how_many() -> None:
    seeds = [
        decision.seed
        for run, step in product(range(5), range(50))
        for decision in DirectRouter(run).decide(QUESTIONS, 2, step)
    ]
    assert len(set(seeds)) == len(seeds)
    again = DirectRouter(4).decide(QUESTIONS[::-1], 7, 49)
    assert [decision.seed for decision in again] == seeds[-5:]


def test_a_repeated_task_gets_another_seed() -> None:
    router = DirectRouter(2)
    labels = ("step", "step-more", "step-more-more", "eval")
    seeds = [d.seed for step in range(20) for label in labels for d in router.decide(QUESTIONS, 2, step, label=label)]
    assert len(set(seeds)) == len(seeds)


def test_it_learns_nothing_and_keeps_nothing() -> None:
    router = DirectRouter(1)
    assert router.learn([]) == {}
    router.load_state_dict(router.state_dict())
    assert router == DirectRouter(1)


def test_calls_cost_what_the_run_says() -> None:
    router = RouterConfig.model_validate({"prices": {"usd": {"search": 0.25, "*": 2.0}}})
    price_of = Conditioning(router, build_tools(["search", "calculator"])).price_calls
    [decision] = DirectRouter(1, price_of).decide([Task(task_id="t", prompt=[])], 2, 0)
    assert decision.price_calls is not None
    assert decision.price_calls({"search": 2, "calculator": 1}) == 2.5
    assert DirectRouter(1).decide([Task(task_id="t", prompt=[])], 2, 0)[0].price_calls is None
