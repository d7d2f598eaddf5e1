"""Which rollouts share a call, and how a pass handles timeouts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from sample_rollouts import sample_rows

from toolwise.checks.reward.stored_rollouts import StoredRollout, score_rollouts, scoring_mode, split_into_calls
from toolwise.config.schema import RewardConfig, RewardPart, SandboxConfig
from toolwise.rewards.function import Mode
from toolwise.training.evaluate import build_scoring

MakeStored = Callable[..., list[StoredRollout]]
MakeReward = Callable[[str], str]


@pytest.mark.parametrize(("mode", "sizes"), [("pointwise", [1] * 12), ("group", [4, 4, 4]), ("batch", [12])])
def test_calls_are_of_the_make_of_training(mode: Mode, sizes: list[int], make_stored: MakeStored) -> None:
    assert [len(call) for call in split_into_calls(make_stored(), mode)] == sizes


def test_rollouts_of_two_steps_never_share_a_call(make_stored: MakeStored) -> None:
    stored = make_stored([{**row, "step": number % 2} for number, row in enumerate(sample_rows())])
    assert [{stored[place].step for place in call} for call in split_into_calls(stored, "batch")] == [{0}, {1}]
    assert [len(call) for call in split_into_calls(stored, "group")] == [2] * 6


def test_every_function_gets_its_own_step_and_results_keep_their_places(
    make_stored: MakeStored, make_reward: MakeReward
) -> None:
    stored = make_stored([{**row, "step": number // 3} for number, row in enumerate(sample_rows())])
    reference = make_reward("def judge(messages, ground_truth, step):\n    return step + len(messages) / 10")
    scoring = build_scoring(RewardConfig(function=reference, sandbox=SandboxConfig(workers=1)))
    try:
        results = asyncio.run(score_rollouts(scoring, stored))
    finally:
        scoring.close()
    found = [result.score for result in results if result is not None]
    assert found == [one.step + len(one.rollout.messages) / 10 for one in stored]


def test_rewards_that_are_normalised_come_in_groups(make_reward: MakeReward) -> None:
    part = RewardPart(function=make_reward("def judge(messages, ground_truth):\n    return 1.0"))
    for combine, mode in (("sum", "pointwise"), ("normalize", "group")):
        config = RewardConfig.model_validate(
            {"parts": [part, part], "combine": combine, "sandbox": SandboxConfig(workers=1)}
        )
        scoring = build_scoring(config)
        scoring.close()
        assert scoring_mode(scoring) == mode
