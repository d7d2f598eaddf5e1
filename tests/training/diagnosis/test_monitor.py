"""Findings during the first steps: not too early, not on healthy runs, and not lost on resume."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from diagnosis_cases import DROPPED, UPDATED, config, scored, too_long

from toolwise.config.router import RouterConfig
from toolwise.config.schema import RunConfig
from toolwise.protocols import AdvantageEstimator
from toolwise.training.components import load_estimator
from toolwise.training.diagnosis import Diagnosis, Finding, FindingChanges
from toolwise.types import ScoredRollout, StopReason

SETTINGS = config()


def after(
    steps: Sequence[Sequence[ScoredRollout]],
    diagnosis: Diagnosis | None = None,
    *,
    metrics: Mapping[str, float] = UPDATED,
    weights: Sequence[str] = ("before", "after"),
    settings: RunConfig = SETTINGS,
) -> tuple[Diagnosis, list[FindingChanges]]:
    """A diagnosis that has seen `steps`; `weights` are the checksums, the last one for ever."""
    diagnosis = diagnosis or Diagnosis()
    sums = (weights[min(place, len(weights) - 1)] for place in count())
    changes, estimator = [], load_estimator(settings)
    for step, rollouts in enumerate(steps, diagnosis.steps + 1):
        diagnosis.before_step(settings, lambda: next(sums))
        changes.append(diagnosis.after_step(settings, estimator, step, rollouts, metrics, lambda: next(sums)))
    return diagnosis, changes


def kinds(diagnosis: Diagnosis) -> list[str]:
    return [finding.name for finding in diagnosis.findings]


HEALTHY = [scored(1.0), scored(0.0)]
CONSTANT = [scored(0.5), scored(0.5)]
CUT = [scored(1.0, finish="length"), scored(0.0, finish="length")]
FAILED = [scored(0.0, stop=StopReason.ENV_FAULT, rewards=()), scored(0.0, stop=StopReason.DEADLINE)]


def test_a_healthy_run_has_no_findings() -> None:
    diagnosis, changes = after([HEALTHY] * 20)
    assert diagnosis.findings == []
    assert diagnosis.updated is True
    assert all(not c.found and not c.withdrawn for c in changes)


@pytest.mark.parametrize(
    ("sick", "kind", "said"),
    [
        (CONSTANT, "constant_reward", "All 6 rollouts of the first 3 steps have the same reward, 0.5"),
        (CUT, "replies_cut", "rollout.max_new_tokens = 256"),
        (FAILED, "episodes_failed", "ended with a fault"),
    ],
)
def test_a_symptom_of_all_the_first_steps_is_a_finding_and_of_one_is_not(
    sick: list[ScoredRollout], kind: str, said: str
) -> None:
    diagnosis, changes = after([sick] * 4)
    assert [[f.name for f in c.found] for c in changes] == [[], [], [kind], []]
    assert said in diagnosis.findings[0].says
    assert diagnosis.findings[0].step == 3
    assert diagnosis.findings[0].cure
    for place in range(3):
        steps = [sick, sick, sick]
        steps[place] = HEALTHY
        assert kinds(after([*steps, sick, sick])[0]) == []


def failed_calls(place: int) -> list[ScoredRollout]:
    """Rollouts that called a tool failed, the others have one reward; no two steps have the same fault."""
    fault = f"ModelError: the chat template of m fails on a conversation of {place} messages: roles must alternate"
    called = [scored(0.0, stop=StopReason.POLICY_FAULT, calls={"search": 1}, fault=f) for f in (fault, "other", fault)]
    return [*called, *CONSTANT]


def test_faults_of_all_that_called_a_tool_are_the_finding_and_the_equal_rewards_of_the_rest_are_not() -> None:
    diagnosis, _ = after([failed_calls(place) for place in range(3)])
    (finding,) = diagnosis.findings
    assert finding.name == "episodes_failed"
    assert finding.says.startswith("All rollouts that called a tool of the first 3 steps")
    assert finding.says.endswith("a conversation of 2 messages: roles must alternate")


def test_one_step_with_only_failed_tool_users_limits_the_finding_to_them() -> None:
    faults = [scored(0.0, stop=StopReason.ENV_FAULT, calls={"search": 1}, fault="down")] * 2
    mixed = after([faults, failed_calls(1), faults])[0].findings[0]
    assert mixed.says.startswith("All rollouts that called a tool of")
    assert after([faults] * 3)[0].findings[0].says.startswith("All rollouts of the first 3 steps")


def test_one_call_that_went_well_is_enough() -> None:
    well = [*failed_calls(0), scored(1.0, calls={"search": 1})]
    assert kinds(after([well] * 3)[0]) == []


def test_a_finding_that_a_later_step_disproves_is_withdrawn_for_good() -> None:
    diagnosis, changes = after([*[CONSTANT] * 5, HEALTHY, *[CONSTANT] * 5])
    assert diagnosis.findings == []
    assert [f.name for f in changes[5].withdrawn] == ["constant_reward"]
    assert sum(len(c.found) + len(c.withdrawn) for c in changes) == 2


def test_rewards_that_are_equal_within_a_step_and_not_between_steps_are_not_constant() -> None:
    assert kinds(after([CONSTANT, [scored(0.0), scored(0.0)], CONSTANT])[0]) == []


def test_step_rewards_that_differ_are_something_to_learn_from() -> None:
    steps = [[scored(0.5, rewards=(-0.1,)), scored(0.5, rewards=(-0.1, -0.1))]] * 3
    assert kinds(after(steps)[0]) == []


BUDGET = {"enable": True, "train_actor": False, "budgets": [{"limit": 0.1}]}
PRICED = {"enable": True, "subtract_thinking_cost": True}


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"router": BUDGET}, []),
        ({"router": {"enable": True, "train_actor": False, "label_coef": 1.0}}, []),
        ({"router": {"enable": True, "train_actor": False}}, ["constant_reward"]),
        ({"router": {**BUDGET, "train_actor": True}}, ["constant_reward"]),
        ({"algorithm": {"rlvcr": {**PRICED, "budget": {"price": 0.01}}}}, []),
        ({"algorithm": {"rlvcr": {**PRICED, "budget": {"limit": 20}}}}, []),
        ({"algorithm": {"rlvcr": PRICED}}, ["constant_reward"]),
        ({"algorithm": {"adv_estimator": "rlvcr", "rlvcr": {"enable": True}}}, []),
        ({"algorithm": {"adv_estimator": "pareto"}}, []),
        ({"algorithm": {"adv_estimator": "hdpo", "correct_threshold": 0.5}}, []),
        ({"algorithm": {"adv_estimator": "hdpo", "efficiency_w": 0.0}}, ["constant_reward"]),
        ({"algorithm": {"adv_estimator": "rlvcr", "rlvcr": {"enable": True, "gate": "signed"}}}, ["constant_reward"]),
    ],
)
def test_equal_rewards_are_no_finding_if_costs_or_thoughts_differ(sections: Any, told: list[str]) -> None:
    assert kinds(after([CONSTANT] * 3, settings=config(**sections))[0]) == told


def test_rewards_are_compared_as_advantages_compare_them() -> None:
    mixed = [[scored(0.5), scored(0.5, action_valid=False)]] * 3
    assert kinds(after(mixed)[0]) == ["constant_reward"]
    assert kinds(after(mixed, settings=config(algorithm={"invalid_action_penalty": 0.1}))[0]) == []
    longer = [[scored(0.5), scored(0.5, rewards=(None, None))]] * 3
    assert kinds(after(longer)[0]) == ["constant_reward"]
    assert kinds(after(longer, settings=config(algorithm={"default_step_reward": -0.1}))[0]) == []


def test_one_reply_that_ends_is_enough_only_among_few() -> None:
    few = [*CUT, scored(1.0)]
    assert kinds(after([few] * 3)[0]) == []
    many = [*CUT * 20, scored(1.0)]
    assert kinds(after([many] * 3)[0]) == ["replies_cut"]


def test_one_prompt_too_long_is_reported_immediately_and_once() -> None:
    diagnosis, changes = after([[*HEALTHY, too_long()]] * 3)
    assert [len(c.found) for c in changes] == [1, 0, 0]
    (finding,) = diagnosis.findings
    assert finding.name == "prompt_too_long"
    assert "1 of 3 rollouts of step 1" in finding.says
    assert "a prompt of 9 tokens (task g)" in finding.says
    assert "rollout.max_new_tokens" in finding.cure


def test_a_validation_finds_prompts_that_are_too_long() -> None:
    diagnosis = Diagnosis()
    assert [f.name for f in diagnosis.after_validation(0, [too_long(), scored()]).found] == ["prompt_too_long"]
    assert diagnosis.after_validation(5, [too_long()]).found == []


def test_weights_that_did_not_change_in_ten_updates() -> None:
    diagnosis, changes = after([HEALTHY] * 11, metrics=DROPPED)
    assert diagnosis.updated is False
    assert [len(c.found) for c in changes] == [0] * 9 + [1, 0]
    (finding,) = diagnosis.findings
    assert (finding.name, finding.step) == ("weights_unchanged", 10)
    assert "in 10 steps: all 10 groups were dropped" in finding.says


def test_dropped_groups_are_those_of_all_steps_that_were_looked_at() -> None:
    four = [scored(1.0, group=name) for name in "abcd"]
    diagnosis, _ = after([four] * 2 + [four[:1]], metrics=DROPPED)
    assert "in 3 steps: all 9 groups were dropped" in diagnosis.end(3).found[0].says
    diagnosis, _ = after([four], metrics={**UPDATED, "actor/update_norm": 0.0})
    diagnosis, _ = after([four[:1]], diagnosis, metrics=DROPPED)
    assert "in 2 steps: the only group of the step without an update was dropped" in diagnosis.end(2).found[0].says


def test_a_checkpoint_that_did_not_count_dropped_groups_is_loaded() -> None:
    first, _ = after([HEALTHY] * 2, metrics=DROPPED)
    state = {name: value for name, value in first.state_dict().items() if not name.startswith("dropped_")}
    resumed = Diagnosis()
    resumed.load_state_dict(state)
    resumed, _ = after([HEALTHY] * 2, resumed, metrics=DROPPED)
    assert "in 4 steps: all 2 groups of the 2 steps without an update were dropped" in resumed.end(4).found[0].says


def test_updates_that_change_no_bit_are_none() -> None:
    """As where the precision of the weights swallows them: the norm says that they moved, the weights that not."""
    diagnosis, _ = after([HEALTHY] * 10, weights=["same"])
    assert diagnosis.updated is False
    assert "rounded away in float32 weights" in diagnosis.findings[0].says


def test_weights_that_change_at_last_withdraw_it() -> None:
    diagnosis, _ = after([HEALTHY] * 10, metrics=DROPPED)
    assert kinds(diagnosis) == ["weights_unchanged"]
    diagnosis, changes = after([HEALTHY], diagnosis, weights=["after"])
    assert [f.name for f in changes[0].withdrawn] == ["weights_unchanged"]
    assert (diagnosis.updated, diagnosis.findings) == (True, [])


def test_a_short_run_that_never_updated_is_reported_at_its_end() -> None:
    diagnosis, _ = after([HEALTHY] * 2, metrics=DROPPED)
    (finding,) = diagnosis.end(2).found
    assert finding.name == "weights_unchanged"
    assert diagnosis.end(2).found == []
    assert after([HEALTHY])[0].end(1).found == []


def test_weights_are_not_asked_for_once_they_have_changed() -> None:
    diagnosis, _ = after([HEALTHY])

    def never() -> str:
        raise AssertionError

    diagnosis.before_step(SETTINGS, never)
    diagnosis.after_step(SETTINGS, load_estimator(SETTINGS), 2, HEALTHY, UPDATED, never)


@pytest.mark.parametrize("learns", [True, False])
def test_a_user_s_estimator_says_whether_equal_rewards_teach_something(learns: bool) -> None:
    class Mine(AdvantageEstimator):
        def learns_from_equal_scores(self, score: float) -> bool:
            return learns

        def __call__(self, rollouts: Any) -> Any:
            raise AssertionError

    settings, diagnosis = config(algorithm={"adv_estimator": "mine.py:Mine"}), Diagnosis()
    for step in range(1, 4):
        diagnosis.after_step(settings, Mine(), step, CONSTANT, UPDATED, lambda: "same")
    assert ("constant_reward" in kinds(diagnosis)) is not learns


def test_an_actor_that_is_to_stay_as_it_is_is_not_looked_at() -> None:
    settings, diagnosis = config(router={"enable": True, "train_actor": False}), Diagnosis()

    def never() -> str:
        raise AssertionError

    for step in range(1, 12):
        diagnosis.before_step(settings, never)
        diagnosis.after_step(settings, load_estimator(settings), step, HEALTHY, {}, never)
    assert diagnosis.updated is None
    assert diagnosis.end(11).found == []
    assert diagnosis.findings == []


def test_a_run_that_saw_no_step_says_nothing() -> None:
    diagnosis = Diagnosis()
    assert diagnosis.end(0).found == []
    assert diagnosis.updated is None


@pytest.mark.parametrize("cut", range(12))
def test_a_resumed_run_finds_what_one_in_one_piece_finds(cut: int) -> None:
    steps = [[*CONSTANT, too_long()]] * 12
    whole, _ = after(steps, metrics=DROPPED)
    first, _ = after(steps[:cut], metrics=DROPPED)
    first.begin([])
    resumed = Diagnosis()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    resumed, _ = after(steps[cut:], resumed, metrics=DROPPED)
    assert resumed == whole
    assert kinds(whole) == ["prompt_too_long", "constant_reward", "weights_unchanged"]


def test_earlier_findings_are_reported_again_on_resume() -> None:
    finding = Finding("one_family", "warning", "cause", cure="cure")
    diagnosis = Diagnosis()
    assert diagnosis.begin([finding]).found == [finding]
    resumed = Diagnosis()
    resumed.load_state_dict(diagnosis.state_dict())
    assert resumed.begin([finding]).found == [finding]
    assert resumed.findings == [finding]
    assert str(finding) == "one_family: cause. cure."


def test_a_checkpoint_without_a_diagnosis_is_watched_from_where_it_is() -> None:
    diagnosis = Diagnosis()
    diagnosis.load_state_dict({})
    assert kinds(after([CONSTANT] * 3, diagnosis)[0]) == ["constant_reward"]


def test_a_state_of_another_version_is_read_as_far_as_it_is_known() -> None:
    older, newer = Diagnosis(), Diagnosis()
    older.load_state_dict({"updated": False, "steps": 3, "findings": []})
    (finding,) = older.end(3).found
    assert (finding.name, finding.step) == ("weights_unchanged", 3)
    assert "lacks the reason" in finding.says
    newer.load_state_dict({"findings": [{"kind": "x", "cause": "c", "cure": "d", "step": 1, "new": 2}], "new": 3})
    assert newer.findings == [Finding("x", "warning", "c", cure="d", step=1)]


def test_the_cure_for_a_users_parser_names_it() -> None:
    fault = "PolicyError: rollout.tool_parser: my_format.py:parse failed: ValueError: no"
    failed = [scored(0.0, stop=StopReason.POLICY_FAULT, fault=fault)] * 2
    assert after([failed] * 3)[0].findings[0].cure.startswith("Fix the parser given as rollout.tool_parser")


LATE = [scored(0.0, calls={"search": 2}, failed={"timeout": 2}), scored(1.0)]


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([LATE] * 3, "search: timeout"),
        ([LATE, HEALTHY, LATE], "search: timeout"),  # nobody called a tool in the second step
        ([[*LATE, scored(calls={"search": 4}, failed={"bad_arguments": 4})]] * 3, "search: timeout"),
        ([[*LATE, scored(calls={"look": 1})]] * 3, "search: timeout"),
        (
            [[scored(0.0, calls={"a": 1, "b": 1}, failed={"exception": 2}), scored()]] * 3,
            "a: exception, b: exception",
        ),
        ([[*LATE, *[scored(calls={"search": 1})] * 2]] * 3, None),
        ([LATE, LATE, [scored(0.0, calls={"search": 1}), scored(1.0)]], None),
        ([LATE, [scored(calls={"look": 1}, failed={"timeout": 1}), scored(0.0)], LATE], None),
        ([[scored(0.0, calls={"search": 1}, failed={"tool_error": 1}), scored()]] * 3, None),
        ([[scored(0.0, calls={"a": 1, "b": 1}, failed={"timeout": 1}), scored()]] * 3, None),
    ],
)
def test_a_tool_that_fails_on_nearly_every_call_is_named(steps: Any, says: str | None) -> None:
    findings = after(steps)[0].findings
    assert [finding.name for finding in findings] == ([] if says is None else ["tool_failed"])
    if says is not None:
        assert findings[0].says.endswith(f"whatever the model asked: {says}")
        assert ("multi_turn.tool_timeout_s = 30" in findings[0].cure) == ("timeout" in says)


def test_a_tool_that_works_later_withdraws_it() -> None:
    _, changes = after([*[LATE] * 4, HEALTHY, [scored(0.0, calls={"search": 1}), scored()]])
    assert [[f.name for f in c.withdrawn] for c in changes] == [[], [], [], [], [], ["tool_failed"]]


def on_route(route: str, s: ScoredRollout) -> ScoredRollout:
    return replace(s, rollout=replace(s.rollout, route=route))


def test_a_route_whose_server_is_down_is_named() -> None:
    dead = on_route("ask", scored(0.0, stop=StopReason.POLICY_FAULT, fault="ServerError: refused"))
    step = [on_route("myself", scored(1.0)), on_route("myself", scored(0.0)), dead, dead]
    routes = [{"name": "myself"}, {"name": "ask", "policy": "expert", "price": 1.0}]
    policies = {"expert": {"base_url": "http://127.0.0.1:1/v1", "model": "m"}}
    settings = SETTINGS.model_copy(
        update={"router": RouterConfig.model_validate({"routes": routes, "policies": policies})}
    )
    (finding,) = after([step] * 3, settings=settings)[0].findings
    assert finding.name == "route_failed"
    assert finding.says.endswith("ask: ServerError: refused")
    assert finding.cure == "Check that the server of [router.policies.expert] runs and that its address is right"
    alive = [*step, on_route("ask", scored(1.0))]
    assert kinds(after([step, step, alive], settings=settings)[0]) == []


def test_if_every_route_fails_it_is_not_the_routes() -> None:
    dead = scored(0.0, stop=StopReason.POLICY_FAULT, fault="ServerError: refused")
    assert kinds(after([[on_route("a", dead), on_route("b", dead)]] * 3)[0]) == ["episodes_failed"]


def test_hdpo_without_a_correct_rollout_says_so() -> None:
    hdpo = RunConfig.model_validate({"algorithm": {"adv_estimator": "hdpo"}})
    (finding,) = after([[scored(0.9), scored(0.1)]] * 3, settings=hdpo)[0].findings
    assert finding.name == "none_correct"
    assert "at most 0.9, and algorithm.correct_threshold = 1" in finding.says
    assert kinds(after([HEALTHY] * 3, settings=hdpo)[0]) == []
