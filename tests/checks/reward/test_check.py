"""A good reward passes; each bad one fails for its own reason and no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sample_rollouts import sample_rows
from selection import quick_first

from toolwise.checks.reward.check import RewardCheck, check_reward
from toolwise.checks.reward.starter import create_reward_files
from toolwise.checks.reward.stored_rollouts import StoredRollout, read_rollouts
from toolwise.config.schema import RewardConfig, SandboxConfig
from toolwise.errors import RewardError
from toolwise.training.evaluate import build_scoring

MakeStored = Callable[..., list[StoredRollout]]
MakeReward = Callable[[str], str]

RIGHT = """
def right(messages, ground_truth):
    last = messages[-1]
    return last.role == "assistant" and (last.content or "").endswith(f"Answer: {ground_truth}")

"""


def check(reference: str, stored: list[StoredRollout], **options: Any) -> RewardCheck:
    sandbox = SandboxConfig(timeout_s=options.pop("timeout_s", 20.0), memory_mb=256, workers=1)
    config = RewardConfig(function=reference, kwargs=options.pop("kwargs", {}), sandbox=sandbox)
    return check_reward(config, stored, **options)


def verdicts(found: RewardCheck) -> dict[str, str]:
    return {finding.name: finding.verdict for finding in found.findings}


def wrong(found: RewardCheck) -> set[str]:
    return {finding.name for finding in found.findings if finding.verdict == "wrong"}


@pytest.mark.parametrize("mode", ["pointwise", "batch", "group"])
def test_the_starters_pass_on_their_sample(mode: Any, tmp_path: Path) -> None:
    code, rollouts = create_reward_files(tmp_path, "mine", mode)
    found = check(str(code), read_rollouts(rollouts))
    assert found.ok
    assert set(verdicts(found)) == {"results", "determinism", "speed", "spread", "steps", "gold", "empty"}
    assert set(verdicts(found).values()) == {"ok"}
    assert (found.mode, found.rollouts, found.tasks) == (mode, 12, 3)


BAD: dict[str, tuple[str, set[str], str]] = {
    "random": (
        "import random\ndef judge(messages, ground_truth):\n"
        "    return float(right(messages, ground_truth) or random.random() / 2)",
        {"determinism"},
        "a different result on the second pass",
    ),
    "a counter": (
        "seen = []\ndef judge(messages, ground_truth):\n    seen.append(1)\n"
        "    return float(right(messages, ground_truth) or 0.001 * len(seen))",
        {"determinism"},
        "a different result on the second pass",
    ),
    "constant": ("def judge(messages, ground_truth):\n    return 1.0", {"spread", "empty"}, "gives no training signal"),
    "the same within each group": (
        "def judge(messages, ground_truth):\n    return float(ground_truth)",
        {"spread", "empty"},
        "in all 3 groups every rollout scores the same",
    ),
    "a wrong type": (
        "def judge(messages, ground_truth):\n    return 'good' if right(messages, ground_truth) else 0.0",
        {"results", "gold", "spread"},
        "bad_type",
    ),
    "not a number": (
        "def judge(messages, ground_truth):\n"
        "    return float('nan') if len(messages) == 4 else float(right(messages, ground_truth))",
        {"results"},
        "non_finite",
    ),
    "raises on some": (
        "def judge(messages, ground_truth):\n    if messages[1].tool_calls:\n        raise KeyError('no such thing')\n"
        "    return float(right(messages, ground_truth))",
        {"results"},
        "6 exception",
    ),
    "gold is not best": (
        "def judge(messages, ground_truth):\n    return right(messages, ground_truth) + 0.5 * len(messages)",
        {"gold"},
        "3 of 3 gold answers score below",
    ),
    "empty is best": (
        "def judge(messages, ground_truth):\n"
        "    return 2.0 if not messages[-1].content else float(right(messages, ground_truth))",
        {"empty"},
        "an empty answer scores best on 3 of 3 tasks",
    ),
    "fails on an empty answer": (
        "def judge(messages, ground_truth):\n"
        "    return float(messages[-1].content[0] == 'A' and right(messages, ground_truth))",
        {"empty"},
        "the reward fails on 3 of 3 empty answers",
    ),
    "a step that is no number": (
        "from toolwise import EvaluateResult, StepOutput\ndef judge(messages, ground_truth):\n"
        "    steps = [StepOutput(step_index=0, base_reward=float('nan'))]\n"
        "    return EvaluateResult(score=float(right(messages, ground_truth)), step_outputs=steps)",
        {"steps"},
        "non_finite",
    ),
    "steps out of range": (
        "from toolwise import EvaluateResult, StepOutput\ndef judge(messages, ground_truth):\n"
        "    steps = [StepOutput(step_index=i, base_reward=0.0) for i, _ in enumerate(messages)]\n"
        "    return EvaluateResult(score=float(right(messages, ground_truth)), step_outputs=steps)",
        {"steps"},
        "18 unmatched step_index",
    ),
    "too few results": (
        "def judge(group_messages, ground_truth):\n    return [1.0]",
        {"results", "spread"},
        "12 wrong_length",
    ),
}


@pytest.mark.parametrize("name", quick_first(BAD, [*BAD][::2]))
def test_a_bad_reward_fails_for_its_own_reason(name: str, make_stored: MakeStored, make_reward: MakeReward) -> None:
    code, names, words = BAD[name]
    found = check(make_reward(RIGHT + code), make_stored())
    assert not found.ok
    assert wrong(found) == names
    assert words in " ".join(finding.says for finding in found.findings)


@pytest.mark.long
def test_the_first_traceback_of_each_kind_is_told(make_stored: MakeStored, make_reward: MakeReward) -> None:
    code, _, _ = BAD["raises on some"]
    results = check(make_reward(RIGHT + code), make_stored()).findings[0]
    assert results.figures["errors"] == {"exception": 6}
    (told,) = results.details
    assert told.startswith("exception, first on task-0/rollout-1: KeyError")
    assert "judge.py" in told
    assert "Traceback" in told


def test_a_reward_that_depends_on_the_order_is_found(make_stored: MakeStored, make_reward: MakeReward) -> None:
    """The second pass sees what the first saw, the third in reverse does not."""
    reference = make_reward(
        "def judge(rollouts_messages, ground_truths):\n"
        "    return [len(m[-1].content or '') + place for place, m in enumerate(rollouts_messages)]"
    )
    found = check(reference, make_stored(), gold=False)
    determinism = next(f for f in found.findings if f.name == "determinism")
    assert wrong(found) == {"determinism"}
    assert "it depends on their order, or keeps state between calls" in determinism.says
    assert determinism.figures["differ_again"] == 0
    assert determinism.figures["differ_elsewhere"] == 12


@pytest.mark.long
def test_a_reward_that_hangs_ends_before_long(make_stored: MakeStored, make_reward: MakeReward) -> None:
    found = check(
        make_reward("def judge(messages, ground_truth):\n    while True:\n        pass"), make_stored(), timeout_s=0.5
    )
    results = found.findings[0]
    assert results.figures == {"scored": 0, "errors": {"timeout": 3}, "not_valid": 0, "not_tried": 9}
    assert wrong(found) == {"results", "spread"}


@pytest.mark.long
def test_one_rollout_that_hangs_does_not_end_the_check(make_stored: MakeStored, make_reward: MakeReward) -> None:
    reference = make_reward(
        f"{RIGHT}\ndef judge(messages, ground_truth):\n"
        "    while 'rather' in (messages[-1].content or '') and ground_truth == '42':\n        pass\n"
        "    return float(right(messages, ground_truth))"
    )
    found = check(reference, make_stored(), timeout_s=1.0)
    assert found.findings[0].figures == {"scored": 11, "errors": {"timeout": 1}, "not_valid": 0, "not_tried": 0}
    assert wrong(found) == {"results"}


def test_a_reward_that_cannot_be_loaded_is_one_line(make_stored: MakeStored, make_reward: MakeReward) -> None:
    with pytest.raises(RewardError, match=r"judge\.py.*SyntaxError"):
        check(make_reward("def judge(messages, ground_truth:\n    return 1"), make_stored())


def test_an_argument_that_it_does_not_take_is_refused(make_stored: MakeStored, make_reward: MakeReward) -> None:
    with pytest.raises(RewardError, match="takes no argument 'prise'"):
        check(make_reward("def judge(messages, ground_truth):\n    return 1.0"), make_stored(), kwargs={"prise": 1})


def test_an_argument_that_nobody_gives_is_named(make_stored: MakeStored, make_reward: MakeReward) -> None:
    with pytest.raises(RewardError, match="requires the argument 'rubric'"):
        check(make_reward("def judge(messages, ground_truth, rubric):\n    return 1.0"), make_stored())


def test_columns_reach_the_function(make_stored: MakeStored, make_reward: MakeReward) -> None:
    rows = [{**row, "rubric": number} for number, row in enumerate(sample_rows())]
    reference = make_reward("def judge(messages, ground_truth, rubric):\n    return float(rubric)")
    found = check(reference, make_stored(rows), gold=False)
    spread = next(f for f in found.findings if f.name == "spread")
    assert (spread.figures["min"], spread.figures["max"]) == (0.0, 11.0)


def test_gold_answers_are_the_ground_truths_where_no_one_gives_any(make_stored: MakeStored) -> None:
    """RLLA's ground truth is the answer itself; GSM8K expects it after the `####` mark."""
    rows = [{key: value for key, value in row.items() if key != "gold"} for row in sample_rows()]
    for row in rows:
        row["messages"][-1]["content"] = row["messages"][-1]["content"].replace("Answer: ", "#### ")
    found = check("toolwise.rewards.library.gsm8k:gsm8k_reward", make_stored(rows))
    gold = next(f for f in found.findings if f.name == "gold")
    assert found.ok
    assert gold.figures == {"tasks": 3, "with_gold": 3, "beaten": 0, "forms": ["#### {}"]}


def test_gold_answers_of_rlla_score_best(make_stored: MakeStored) -> None:
    gold = '<think> I look. </think>\n<tool_call>\n{"name": "search", "parameters": {"page": 1}}\n</tool_call>'
    said = [gold, gold.replace('"page": 1', '"page": 2'), "I do not know."]
    prompt = [{"role": "system", "content": "tools"}, {"role": "user", "content": "<user> look </user>"}]
    rows = [
        {"messages": [*prompt, {"role": "assistant", "content": text}], "ground_truth": gold, "task_id": "one"}
        for text in said
    ]
    found = check("toolwise.rewards.library.rlla:rlla_reward", make_stored(rows))
    spread = next(f for f in found.findings if f.name == "spread")
    assert found.ok
    assert (spread.figures["min"], spread.figures["max"]) == (-3.0, 4.0)


def test_all_rollouts_wrong_is_no_fault_of_the_reward(make_stored: MakeStored, make_reward: MakeReward) -> None:
    rows = [row for row in sample_rows() if not row["messages"][-1]["content"].startswith("Answer")]
    found = check(
        make_reward(f"{RIGHT}\ndef judge(messages, ground_truth):\n    return float(right(messages, ground_truth))"),
        make_stored(rows),
    )
    assert found.ok
    assert verdicts(found)["spread"] == "warning"


def test_the_check_can_be_written_as_json(make_stored: MakeStored, make_reward: MakeReward) -> None:
    told = check(make_reward("def judge(messages, ground_truth):\n    return 1.0"), make_stored()).to_json()
    assert told["ok"] is False
    assert told["mode"] == "pointwise"
    assert [finding["name"] for finding in told["findings"]][:3] == ["results", "determinism", "speed"]


def test_user_code_never_runs_in_this_process(make_stored: MakeStored, make_reward: MakeReward, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    reference = make_reward(
        f"try:\n    open({str(trace)!r}, 'w').close()\nexcept OSError:\n    pass\n"
        f"{RIGHT}\ndef judge(messages, ground_truth):\n    return float(right(messages, ground_truth))"
    )
    assert check(reference, make_stored()).ok
    assert not trace.exists()


CALL = {"id": "c", "type": "function", "function": {"name": "calculator", "arguments": "{}"}}
EARLIER = [
    {"role": "user", "content": "What is 1 times 1?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "1", "tool_call_id": "c"},
    {"role": "assistant", "content": "Answer: 1"},
    {"role": "user", "content": "What is 6 times 7?"},
]
SAMPLED = [
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "42", "tool_call_id": "c"},
    {"role": "assistant", "content": "Shall I go on?"},
    {"role": "user", "content": "Yes."},
    {"role": "assistant", "content": "Answer: 42"},
]


@pytest.mark.parametrize("how", quick_first(["a run's steps", "a prompt", "neither"], ["a prompt"]))
def test_the_starter_aligns_where_users_speak_several_times(how: str, make_stored: MakeStored, tmp_path: Path) -> None:
    row: dict[str, Any] = {"messages": [*EARLIER, *SAMPLED], "ground_truth": "42", "task_id": "t"}
    more: dict[str, Any] = {
        "a run's steps": {"steps": [{}, {}, {}], "trained_on": True},
        "a prompt": {"prompt": EARLIER},
        "neither": {},
    }[how]
    stored = make_stored([{**row, **more}])
    reference = str(create_reward_files(tmp_path / "started", "mine")[0])
    steps = next(finding for finding in check(reference, stored, gold=False).findings if finding.name == "steps")
    assert steps.verdict == "ok", steps
    assert "match their steps" in steps.says
    scoring = build_scoring(RewardConfig(function=reference))
    try:
        [result] = asyncio.run(scoring.evaluate([stored[0].rollout], step=0))
    finally:
        scoring.close()
    prices = [-0.1, 0.0, 0.0] if how != "neither" else [-0.05, 0.0, -0.1, 0.0, 0.0]
    assert [output.base_reward for output in result.step_outputs or ()] == pytest.approx(prices)
    assert result.score == pytest.approx(1.0 + sum(prices))
