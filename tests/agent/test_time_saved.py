"""The time saved by direct answers, measured with the shipped model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from toolwise.agent.agent import RoutedAgent
from toolwise.agent.time_saved import time_saved
from toolwise.types import Task

SHORT = ["rollout.max_new_tokens=48"]
QUESTIONS = [Task(task_id=f"q{i}", prompt=[{"role": "user", "content": f"What is {i} + 1?"}]) for i in range(3)]


def test_it_is_measured_on_prompts_that_are_answered_directly(make_routed: Any) -> None:
    agent = RoutedAgent.load(make_routed(bias=[3.0, 0.0, 0.0]), tools=["calculator"], overrides=SHORT)
    saved = asyncio.run(time_saved(agent, QUESTIONS, limit=2))
    assert saved is not None
    assert saved.prompts == 2
    assert saved.direct_s > 0
    assert saved.with_tools_s > 0
    assert "saved per prompt (2 prompts" in saved.describe()


def test_where_nothing_is_answered_directly_nothing_is_saved(routed: Path) -> None:
    agent = RoutedAgent.load(routed, tools=["calculator"], overrides=SHORT)
    assert asyncio.run(time_saved(agent, QUESTIONS)) is None
