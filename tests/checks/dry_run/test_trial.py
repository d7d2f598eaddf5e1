"""A trial runs the parts of a training step without changing them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from toolwise.checks.dry_run.command import find_problems
from toolwise.checks.dry_run.trial import try_rollouts, try_update
from toolwise.config.schema import load_config
from toolwise.messages import Message
from toolwise.training.run import Run, assemble
from toolwise.types import EvaluateResult, Rollout, ScoredRollout, StepData, StopReason, Task, Usage


@pytest.fixture
def routed(tmp_path: Path, make_config: Callable[..., Path]) -> Iterator[Run]:
    """A run with a router that would begin with a warm start."""
    router = {"enable": True, "warm_start_epochs": 2, "label_coef": 0.1}
    config = make_config(tmp_path, {"router": router, "rollout": {"n": 6, "max_new_tokens": 24}})
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    for row in rows:
        row.setdefault("extra_info", {})["router_target_action"] = "ANSWER"
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    run = assemble(load_config(config))
    yield run
    run.close()


def test_no_weight_and_no_optimiser_state_changes(routed: Run) -> None:
    router = routed.router.model
    weights = [*routed.learner.model.parameters(), *router.head.parameters()]
    before = [weight.detach().clone() for weight in weights]

    async def work() -> Any:
        trial = await try_rollouts(routed)
        return trial, await try_update(routed, trial.scored)

    trial, update = asyncio.run(work())
    assert len(trial.scored) == 12
    assert update.seconds >= update.gradient_s > 0
    assert update.tokens > 0
    assert all(torch.equal(a, b) for a, b in zip(before, weights, strict=True))
    assert all(weight.grad is None for weight in weights)
    assert routed.learner.optimizer.adamw.state_dict()["state"] == {}
    assert (routed.learner.version, routed.progress.step) == (0, 0)


def scored(
    prompt: str, stop: StopReason = StopReason.ANSWERED, fault: str | None = None, **step_info: Any
) -> ScoredRollout:
    told = {"prompt_ids": list(prompt.encode()), "token_ids": [1], "logprobs": [0.0], "finish_reason": "stop"}
    step = StepData(
        system_step_index=0,
        observation_data="",
        action_taken={},
        resulting_messages_history=[],
        policy_logprobs=told,
        step_info=step_info,
    )
    task = Task(task_id="t", prompt=[])
    replies = [Message(role="tool", content="error: look_up failed: OSError: no index", name="look_up")]
    rollout = Rollout("r", "g", 0, 0, task, None, (step,), replies, stop, Usage(), fault=fault)
    return ScoredRollout(rollout, EvaluateResult(score=1.0), (step,))


def fake_run() -> Any:
    """As much of a run as the checks look at."""
    config = SimpleNamespace(
        env=SimpleNamespace(name="tools"),
        reward=SimpleNamespace(max_error_rate=0.2),
        rollout=SimpleNamespace(max_new_tokens=8),
    )
    return SimpleNamespace(
        config=config,
        scoring=SimpleNamespace(rewards=SimpleNamespace(name="score")),
        scheduler=SimpleNamespace(tools={"look_up": None}),
        chat=SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids: bytes(ids).decode())),
    )


def test_a_prompt_that_never_names_the_tools_is_a_problem() -> None:
    (problem,) = find_problems(fake_run(), [scored("user: what is a nile?")]).problems
    assert "names none of the tools (look_up): the chat template ignores `tools`" in problem


def test_a_prompt_that_names_them_is_none() -> None:
    assert find_problems(fake_run(), [scored("Tools: look_up(word). user: what is a nile?")]).problems == []


@pytest.mark.parametrize(
    ("rollouts", "fails"),
    [
        ([{"exception": 1}], True),
        ([{"timeout": 1}], False),  # one late call may be a cold start
        ([{"timeout": 1}, {"timeout": 1}], True),
        ([{"bad_arguments": 1}], False),
        ([{"exception": 1}, {}], False),
    ],
)
def test_a_tool_that_raises_on_its_only_call_is_a_problem(rollouts: list[dict[str, int]], fails: bool) -> None:
    found = find_problems(fake_run(), [scored("look_up", calls={"look_up": 1}, failed_calls=f) for f in rollouts])
    said = [f"the tool look_up failed on every call ({len(rollouts)}): look_up failed: OSError: no index"]
    assert found.problems == (said if fails else [])
