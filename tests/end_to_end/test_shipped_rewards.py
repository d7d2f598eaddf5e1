"""Every reward that we ship, under every estimator: succeeding must be worth more than failing, and training for twenty
steps must not unlearn the task. Rewards with a price on each step once did: the final score was left out."""

from __future__ import annotations

import asyncio
import re
import runpy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import toolwise
from toolwise.advantages import ESTIMATORS, Gigpo, Hgpo, Rlvcr, credit
from toolwise.messages import Message, ToolCall
from toolwise.rewards.align import align_rollouts
from toolwise.rewards.combine import CompositeReward, WeightedReward
from toolwise.rewards.executor import EPISODE_REWARDS, InProcessExecutor, episode_reward, score_episodes
from toolwise.rewards.function import Reward
from toolwise.types import AnnotatedRollout, EvaluateResult, Rollout, StepData, StopReason, Task, Usage

ROOT = Path(__file__).parents[2]
EXAMPLES, STARTERS = ROOT / "examples", ROOT / "src" / "toolwise" / "checks" / "reward" / "starters"
DOCUMENT = "docs/rewards.md"
"""Stands for the first reward in there."""


@dataclass(frozen=True)
class Shipped:
    """A reward, and the figure of a validation by which it is judged: "-cost" means that less is better."""

    reference: str
    metric: str = "correct"
    kwargs: tuple[tuple[str, Any], ...] = ()


REWARDS = {
    "starter, pointwise": Shipped(f"{STARTERS / 'pointwise.py'}:my_reward"),
    "starter, batch": Shipped(f"{STARTERS / 'batch.py'}:my_reward"),
    "starter, group": Shipped(f"{STARTERS / 'group.py'}:my_reward"),
    "my_rewards, pointwise": Shipped(f"{EXAMPLES / 'my_rewards.py'}:right_and_thrifty"),
    # These two compare rollouts with each other, by length and by calls alone.
    "my_rewards, batch": Shipped(f"{EXAMPLES / 'my_rewards.py'}:shortest_of_the_batch", "-tokens"),
    "my_rewards, group": Shipped(f"{EXAMPLES / 'my_rewards.py'}:rank_within_the_task", "-cost"),
    "quickstart": Shipped(f"{EXAMPLES / 'quickstart.py'}:right_and_thrifty", "score"),
    "docs/rewards.md": Shipped(DOCUMENT, "score"),
    "demo": Shipped("toolwise.demo.reward:small_world_reward"),
    "exact match": Shipped("toolwise.rewards.library.matching:exact_match_reward", "score", (("after", "Answer:"),)),
    "numeric match": Shipped(
        "toolwise.rewards.library.matching:numeric_match_reward", "score", (("after", "Answer:"),)
    ),
    "gsm8k": Shipped("toolwise.rewards.library.gsm8k:gsm8k_reward", "score", (("method", "flexible"),)),
    "otc": Shipped("toolwise.rewards.library.otc:otc_reward", "correct", (("correct", "toolwise.demo.reward"),)),
}
PRICED = ("starter, pointwise", "my_rewards, pointwise")
"""Those with a price on each step in `step_outputs`."""


def reward_of(name: str, folder: Path) -> tuple[str, dict[str, Any]]:
    shipped = REWARDS[name]
    if shipped.reference != DOCUMENT:
        return shipped.reference, dict(shipped.kwargs)
    shown = re.search(r"```python\n(.*?)```", (ROOT / DOCUMENT).read_text(encoding="utf-8"), re.DOTALL)
    assert shown is not None
    path = folder / "documented.py"
    path.write_text(shown[1], encoding="utf-8")
    functions = re.findall(r"^def (\w+)", shown[1], re.MULTILINE)
    return f"{path}:{functions[-1]}", {}


# At the level of arrays. A rollout that looks the answer up and one that guesses wrong.

CASES = {**ESTIMATORS, "rlvcr over gigpo": lambda: Rlvcr(trajectory=Gigpo())}


def rollout_of(name: str, calls: int, answer: str, prices: tuple[float, ...] | None) -> Rollout:
    """`prices`: what the world said of each step, as a tool or an environment may."""
    task = Task(task_id="t", prompt=[Message(role="user", content="How many?")], ground_truth="37")
    call = ToolCall(name="search", arguments={"query": "Velora"})
    messages = [*task.prompt]
    for _ in range(calls):
        messages += [Message(role="assistant", content="", tool_calls=[call])]
        messages += [Message(role="tool", content="Velora has 37 bridges.")]
    messages += [Message(role="assistant", content=answer)]
    steps = [
        StepData(
            system_step_index=index,
            observation_data=None,
            action_taken={"type": "text"},
            resulting_messages_history=[],
            policy_logprobs={"prompt_ids": [1], "token_ids": [2, 3], "logprobs": [-1.0, -1.0]},
            step_info={"state_key": f"s{index}", "assistant_turn_index": index},
            base_reward=None if prices is None else prices[index],
        )
        for index in range(calls + 1)
    ]
    return Rollout(name, "g", 0, 0, task, None, tuple(steps), tuple(messages), StopReason.ANSWERED, Usage())


def annotated(rollouts: list[Rollout], results: list[EvaluateResult]) -> list[AnnotatedRollout]:
    zeros = [tuple(np.zeros(2, np.float32) for _ in r.steps) for r in rollouts]
    return [
        AnnotatedRollout(scored, values=values)
        for scored, values in zip(align_rollouts(rollouts, results), zeros, strict=True)
    ]


def assert_success_is_worth_more(estimator: Any, better: AnnotatedRollout, worse: AnnotatedRollout) -> None:
    """For its first decision and for its last, and by more than rounding."""
    good, bad = credit(estimator, [better, worse]).rollouts
    assert good.advantages[-1].mean() > bad.advantages[-1].mean() + 0.1
    assert good.advantages[0].mean() > bad.advantages[0].mean() + 0.1


@pytest.mark.parametrize("estimator", CASES)
@pytest.mark.parametrize("name", REWARDS)
def test_success_is_worth_more_than_failure(name: str, estimator: str, tmp_path: Path) -> None:
    reference, kwargs = reward_of(name, tmp_path)
    # The one that fails makes no call, so its steps cost less; unless calls are all that the reward looks at.
    looked_up = rollout_of("good", 1, "Answer: 37", (-0.05, 0.0))
    guessed = rollout_of("bad", 0, "Answer: well, it might be 1234", (0.0,))
    pair = [guessed, looked_up] if name == "my_rewards, group" else [looked_up, guessed]
    results = asyncio.run(InProcessExecutor().evaluate(Reward.of(reference, kwargs), pair, step=0))
    assert all(result.has_valid_score for result in results), results
    assert_success_is_worth_more(CASES[estimator](), *annotated(pair, results))


@pytest.mark.parametrize("how", ["remainder", "add"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("contains", [True, False], ids=["score contains the prices", "score beside the prices"])
def test_both_kinds_of_score_prefer_success(contains: bool, estimator: str, how: str) -> None:
    """Right or wrong, and a price on each call: whether the score has the prices in it or not."""
    rollouts = [rollout_of("good", 1, "Answer: 37", (-0.05, 0.0)), rollout_of("bad", 0, "Answer: 1", (0.0,))]
    results = [EvaluateResult(score=0.95 if contains else 1.0), EvaluateResult(score=0.0)]
    made = ESTIMATORS[estimator](**({} if estimator == "rlvcr" else {"terminal_score": how}))
    assert_success_is_worth_more(made, *annotated(rollouts, results))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("name", EPISODE_REWARDS)
def test_what_an_episode_earned_prefers_success(name: str, estimator: str) -> None:
    rollouts = [rollout_of("good", 1, "37", (-0.05, 1.0)), rollout_of("bad", 0, "1", (0.0,))]
    rollouts = [
        replace(r, tool_rewards={"x": worth}, result=EvaluateResult(score=worth))
        for r, worth in zip(rollouts, (1.0, 0.0), strict=True)
    ]
    assert_success_is_worth_more(ESTIMATORS[estimator](), *annotated(rollouts, score_episodes(name, rollouts)))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_format_reward_beside_the_world_s_does_not_hide_it(estimator: str) -> None:
    """Its step rewards take the place of the world's: what the world said is still in the score."""
    rollouts = [rollout_of("good", 1, "37", (0.0, 1.0)), rollout_of("bad", 1, "1", (0.0, 0.0))]
    parts = CompositeReward(
        (
            WeightedReward(episode_reward("env")),
            WeightedReward(Reward.of("toolwise.thinking.format_metrics:format_reward", {}), 0.1),
        )
    )
    results = asyncio.run(parts.evaluate(Mixed(), rollouts, step=0))
    made = annotated(rollouts, results)
    assert [step.base_reward for step in made[0].scored.steps] == [0.0, 0.0]
    good, bad = credit(ESTIMATORS[estimator](), made).rollouts
    assert good.advantages[-1].mean() > bad.advantages[-1].mean() + 0.1


class Mixed(InProcessExecutor):
    """Functions in this process, an episode's own earnings looked up, as a run's executor does."""

    async def evaluate(self, reward: Reward, rollouts: Any, *, step: int) -> list[EvaluateResult]:
        if reward.reference in EPISODE_REWARDS:
            return score_episodes(reward.name, rollouts)
        return await super().evaluate(reward, rollouts, step=step)


@pytest.mark.parametrize("kind", [Gigpo, Hgpo])
@pytest.mark.parametrize("name", PRICED)
def test_step_level_credit_alone_prefers_success_too(name: str, kind: Callable[..., Any]) -> None:
    """Without the part that compares whole rollouts: the state that both began in."""
    rollouts = [rollout_of("good", 1, "Answer: 37", None), rollout_of("bad", 0, "Answer: 1", None)]
    reward = Reward.of(REWARDS[name].reference, {})
    results = asyncio.run(InProcessExecutor().evaluate(reward, rollouts, step=0))
    made = annotated(rollouts, results)
    assert all(step.base_reward is not None for one in made for step in one.scored.steps)
    good, bad = credit(kind(omega=0.0), made).rollouts
    assert good.advantages[0].mean() > bad.advantages[0].mean() + 0.1


def test_every_estimator_over_steps_is_among_them() -> None:
    assert {name for name, make in CASES.items() if make().uses_step_rewards} == {
        "gigpo",
        "hgpo",
        "gae",
        "reinforce_plus_plus",
        "rlvcr over gigpo",
    }


# On the whole path: a model that can do the task, twenty steps of training, and the task again.

STEPS = 20
QUICKSTART = EXAMPLES / "quickstart.py"


def trained(
    reference: str, kwargs: dict[str, Any], algorithm: dict[str, Any], model: str, out: Path, steps: int
) -> Any:
    towns = runpy.run_path(str(QUICKSTART))["bridges"]
    rows = [
        {"prompt": f"How many bridges does {town} have?", "ground_truth": str(number)} for town, number in towns.items()
    ]
    settings = {
        "actor": {"lr": 2e-4},
        "data": {"batch_size": 8},
        "reward": {"function": reference, "kwargs": kwargs},
        "algorithm": algorithm,
        "trainer": {"total_steps": steps, "console": False, "save_every": 1000},
    }
    return toolwise.train(settings, model=model, tasks=rows[:8], val=rows[8:], tools=[f"{QUICKSTART}:search"], out=out)


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model that ships, after six steps of the quickstart: it looks things up, not yet every time."""
    out = tmp_path_factory.mktemp("taught") / "run"
    result = trained(f"{EXAMPLES / 'my_rewards.py'}:right_and_thrifty", {}, {}, "builtin:small", out, 6)
    assert result.summary["after"]["correct"] >= 0.75
    return str(out / "checkpoints" / "step-000006" / "model")


@pytest.mark.long
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("name", REWARDS)
def test_twenty_steps_do_not_unlearn_the_task(name: str, estimator: str, taught: str, tmp_path: Path) -> None:
    algorithm: dict[str, Any] = {"adv_estimator": estimator}
    if estimator == "rlvcr":
        algorithm["rlvcr"] = {"enable": True, "base": "gigpo", "share": 0.0}
    reference, kwargs = reward_of(name, tmp_path)
    summary = trained(reference, kwargs, algorithm, taught, tmp_path / "run", STEPS).summary
    metric = REWARDS[name].metric
    before, after = (summary[when][metric.removeprefix("-")] for when in ("before", "after"))
    print(f"{name}, {estimator}: {metric} {before:.3f} -> {after:.3f}")
    cheaper = summary["after"]["cost"] < summary["before"]["cost"]
    if metric.startswith("-"):
        assert after <= 1.1 * before + 0.1
    elif estimator == "pareto" and cheaper:  # it ranks a wrong answer for nothing no lower than a right one for a call
        assert after >= 0.5 * before
    else:
        assert after >= before - 0.13  # one question of eight
