"""Whole runs with a learned router: the wheel turns with several groups a prompt, and everything survives a stop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from selection import quick_first

from toolwise.agent.export import export_model
from toolwise.config.schema import RunConfig
from toolwise.data import load_tasks
from toolwise.demo.tasks import write_rows
from toolwise.policies.scripted import ScriptedPolicy
from toolwise.routing.families import MIXED, Family, RouteAction
from toolwise.routing.head.head import load_head
from toolwise.routing.labels.label_files import Label, write_labels
from toolwise.routing.learned_router import LearnedRouter, target_of
from toolwise.training import checkpoint
from toolwise.training.loop import StepResult, score, train_step
from toolwise.training.rollout_setup import build_scheduler
from toolwise.training.run import Run, assemble
from toolwise.training.trainer import Training
from toolwise.types import EvaluateResult, ScoredRollout

torch.set_num_threads(1)


def config(tmp_path: Path, *, steps: int = 2, sections: dict[str, Any] | None = None, **router: Any) -> RunConfig:
    data = tmp_path / "tasks.jsonl"
    if not data.exists():
        write_rows(data, 12, seed=0, split="train")
    return RunConfig.model_validate(
        {
            "data": {"train": str(data), "batch_size": 3},
            "tools": ["calculator", "search"],
            "rollout": {"n": 6, "max_new_tokens": 40},
            "multi_turn": {"max_turns": 4},
            "reward": {
                "function": "toolwise.demo.reward:small_world_reward",
                "kwargs": {"price_per_call": 0.0},
                "sandbox": {"tier": "off"},
            },
            "actor": {"lr": 1e-4},
            "algorithm": {"zero_std_groups": "keep"},
            "trainer": {"total_steps": steps, "save_every": 1, "console": False},
            "router": {"enable": True, "lr": 0.05, "wording": "silent", "budgets": [{"limit": 0.1}], **router},
            **(sections or {}),
        }
    )


def turn(run: Run, count: int = 1) -> StepResult:
    for _ in range(count):
        last = asyncio.run(train_step(run))
    return last


def weights(run: Run) -> list[torch.Tensor]:
    return [w.detach().clone() for w in run.learner.model.parameters()]


def test_a_step_has_a_group_for_each_prompt_and_route(tmp_path: Path) -> None:
    run = assemble(config(tmp_path))
    assert isinstance(run.router, LearnedRouter)
    made = turn(run)
    groups: dict[str, list[ScoredRollout]] = {}
    for s in made.scored:
        groups.setdefault(s.rollout.group_id, []).append(s)
    assert len(made.scored) == 18
    assert [len(members) for members in groups.values()] == [2] * 9
    assert all(len({s.rollout.route for s in members}) == 1 for members in groups.values())
    assert made.metrics["router/prompts"] == 3
    assert made.metrics["actor/updates"] == 1
    assert {"router/cost/lambda", "router/cost/mean", "router/cost/gap", "router/r_task", "router/entropy"} <= set(
        made.metrics
    )


def test_answers_never_call_and_families_call_their_own(tmp_path: Path) -> None:
    made = turn(assemble(config(tmp_path)), 2)
    wrong = {"ANSWER": {"search", "calculator"}, "SEARCH-FAMILY": {"calculator"}, "CALCULATE-FAMILY": {"search"}}
    for s in made.scored:
        served = {name for step in s.steps for name in step.step_info.get("calls", {})}
        failed = sum(s.rollout.usage.failed_calls.values())
        assert not (served & wrong[s.rollout.route or ""]) or failed  # a forbidden call is an error that it reads


def test_a_forbidden_call_is_an_error_that_the_model_reads(tmp_path: Path) -> None:
    """Under words that only follow, every tool is still shown: what refuses it is the world."""
    run = assemble(config(tmp_path, conditioning="append", wording=""))
    assert isinstance(run.router, LearnedRouter)
    [decision] = [d for d in run.router.decide(run.batches.tasks[:1], 3, 0) if d.route == "CALCULATE-FAMILY"]
    said = '<tool_call>\n{"name": "search", "arguments": {"query": "bridges"}}\n</tool_call>'
    scheduler = build_scheduler(run.config, ScriptedPolicy([said, "none"]), run.scheduler.tools)
    [rollout] = asyncio.run(scheduler.roll_out([decision], do_sample=True))
    [read] = [m.content for m in rollout.messages if m.role == "tool"]
    assert read == "error: search is not to be used for this request; tools: calculator"
    assert (dict(rollout.usage.failed_calls), rollout.usage.cost) == ({"forbidden_tool": 1}, 0.0)
    scored = asyncio.run(score(run, [rollout]))
    assert run.router.learn(scored)["router/cost/mean"] == 0.0


def long_rows(file: Path, every: int = 1) -> Path:
    """Tasks of which one in `every` does not fit the model's context."""
    rows = [
        {"prompt": "word " * 5000 * (i % every == 0) + f"What is {i} + 1?", "ground_truth": i + 1} for i in range(6)
    ]
    rows = [{**row, "router_target_action": "ANSWER"} for row in rows]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


@pytest.mark.long
@pytest.mark.parametrize("every", [1, 3])
def test_a_prompt_that_the_router_cannot_read_is_a_typed_outcome(tmp_path: Path, every: int) -> None:
    rows = str(long_rows(tmp_path / "long.jsonl", every))
    reward = {"function": "toolwise.demo.reward:small_world_reward", "sandbox": {"tier": "off"}}
    sections = {"data": {"train": rows, "val": rows, "batch_size": 3}, "reward": reward}
    sections["rollout"] = {"n": 3, "max_new_tokens": 4}
    run = assemble(config(tmp_path, steps=2, conditioning="append", warm_start_epochs=1, sections=sections))
    result = asyncio.run(Training(run, tmp_path / "run", resume=False).run_training())
    assert "prompt_too_long" in [finding["kind"] for finding in result.summary["diagnosis"]]
    assert (result.summary["after"]["n"], result.summary["after"]["prompt_too_long"]) == (6, 6 // every)
    records = [json.loads(s) for f in (tmp_path / "run/rollouts").glob("step-*.jsonl") for s in f.open()]
    assert len(records) == 18
    assert sum(r["stop_reason"] == "prompt_too_long" for r in records) == 18 // every
    for metrics in map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines()):
        if "router/prompts" in metrics:
            assert metrics["router/prompts"] + metrics["router/rollouts_lost"] / 3 == 3


def test_labels_of_a_file_are_joined_to_the_tasks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sections = {"data": {"train": str(tmp_path / "tasks.jsonl"), "val": str(tmp_path / "tasks.jsonl"), "batch_size": 3}}
    config(tmp_path)  # writes the tasks
    names = [task.task_id for task in load_tasks(tmp_path / "tasks.jsonl")]
    told = [
        Label(names[0], RouteAction.SEARCH_FAMILY, {"calculator": Family.OTHER}),
        Label(names[1], MIXED),
        Label("no", MIXED),
    ]
    write_labels(told, tmp_path / "labels.csv")
    with caplog.at_level("INFO", logger="toolwise"):
        run = assemble(config(tmp_path, sections=sections, labels=str(tmp_path / "labels.csv"), label_coef=0.1))
    assert "2 of 12 tasks have a label; 10 have none" in caplog.text
    assert "1 labels match no task, first no" in caplog.text
    for found in (run.batches.tasks, run.validation_tasks):
        assert [target_of(task) for task in found] == ["SEARCH-FAMILY", "MIXED", *[None] * 10]
    assert isinstance(run.router, LearnedRouter)
    families = run.router.conditioning.families_of(run.batches.tasks[0])
    assert families["search"] is Family.SEARCH  # and the calculator's own word comes before a label's
    assert families["calculator"] is Family.CALCULATE


@pytest.mark.long
def test_an_actors_advantage_does_not_depend_on_what_other_routes_earned(tmp_path: Path) -> None:
    """Two runs that differ only in what ANSWER earns: the router learns otherwise, rollouts with tools do not."""

    def credited(bonus: float) -> tuple[dict[str, float], StepResult, torch.Tensor]:
        def by_route(rollouts_messages: list[Any], ground_truths: list[Any]) -> list[float]:
            return [
                len(str(messages[-1].content)) % 7
                + bonus * place * any("without tools" in str(m.content) for m in messages)
                for place, messages in enumerate(rollouts_messages)
            ]

        sections = {"deterministic": True, "reward": {"sandbox": {"tier": "off"}}}
        run = assemble(config(tmp_path, wording="", sections=sections), reward=by_route)
        made = turn(run)
        means = {c.rollout.rollout_id: float(sum(map(sum, c.advantages))) for c in made.credited}
        return means, made, run.router.model.head.out.weight.detach().clone()

    (plain, made, head), (paid, _, other) = credited(0.0), credited(5.0)
    routes = {s.rollout.rollout_id: s.rollout.route for s in made.scored}
    tools = [name for name in plain if routes[name] != "ANSWER"]
    assert len(tools) == 12
    assert any(plain[name] for name in tools)
    assert {name: plain[name] for name in tools} == {name: paid[name] for name in tools}
    assert any(plain[name] != paid[name] for name in plain if name not in tools)
    assert not torch.equal(head, other)


def test_a_prompt_passes_the_trunk_once_for_its_route(tmp_path: Path) -> None:
    run = assemble(config(tmp_path))
    model, encoded = run.router.model, list[int]()
    encode = model.encode
    model.encode = lambda prompts: encoded.append(len(prompts)) or encode(prompts)
    turn(run, 2)
    assert sum(encoded) == 2 * 3  # prompts, and not 2 × 18 rollouts


@pytest.mark.long
def test_words_that_only_follow_leave_the_prompts_prefill_to_the_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine reads each original prompt once, for its route; no rollout computes it again."""
    run = assemble(config(tmp_path, conditioning="append", wording="", train_actor=False))
    monkeypatch.setattr("toolwise.routing.head.predictor.prompt_features", lambda *given, **how: pytest.fail("twice"))
    read: list[Sequence[int]] = []
    real = run.policy.engine.encode  # type: ignore[union-attr]

    async def counting(prompt: Sequence[int], **how: Any) -> torch.Tensor:
        read.append(prompt)
        return await real(prompt, **how)

    monkeypatch.setattr(run.policy.engine, "encode", counting)
    made = turn(run)
    assert len(read) == 3
    assert isinstance(run.router, LearnedRouter)
    for s in made.scored:
        routed = list((s.steps[0].policy_logprobs or {})["prompt_ids"])
        kept = next(prompt for prompt in read if common(prompt, routed) >= len(prompt) - 2)
        assert len(routed) > len(kept)  # all but the end of the user's turn, which the added words push on
    figures = run.policy.metrics()
    assert figures["engine/reused_tokens"] > 18 * 16  # a block of each rollout at least


def common(left: Sequence[int], right: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@pytest.mark.parametrize("routes", quick_first(["one", "independent", "stratified"], ["stratified"]))
def test_a_frozen_actor_is_bit_identical_afterwards(tmp_path: Path, routes: str) -> None:
    run = assemble(config(tmp_path, train_actor=False, routes=routes))
    before = weights(run)
    made = turn(run, 3)
    assert all(torch.equal(a, b) for a, b in zip(weights(run), before, strict=True))
    assert not [name for name in made.metrics if name.startswith("actor/")]
    assert made.credited == []
    assert run.learner.version == run.policy.version == 0
    assert run.router.model.head.out.weight.abs().max() > 0


@pytest.mark.long
def test_refills_count_prompts_and_not_groups(tmp_path: Path) -> None:
    sections = {"deterministic": True, "algorithm": {"zero_std_groups": "refill", "max_refills": 1}}
    made = turn(assemble(config(tmp_path, sections=sections)), 2)
    assert made.metrics["groups/batches"] == 2  # three prompts of nine groups are not three usable prompts
    assert made.metrics["router/prompts"] == 6


@pytest.mark.parametrize(
    "router",
    [
        {"budget_window": 5},
        pytest.param({"routes": "one", "optimizer": "actor", "backbone": "top"}, marks=pytest.mark.long),
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"mode": "value"}, marks=pytest.mark.long),
    ],
)
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, router: dict[str, Any]) -> None:
    given = config(tmp_path, sections={"deterministic": True}, **router)
    straight = assemble(given)
    turn(straight, 1)
    saved = checkpoint.save(
        tmp_path / "checkpoints",
        1,
        straight.registry().state_dict(),
        extra_files={"model": straight.learner.save_model},
    )
    resumed = assemble(given)
    resumed.registry().load_state_dict(saved.state())
    resumed.learner.load_weights(saved.path / "model")
    resumed.policy.version = resumed.learner.version
    ends = [turn(run, 2) for run in (straight, resumed)]
    # The number of passes depends on when requests arrive.
    same = [name for name in ends[0].metrics if not name.startswith("time/") and name != "engine/steps"]
    assert {n: ends[0].metrics[n] for n in same} == {n: ends[1].metrics[n] for n in same}
    for a, b in zip(weights(straight), weights(resumed), strict=True):
        assert torch.equal(a, b)


def test_the_head_lies_beside_the_weights_and_is_exported_with_them(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run = assemble(config(tmp_path, steps=1))
    asyncio.run(Training(run, out, resume=False).run_training())
    export = export_model(out, tmp_path / "exported", dtype="bfloat16")
    head, told = load_head(export.out)
    for a, b in zip(head.parameters(), run.router.model.head.parameters(), strict=True):
        assert torch.equal(a, b)  # in fp32, whatever the model is exported in
    assert told["multipliers"].keys() == {"cost"}
    assert told["router"]["wording"] == "silent"
    assert (told["rollout"]["max_new_tokens"], told["multi_turn"]["max_turns"]) == (40, 4)
    (model,) = out.glob("checkpoints/step-000001/model")
    assert json.loads((model / "router.json").read_text())["rollout"] == told["rollout"]
    with safe_open(export.out / "model.safetensors", framework="pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118
    assert json.loads((export.out / "router.json").read_text())["head"]["routes"][0] == "ANSWER"


def test_the_best_checkpoint_keeps_within_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validations of a score and a cost, one a step, against a budget of 0.5; the run is resumed on the way."""
    found = {1: (0.9, 1.0), 2: (0.7, 0.75), 3: (0.5, 0.5), 4: (0.95, 1.0), 5: (0.4, 0.25)}

    async def validated(run: Run, *, step: int) -> list[ScoredRollout]:
        value, cost = found[step]
        (given, *_) = run.router.decide(run.validation_tasks[:1], 1, 0, label="eval", explore=False)
        (rollout,) = await run.scheduler.roll_out([given])
        calls = [1] * round(4 * cost) + [0] * round(4 * (1 - cost))
        return [
            ScoredRollout(
                replace(rollout, route="SEARCH-FAMILY", usage=replace(rollout.usage, calls={"search": n})),
                EvaluateResult(score=value),
                rollout.steps,
            )
            for n in calls
        ]

    monkeypatch.setattr("toolwise.training.trainer.validate", validated)
    monkeypatch.setattr("toolwise.view.report.write_report", lambda out: None)
    bests = {}
    for step in (2, 5):
        own = {
            "data": {"train": str(tmp_path / "tasks.jsonl"), "batch_size": 1},
            "validation": {"before": False, "every": 1},
            "rollout": {"n": 3, "max_new_tokens": 4},
            "trainer": {"total_steps": step, "save_every": 1, "keep_checkpoints": 1, "console": False},
        }
        settings = config(tmp_path, sections=own, cost="calls", budgets=[{"limit": 0.5}])
        run = assemble(settings, validation_tasks=load_tasks(tmp_path / "tasks.jsonl")[:1])
        asyncio.run(Training(run, tmp_path / "run", resume=step > 2).run_training())
        best = checkpoint.best(tmp_path / "run" / "checkpoints", "score")
        assert best is not None
        bests[step] = (best.step, run.progress.best, run.progress.best_overspend)
    assert bests == {2: (2, 0.7, 0.5), 5: (3, 0.5, 0.0)}
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [x["eval/budget/overspend"] for x in lines if "eval/score" in x] == [1.0, 0.5, 0.0, 1.0, 0.0]
    assert export_model(tmp_path / "run", tmp_path / "out", best="score").step == 3
