"""The GSM8K reward: the number after `####`, or the last one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolwise.errors import ConfigError, DataError
from toolwise.messages import Message
from toolwise.rewards import Reward
from toolwise.rewards.executor import InProcessExecutor
from toolwise.rewards.library.gsm8k import find_answer, gold_answer, gsm8k_reward
from toolwise.types import Rollout, StopReason, Task, Usage

DATA = Path(__file__).parents[2] / "fixtures" / "gsm8k.jsonl"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so it is\n#### 72", "72"),
        ("####72", "72"),
        ("#### 1,234", "1234"),
        ("#### -5", "-5"),
        ("#### $1,000.50", "1000.50"),
        ("#### -$3", "-3"),
        ("#### 72.", "72"),
        ("#### 72,", "72"),
        ("#### 20%", "20"),
        ("#### 72.00", "72"),
        ("#### 72 clips", "72"),
        ("#### 1\n#### 2", "2"),
        ("#### 72\nI hope this helps.", "72"),
        ("<think>#### 1</think>#### 2", "2"),
        ("<think>#### 1</think>two", None),
        ("<think>#### 1", None),
        ("the answer is 72", None),
        ("#### seventy-two", None),
        ("#### 72/3", None),
        ("#### 72x", None),
        ("#### the answer is 72", None),
        ("#### ", None),
        ("### 72", None),
        ("", None),
    ],
)
def test_strict(text: str, number: str | None) -> None:
    found = find_answer(text, "strict")
    assert found == (None if number is None else gold_answer(number))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("the answer is 72.", "72"),
        ("5 + 67 = 72", "72"),
        ("it costs $1,234.", "1234"),
        ("-7 degrees", "-7"),
        ("#### 72", "72"),
        ("<think>99</think> it is 72", "72"),
        ("<think>99", None),
        ("no number", None),
    ],
)
def test_flexible(text: str, number: str | None) -> None:
    found = find_answer(text, "flexible")
    assert found == (None if number is None else gold_answer(number))


def compute_score(
    reply: str, truth: str, method: Literal["strict", "flexible"] = "strict", format_score: float = 0.0
) -> float | None:
    return gsm8k_reward([Message(role="assistant", content=reply)], truth, method, format_score).score


def gold_rows() -> list[str]:
    return [json.loads(line)["answer"] for line in DATA.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("method", ["strict", "flexible"])
def test_every_gold_solution_scores_the_most(method: Literal["strict", "flexible"]) -> None:
    rows = gold_rows()
    assert len(rows) == 60
    assert [compute_score(row, row, method) for row in rows] == [1.0] * 60
    finals = [row.rpartition("####")[2].strip() for row in rows]
    assert [compute_score(row, final, method) for row, final in zip(rows, finals, strict=True)] == [1.0] * 60
    assert any("," in final for final in finals)
    assert any("-" in final for final in finals)


def test_another_number_earns_the_format_score() -> None:
    assert compute_score("#### 71", "72", format_score=0.1) == 0.1
    assert compute_score("71", "72", format_score=0.1) == 0
    assert compute_score("#### 72", "72", format_score=0.1) == 1.0


@settings(deadline=None)
@given(st.decimals(-(10**9), 10**9, places=2), st.booleans())
def test_however_a_number_is_written_it_is_found(value: Any, commas: bool) -> None:
    text = f"{value:,}" if commas else str(value)
    assert compute_score(f"#### {text}", str(value)) == 1
    assert compute_score(f"so {text}.", str(value), "flexible") == 1
    assert compute_score(f"#### {value + 1}", str(value)) == 0


@pytest.mark.parametrize("truth", [72, 72.0, "72", "72.0", "$72", "48 + 24 = 72\n#### 72"])
def test_forms_of_a_ground_truth(truth: Any) -> None:
    assert compute_score("#### 72", truth) == 1


@pytest.mark.parametrize("truth", [None, "", "seventy", "72 or 73", True, float("nan"), [72]])
def test_a_ground_truth_without_a_number_is_an_error(truth: Any) -> None:
    with pytest.raises(DataError, match="ground truth"):
        compute_score("#### 72", truth)


def test_an_unknown_method_is_an_error() -> None:
    method: Any = "lenient"
    with pytest.raises(ConfigError, match="strict or flexible"):
        find_answer("#### 1", method)


def test_the_reward_by_reference() -> None:
    task = Task(task_id="t", prompt=[Message(role="user", content="?")], ground_truth="1,072")
    texts = ["#### 1072", "1072", "#### 5", "none"]
    rollouts = [
        Rollout(
            t,
            "g",
            0,
            0,
            task,
            None,
            (),
            [*task.prompt, Message(role="assistant", content=t)],
            StopReason.ANSWERED,
            Usage(),
        )
        for t in texts
    ]

    def scores(kwargs: dict[str, Any]) -> list[float | None]:
        reward = Reward.of("toolwise.rewards.library.gsm8k:gsm8k_reward", kwargs)
        return [r.score for r in asyncio.run(InProcessExecutor().evaluate(reward, rollouts, step=3))]

    assert scores({}) == [1, 0, 0, 0]
    assert scores({"method": "flexible", "format_score": 0.1}) == [1, 1, 0.1, 0]


def test_the_reward_says_why() -> None:
    result = gsm8k_reward([Message(role="assistant", content="#### 5")], 6)
    assert result.reason == "answered 5, expected 6"
    assert {name: metric.score for name, metric in result.metrics.items()} == {"correct": 0, "answered": 1}
    assert gsm8k_reward([], 6).reason == "answered nothing, expected 6"
