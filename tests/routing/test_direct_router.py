"""The router used without routing."""

from __future__ import annotations

from itertools import product

from toolwise.messages import Message
from toolwise.routing.direct_router import DirectRouter
from toolwise.types import Task

TASKS = [Task(task_id=f"t{i}", prompt=[Message(role="user", content=str(i))], tools=["a"]) for i in range(5)]


def test_prompts_and_tools_are_unchanged() -> None:
    decisions = DirectRouter(3).decide(TASKS, 8, 2)
    for task, decision in zip(TASKS, decisions, strict=True):
        assert decision.task is task
        assert decision.prompt is task.prompt
        assert decision.n == 8
        assert decision.tools is None
        assert decision.route is None
        assert decision.log_prob is None


def test_groups_are_fresh_for_every_prompt_step_and_label() -> None:
    router = DirectRouter(0)
    twice = [TASKS[0], TASKS[0]]
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
        for decision in DirectRouter(run).decide(TASKS, 2, step)
    ]
    assert len(set(seeds)) == len(seeds)
    again = DirectRouter(4).decide(TASKS[::-1], 7, 49)
    assert [decision.seed for decision in again] == seeds[-5:]


def test_a_repeated_task_gets_another_seed() -> None:
    router = DirectRouter(2)
    labels = ("step", "step-more", "step-more-more", "eval")
    seeds = [d.seed for step in range(20) for label in labels for d in router.decide(TASKS, 2, step, label=label)]
    assert len(set(seeds)) == len(seeds)


def test_it_learns_nothing_and_keeps_nothing() -> None:
    router = DirectRouter(1)
    assert router.learn([]) == {}
    router.load_state_dict(router.state_dict())
    assert router == DirectRouter(1)
