"""Faults are counted by cause and limited over the latest rollouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from toolwise.config.schema import FaultsConfig
from toolwise.messages import Message
from toolwise.training.metrics import (
    FaultRates,
    count_faults,
    describe_totals,
    fault_metrics,
    summarize,
    summarize_validation,
)
from toolwise.types import EvaluateResult, Rollout, ScoredRollout, StepData, StopReason, Task, Usage
from toolwise.types.results import EvaluationFault

TASK = Task(task_id="t", prompt=[Message(role="user", content="?")])


def scored(
    stop: StopReason = StopReason.ANSWERED, *, error: bool = False, down: bool = False, **failed: int
) -> ScoredRollout:
    usage = Usage(calls={"look": 4}, failed_calls=failed)
    rollout = Rollout("g/0", "g", 0, 0, TASK, None, (), TASK.prompt, stop, usage, fault=f"{stop}: why")
    result = EvaluateResult(score=1.0)
    if error:
        result = EvaluateResult(is_score_valid=False, error=EvaluationFault(kind="exception", message="no"))
    return ScoredRollout(replace(rollout, infrastructure_fault=down), result, ())


GOOD = scored()
BAD: dict[str, ScoredRollout] = {
    "policy": scored(StopReason.POLICY_FAULT),
    "env": scored(StopReason.ENV_FAULT),
    "deadline": scored(StopReason.DEADLINE),
    "infrastructure": scored(down=True),
    "tool": scored(exception=2, timeout=2),
    "parse": scored(bad_json=4),
    "reward": scored(error=True),
}


@pytest.mark.parametrize("name", BAD)
def test_each_class_is_counted_by_itself(name: str) -> None:
    counts = count_faults([GOOD, BAD[name]])
    found = {key: counts[key] for key in BAD if counts[key]}
    assert found == {name: 4 if name in ("tool", "parse") else 1}
    assert (counts["rollouts"], counts["calls"]) == (2, 8)
    assert fault_metrics([GOOD, BAD[name]])["faults/rollouts"] == float(name not in ("tool", "parse"))


def test_what_a_tool_refuses_or_a_model_gets_wrong_is_no_fault_of_the_tool() -> None:
    counts = count_faults([scored(tool_error=1, unknown_tool=1, bad_arguments=1, forbidden_tool=1)])
    assert (counts["tool"], counts["parse"]) == (0, 0)


def test_calls_that_a_cap_refuses_are_no_faults_and_never_more_than_all_calls() -> None:
    counts = count_faults([scored(over_budget=3), scored(bad_json=9)])
    assert (counts["tool"], counts["parse"], counts["calls"]) == (0, 9, 4 + 9)


@pytest.mark.parametrize("name", ["policy", "env", "deadline", "infrastructure"])
def test_a_run_stops_above_its_bound(name: str) -> None:
    rates = FaultRates()
    rates.add([BAD[name]] * 33 + [GOOD] * 31, 64)
    found = rates.describe_exceeded(FaultsConfig())
    assert found is not None
    assert "in 33 of the latest 64 rollouts, more than faults." in found
    assert f"faults.{name} = 0.5 allows; the last one, g/0: " in found
    assert rates.describe_exceeded(FaultsConfig(**{name: 0.6})) is None


@pytest.mark.parametrize("name", ["tool", "parse"])
def test_failing_calls_stop_a_run_only_if_configured(name: str) -> None:
    rates = FaultRates()
    rates.add([BAD[name]] * 64, 64)
    assert rates.describe_exceeded(FaultsConfig()) is None
    found = rates.describe_exceeded(FaultsConfig(**{name: 0.9}))
    assert found is not None
    assert "in 256 of the latest 256 calls" in found


def test_the_tool_that_failed_is_named() -> None:
    step = StepData(
        system_step_index=0,
        observation_data=None,
        action_taken={},
        resulting_messages_history=[],
        step_info={"calls": {"look": 4}, "failed_calls": {"timeout": 4}},
    )
    bad = BAD["tool"]
    rates = FaultRates()
    rates.add([replace(bad, rollout=replace(bad.rollout, steps=(step,)))] * 16, 64)
    found = rates.describe_exceeded(FaultsConfig(tool=0.9)) or ""
    assert found.endswith("more than faults.tool = 0.9 allows; the last one, of look: timeout")


def test_small_steps_are_judged_together() -> None:
    rates, bounds = FaultRates(), FaultsConfig(window=16)
    for _ in range(3):
        rates.add([BAD["policy"]] * 4, 16)
        assert rates.describe_exceeded(bounds) is None
    rates.add([BAD["policy"]] * 4, 16)
    assert "16 of the latest 16" in (rates.describe_exceeded(bounds) or "")


def test_what_is_over_is_forgotten() -> None:
    rates, bounds = FaultRates(), FaultsConfig(window=16)
    rates.add([BAD["env"]] * 8, 16)
    for _ in range(3):
        rates.add([GOOD] * 8, 16)
    assert rates.describe_exceeded(bounds, ended=True) is None
    assert len(rates.recent) <= 3
    assert (rates.totals["env"], rates.totals["rollouts"]) == (8, 32)
    assert describe_totals(rates.totals) == "env 8 of 32"


def test_a_short_run_is_judged_at_its_end() -> None:
    rates = FaultRates()
    rates.add([BAD["policy"]] * 16, 64)
    assert rates.describe_exceeded(FaultsConfig()) is None
    assert "16 of the latest 16" in (rates.describe_exceeded(FaultsConfig(), ended=True) or "")


def test_a_few_faults_never_stop_anybody() -> None:
    rates: FaultRates = FaultRates()
    for step in range(200):
        rates.add([BAD["env"] if step % 3 == 0 else GOOD, *[GOOD] * 15], 64)
        assert rates.describe_exceeded(FaultsConfig()) is None


def test_it_survives_a_crash() -> None:
    rates, again = FaultRates(), FaultRates()
    rates.add([BAD["policy"]] * 64, 64)
    state: dict[str, Any] = rates.state_dict()
    again.load_state_dict(state)
    assert again == rates
    again.load_state_dict({})  # the state of an older checkpoint
    assert again == FaultRates()


def test_validations_count_what_failed_though_it_was_scored() -> None:
    figures = summarize_validation([GOOD, BAD["policy"], BAD["reward"]])
    assert figures["errors"] == 2
    assert summarize([GOOD, BAD["policy"]])["faults/policy"] == 1.0


def test_a_users_parser_that_fails_is_named() -> None:
    failed = replace(BAD["policy"].rollout, fault="rollout.tool_parser: parse failed: ValueError: no")
    faults = FaultRates()
    faults.add([replace(BAD["policy"], rollout=failed)] * 4, window=4)
    line = faults.describe_exceeded(FaultsConfig(policy=0.5, window=4))
    assert line is not None
    assert line.startswith("the parser given as rollout.tool_parser failed in 4 of the latest 4 rollouts")
    assert line.endswith("the last one, g/0: rollout.tool_parser: parse failed: ValueError: no")
