"""Assembling a run from configuration and Python objects; invalid input is rejected before any work is done."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from toolwise.advantages import Grpo
from toolwise.config.schema import RunConfig
from toolwise.demo.tasks import write_rows
from toolwise.errors import ConfigError, DataError, ModelError, RewardError
from toolwise.messages import Message
from toolwise.rewards import Reward
from toolwise.training.checkpoint import OVERSPEND, ranking_key
from toolwise.training.run import Progress, Run, assemble, check_learnable
from toolwise.types import Task
from toolwise.types.findings import Finding

torch.set_num_threads(1)
TASKS = [Task(task_id=str(i), prompt=[Message(role="user", content=f"{i}?")]) for i in range(4)]


def judge(messages: Any, ground_truth: Any, price: float = 0.0) -> float:
    return 1.0


def config(**sections: Any) -> RunConfig:
    settings = {"model": {"device": "cpu"}, "data": {"batch_size": 2}, **sections}
    settings["reward"] = {"sandbox": {"tier": "off"}, **settings.get("reward", {})}  # test_scoring.py tests scoring
    return RunConfig.model_validate(settings)


def make(**sections: Any) -> Run:
    return assemble(config(**sections), tasks=TASKS, validation_tasks=[], reward=judge)


def test_everything_the_configuration_says_arrives_where_it_works() -> None:
    run = make(
        seed=7,
        tools=["calculator", {"name": "search", "price": 0.5}],
        rollout={"n": 3, "temperature": 0.7, "max_new_tokens": 9, "max_batch": 5, "max_concurrent": 6, "deadline_s": 8},
        multi_turn={"max_turns": 4, "tool_timeout_s": 2.5},
        reward={"kwargs": {"price": 0.1}},
        algorithm={"norm_adv_by_std": False},
        actor={"lr": 1e-4, "mini_batches": 2},
    )
    assert (run.policy.sampling.temperature, run.policy.sampling.max_new_tokens) == (0.7, 9)
    assert run.policy.max_batch == 5
    assert (run.scheduler.max_episode_steps, run.scheduler.max_concurrent) == (4, 6)
    assert (run.scheduler.deadline_s, run.scheduler.tool_timeout_s) == (8, 2.5)
    assert list(run.scheduler.tools) == ["calculator", "search"]
    assert run.scheduler.tools["search"].price == 0.5
    assert run.scoring.rewards.parts[0].reward.kwargs == {"price": 0.1}
    assert run.estimator == Grpo(norm_by_std=False)
    assert (run.learner.config.actor.lr, run.learner.config.actor.mini_batches) == (1e-4, 2)
    assert run.router.seed == 7


def test_the_learner_uses_the_rollouts_temperature() -> None:
    """Else the ratio of the same weights would not be 1."""
    assert make(rollout={"temperature": 0.6}).learner.config.rollout.temperature == 0.6


def test_the_policy_draws_from_the_learner_s_own_weights() -> None:
    run = make()
    assert run.policy.model is run.learner.model
    assert run.scheduler.policy is run.policy


def test_without_turns_there_are_no_tools_and_one_reply() -> None:
    run = make(tools=["calculator"], multi_turn={"enable": False, "max_turns": 9})
    assert dict(run.scheduler.tools) == {}
    assert run.scheduler.max_episode_steps == 1


def test_tools_given_in_python_join_those_of_the_file() -> None:
    def double(x: int) -> int:
        """Twice as much."""
        return 2 * x

    run = assemble(config(tools=["calculator"]), tasks=TASKS, validation_tasks=[], tools=[double], reward=judge)
    assert list(run.scheduler.tools) == ["calculator", "double"]


def test_a_finished_reward_gets_the_configuration_s_arguments() -> None:
    given = config(reward={"kwargs": {"price": 0.3}})
    run = assemble(given, tasks=TASKS, validation_tasks=[], reward=Reward.of(judge))
    assert run.scoring.rewards.parts[0].reward.kwargs == {"price": 0.3}


def test_files_are_read_within_their_limits(tmp_path: Path) -> None:
    for split in ("train", "heldout"):
        write_rows(tmp_path / f"{split}.jsonl", 6, seed=0, split=split)
    data = {"train": tmp_path / "train.jsonl", "val": tmp_path / "heldout.jsonl", "limit": 4, "val_limit": 3}
    given = config(
        data={**data, "batch_size": 2, "shuffle": False},
        tools=["calculator", "search"],
        reward={"function": "toolwise.demo.reward:small_world_reward"},
    )
    run = assemble(given)
    assert run.batches.batches_per_epoch == 2
    assert len(run.validation_tasks) == 3
    assert next(run.batches)[0].extra_info["split"] == "train"


def test_without_held_out_tasks_there_is_nothing_to_validate_on(tmp_path: Path) -> None:
    write_rows(tmp_path / "t.jsonl", 2, seed=0, split="train")
    given = config(data={"train": tmp_path / "t.jsonl", "batch_size": 2}, tools=["calculator", "search"])
    assert assemble(given, reward=judge).validation_tasks == []


@pytest.mark.parametrize(
    ("sections", "error", "said"),
    [
        ({}, ConfigError, "reward.function is missing"),
        ({"reward": {"function": "toolwise.demo.reward:smal_world_reward"}}, RewardError, "did you mean"),
        (
            {"reward": {"function": "toolwise.demo.reward:small_world_reward"}},
            ConfigError,
            "data.train is missing",
        ),
        ({"reward": {"function": "json:dumps", "kwargs": {"x": 1}}}, RewardError, r"must take \(messages"),
        ({"tools": ["calculater"]}, ConfigError, "calculater"),
        (
            {"reward": {"function": "toolwise.demo.reward:small_world_reward"}, "data": {"train": "nowhere.jsonl"}},
            DataError,
            "nowhere.jsonl",
        ),
    ],
)
def test_what_is_wrong_is_found_before_any_work(sections: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said) as caught:
        assemble(RunConfig.model_validate(sections))
    assert "\n" not in str(caught.value)


def test_a_task_that_wants_a_tool_the_run_has_not_is_named() -> None:
    wanting = [TASKS[0].model_copy(update={"tools": ["search"]})]
    with pytest.raises(ConfigError, match="task 0 needs the tool 'search', but the run's tools are: calculator"):
        assemble(config(tools=["calculator"]), tasks=wanting, validation_tasks=[], reward=judge)
    held_out = [TASKS[1].model_copy(update={"tools": ["nothing"]})]
    with pytest.raises(ConfigError, match="task 1 needs the tool 'nothing', but the run's tools are: none"):
        assemble(config(), tasks=TASKS, validation_tasks=held_out, reward=judge)


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size 9 is more than the 4 tasks"):
        make(data={"batch_size": 9})


def test_a_model_that_is_not_there_is_refused() -> None:
    with pytest.raises(ModelError, match="no built-in model 'large'"):
        make(model={"path": "builtin:large"})


def test_all_that_must_survive_is_registered_and_comes_back() -> None:
    first, second = make(seed=1), make(seed=1)
    next(first.batches)
    first.progress.step = 3
    first.progress.before = {"score": 0.5}
    first.learner.version = 3
    state = first.registry().state_dict()
    assert set(state) == {"actor", "batches", "router", "progress", "queue", "randomness"}
    second.registry().load_state_dict(state)
    assert second.progress == first.progress
    assert second.learner.version == 3
    assert [t.task_id for t in next(second.batches)] == [t.task_id for t in next(first.batches)]


def test_progress_is_plain_data() -> None:
    progress = Progress(step=4, seconds=1.5, before={"n": 2}, last=None)
    progress.diagnosis.findings = [Finding("constant_reward", "warning", "all rewards are 0", cure="look", step=2)]
    copy = Progress()
    copy.load_state_dict(json.loads(json.dumps(progress.state_dict())))
    assert copy == progress


def test_progress_with_findings_as_fields_can_be_read() -> None:
    state = asdict(Progress(step=4)) | {"diagnosis": {"findings": [asdict(Finding("x", "warning", "y", cure="z"))]}}
    copy = Progress()
    copy.load_state_dict(json.loads(json.dumps(state)))
    assert copy.diagnosis.findings == [Finding("x", "warning", "y", cure="z")]


def test_progress_of_an_older_checkpoint_has_no_step_of_the_latest_validation() -> None:
    state = Progress(step=4, last={"n": 2}, last_step=3).state_dict()
    del state["last_step"]
    copy = Progress()
    copy.load_state_dict(state)
    assert (copy.last, copy.last_step) == ({"n": 2}, None)


def parts(*weights: float, **settings: Any) -> RunConfig:
    function = "toolwise.demo.reward:small_world_reward"
    return config(reward={"parts": [{"function": function, "weight": w} for w in weights], **settings})


def test_several_rewards_are_read_with_their_weights() -> None:
    run = assemble(parts(1.0, -0.5, combine="normalize"), tasks=TASKS, validation_tasks=[])
    assert [part.weight for part in run.scoring.rewards.parts] == [1.0, -0.5]
    assert run.scoring.rewards.combine_mode == "normalize"


def test_a_function_beside_parts_is_refused() -> None:
    both = parts(1.0, function="toolwise.demo.reward:small_world_reward")
    with pytest.raises(ConfigError, match="both set"):
        assemble(both, tasks=TASKS, validation_tasks=[])


def test_validations_are_counted_until_one_is_better_at_equal_cost() -> None:
    def rank(score: float, at_budget: float, overspend: float = 0.0) -> tuple[float, float]:
        key = ranking_key({"score": score, "budget/score": at_budget, OVERSPEND: overspend}, "score")
        assert key is not None
        return key

    progress, counts = Progress(), []
    for each in (
        rank(0.5, 0.5),
        rank(0.9, 0.4),  # a higher score for more money is no progress
        rank(0.99, 0.99, overspend=0.2),  # nor is one over budget
        rank(0.5, 0.5),  # nor an equal one
        rank(0.4, 0.6),
        rank(0.5, 0.5),
    ):
        progress.compare(each)
        counts.append(progress.without_best)
    assert counts == [0, 1, 2, 3, 0, 1]
    copy = Progress()
    copy.load_state_dict(progress.state_dict())
    assert (copy.without_best, copy.best_rank) == (1, (0.0, -0.6))


def test_validations_are_counted_by_score_without_a_budget() -> None:
    progress = Progress()
    for score in (0.1, 0.3, 0.2, 0.3):
        progress.compare(ranking_key({"score": score}, "score") or (0.0, 0.0))
    assert (progress.best, progress.without_best) == (0.3, 2)
    old = progress.state_dict()
    del old["without_best"]
    copy = Progress()
    copy.load_state_dict(old)
    assert copy.without_best == 0


def test_early_stopping_without_validations_is_refused() -> None:
    config = RunConfig.model_validate({"trainer": {"early_stopping": 2}, "validation": {"every": 0}})
    with pytest.raises(ConfigError, match=r"set validation\.every"):
        check_learnable(config)


def test_held_out_rows_that_no_route_applies_to_are_refused_at_once() -> None:
    routes = [{"name": "look-up", "tools": ["search"]}, {"name": "add", "tools": ["calculator"]}]
    given = config(tools=["search", "calculator"], rollout={"n": 4}, router={"enable": True, "routes": routes})
    with pytest.raises(ConfigError, match="no route applies to task 0 with the tools none: add a route without tools"):
        assemble(given, tasks=TASKS, validation_tasks=[TASKS[0].model_copy(update={"tools": []})], reward=judge)
