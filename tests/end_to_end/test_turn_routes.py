"""A route for every turn, from a TOML file to training, checkpoints, resuming, evaluation, exports and answers."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import toolwise
from toolwise.agent.events import RouteChosen
from toolwise.demo.tasks import write_rows
from toolwise.errors import ToolwiseError
from toolwise.training.records import read_records

torch.set_num_threads(1)
Cli = Callable[..., Any]
ROUTES = {"ANSWER", "SEARCH-FAMILY", "CALCULATE-FAMILY"}
SETTINGS = """
name = "turns"
tools = ["calculator", "search"]
[model]
path = "builtin:small"
[data]
train = "train.jsonl"
val = "val.jsonl"
batch_size = 2
[rollout]
n = 4
max_new_tokens = 32
[multi_turn]
max_turns = 3
[reward]
function = "toolwise.demo.reward:small_world_reward"
sandbox = { trusted = ["toolwise.demo.reward"] }
[algorithm]
zero_std_groups = "keep"
[trainer]
total_steps = 2
save_every = 1
console = false
[validation]
before = false
[router]
enable = true
every = "turn"
cost = "calls"
calibration = 0.25
calibration_rollouts = 4
calibration_passes = 3
[[router.budgets]]
limit = 0.3
"""


def write_project(folder: Path, toml: str = SETTINGS) -> Path:
    write_rows(folder / "train.jsonl", 256, seed=0, split="train")
    write_rows(folder / "val.jsonl", 3, seed=0, split="heldout")
    (folder / "turns.toml").write_text(toml, encoding="utf-8")
    return folder / "turns.toml"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cli: Cli) -> Path:
    folder = tmp_path_factory.mktemp("turns")
    ended = cli("train", write_project(folder), "--out", folder / "run")
    assert ended.status == 0, ended.err
    return folder / "run"


def test_every_turn_has_a_route_in_the_records(trained: Path) -> None:
    records = [r for file in sorted((trained / "rollouts").glob("step-*.jsonl")) for r in read_records(file)]
    assert len(records) == 16
    for record in records:
        assert len(record.turn_routes) == len(record.steps)
        assert {turn["route"] for turn in record.turn_routes} <= ROUTES
        assert all(turn["log_prob"] < 0 and len(turn["logits"]) == 3 for turn in record.turn_routes)
        assert all(turn["advantage"] is not None for turn in record.turn_routes)
        assert record.router_token_level_rewards is not None
        assert record.router_log_prob == pytest.approx(sum(turn["log_prob"] for turn in record.turn_routes))
        assert record.router_logits == [turn["logits"] for turn in record.turn_routes]
        assert record.router_advantages == [turn["advantage"] for turn in record.turn_routes]
        assert record.router_returns is not None
        assert len(record.router_returns) == len(record.steps)
        assert record.router_returns[0] == pytest.approx(record.router_token_level_rewards)
    assert any(len(record.turn_routes) > 1 for record in records)
    assert any("forbidden_tool" in record.failed_calls for record in records)
    for record in records:  # calls that the turn's route refused are free
        assert record.cost == sum(record.calls.values()) - record.failed_calls.get("forbidden_tool", 0)
    # One group per prompt, whatever its routes: the actor compares all rollouts of a prompt.
    assert {len([r for r in records if r.group_id == group]) for group in {r.group_id for r in records}} == {4}
    assert any(record.trained_on for record in records)


def test_notes_are_appended_and_never_change_what_was_read(trained: Path) -> None:
    """The notes of the shipped wording are in the messages; without them the conversation is the original one."""
    records = read_records(trained / "rollouts" / "step-000001.jsonl")
    for record in records:
        first = str(record.messages[0]["content"])
        original = record.original_messages[0].content or ""
        assert first.startswith(original)
        assert len(first) > len(original)


def test_it_is_calibrated_evaluated_and_asked(trained: Path, cli: Cli) -> None:
    summary = json.loads((trained / "summary.json").read_text("utf-8"))
    assert summary["calibration"]["rolled_out"] == 4
    stored = json.loads((trained / "checkpoints" / "step-000002" / "model" / "router.json").read_text("utf-8"))
    assert stored["router"]["every"] == "turn"
    assert len(stored["turn_budget"]["shifts"]) == 2
    ended = cli("eval", trained)
    assert ended.status == 0, ended.err
    asked = [cli("run", trained, "How many mills does Alder have?", "--json") for _ in range(2)]
    answers = [json.loads(each.out) for each in asked]
    assert answers[0]["route"] == answers[1]["route"]
    assert set(answers[0]["route"].split(" > ")) <= ROUTES
    assert set(answers[0]["odds"]) == ROUTES
    refused = cli("eval", trained, "--budgets", "0,1")
    assert refused.status != 0
    assert "chooses at every turn" in refused.err


def test_an_export_answers_as_the_run_does(trained: Path, tmp_path: Path, cli: Cli) -> None:
    ended = cli("export", trained, "--out", tmp_path / "agent")
    assert ended.status == 0, ended.err
    question = "How many mills does Alder have?"
    run, exported = toolwise.load(trained), toolwise.load(tmp_path / "agent")
    assert exported.ask(question).route == run.ask(question).route
    events = [event for event in exported.stream(question) if isinstance(event, RouteChosen)]
    assert " > ".join(event.route for event in events) == run.ask(question).route
    forced = exported.ask(question, route="answer")
    assert set(forced.route.split(" > ")) == {"ANSWER"}
    assert forced.cost == 0.0
    assert exported.ask(question, cap=0.0).cost == 0.0
    with pytest.raises(ToolwiseError, match="calibrated for its trained budget"):
        exported.ask(question, budget=0.7)


@pytest.mark.long
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, cli: Cli) -> None:
    config = write_project(tmp_path, "deterministic = true" + SETTINGS)
    ended = cli("train", config, "--out", tmp_path / "run")
    assert ended.status == 0, ended.err
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000002")
    for file in (tmp_path / "run" / "rollouts").glob("step-000002*"):
        file.unlink()
    ended = cli("resume", tmp_path / "run")
    assert ended.status == 0, ended.err
    again, whole = (read_records(tmp_path / name / "rollouts" / "step-000002.jsonl") for name in ("run", "whole"))
    assert again == whole
    calibrations = [
        json.loads((tmp_path / name / "checkpoints" / "step-000002" / "model" / "router.json").read_text("utf-8"))
        for name in ("run", "whole")
    ]
    assert calibrations[0] == calibrations[1]


@pytest.mark.long
def test_questions_are_answered_at_once(trained: Path) -> None:
    agent = toolwise.load(trained)

    async def ask_all() -> list[Any]:
        return await asyncio.gather(*(agent.answer(f"What is {i} + 4?") for i in range(12)))

    together = asyncio.run(ask_all())
    assert [a.route for a in together] == [agent.ask(f"What is {i} + 4?").route for i in range(12)]


@pytest.mark.long
def test_a_frozen_actor_whose_calls_are_masked_never_begins_one(tmp_path: Path, cli: Cli) -> None:
    config = write_project(tmp_path)
    masked = ("--set", "router.train_actor=false", "--set", "router.turn_mask=decode", "--set", "router.wording=silent")
    ended = cli("train", config, "--out", tmp_path / "run", *masked)
    assert ended.status == 0, ended.err
    records = [r for file in (tmp_path / "run" / "rollouts").glob("step-*.jsonl") for r in read_records(file)]
    for record in records:
        replies = [m for m in record.messages if m["role"] == "assistant"]
        for turn, reply in zip(record.turn_routes, replies, strict=True):
            assert turn["route"] != "ANSWER" or not reply.get("tool_calls")


@pytest.mark.long
def test_turns_of_a_text_world_are_routed_by_notes_and_prices(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "world.py").write_text(WORLD, encoding="utf-8")
    (tmp_path / "text.toml").write_text(TEXT_WORLD, encoding="utf-8")
    rows = [{"prompt": "Say a number.", "task_id": str(i)} for i in range(4)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    ended = cli("train", tmp_path / "text.toml", "--out", tmp_path / "run")
    assert ended.status == 0, ended.err
    records = read_records(tmp_path / "run" / "rollouts" / "step-000001.jsonl")
    assert {len(record.turn_routes) for record in records} == {2}
    assert {turn["route"] for record in records for turn in record.turn_routes} == {"quick", "careful"}
    metrics = json.loads((tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()[0])
    careful = [sum(turn["route"] == "careful" for turn in record.turn_routes) for record in records]
    assert metrics["router/cost/mean"] == pytest.approx(0.5 * sum(careful) / len(careful))


WORLD = '''
from toolwise import BaseEnv


class Two(BaseEnv):
    """Asks twice; a turn scores by the length of what was said."""

    def __init__(self, task=None):
        self.turn = 0

    async def reset(self):
        return "Go on."

    async def step(self, action):
        self.turn += 1
        return "And again.", min(len(str(action)), 50) / 100, self.turn == 2, {}
'''
TEXT_WORLD = """
name = "text"
[model]
path = "builtin:small"
[data]
train = "train.jsonl"
batch_size = 2
[env]
name = "world.py:Two"
[rollout]
n = 4
max_new_tokens = 16
[reward]
function = "env"
[algorithm]
zero_std_groups = "keep"
[trainer]
total_steps = 1
console = false
[router]
enable = true
every = "turn"
[[router.routes]]
name = "quick"
max_new_tokens = 8
[[router.routes]]
name = "careful"
note = "Take your time."
price = 0.5
[[router.budgets]]
limit = 0.5
"""
