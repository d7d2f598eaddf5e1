"""The GSM8K answer checker: right, wrong, repeated; and what counts as the answer."""

from __future__ import annotations

import asyncio
from fractions import Fraction
from typing import Any

import pytest

from toolwise.errors import ConfigError, DataError
from toolwise.tools.builtin.gsm8k import Gsm8kTool, final_number


def answers(*given: Any, ground_truth: Any = "72", config: dict[str, Any] | None = None) -> tuple[list[Any], Any]:
    async def run() -> tuple[list[Any], Any]:
        tool = Gsm8kTool(config or {})
        instance = await tool.create(ground_truth=ground_truth)
        results = [(await tool.execute(instance, {"answer": answer}))[:2] for answer in given]
        reward = await tool.calc_reward(instance)
        await tool.release(instance)
        return results, reward

    return asyncio.run(run())


def test_a_right_answer() -> None:
    assert answers("72") == ([("Your answer is right.", 0.0)], 1.0)


def test_a_first_wrong_answer_costs_nothing() -> None:
    assert answers("71") == ([("Your answer is wrong.", 0.0)], 0.0)


def test_a_repeated_answer_costs_where_it_is_no_better() -> None:
    results, reward = answers("70", "71", "72", "72")
    assert [step for _, step in results] == [0.0, -0.05, 0.0, -0.05]
    assert reward == 1.0


def test_the_last_answer_counts() -> None:
    assert answers("72", "71")[1] == 0.0
    assert answers()[1] == 0.0


def test_the_penalty_is_configurable() -> None:
    assert answers("1", "2", config={"penalty": 0.2})[0][1][1] == -0.2
    with pytest.raises(ConfigError, match="penalty must be a number ≥ 0"):
        Gsm8kTool({"penalty": -1})


def test_an_answer_without_a_number_is_said() -> None:
    assert answers("many") == ([("No number was found in your answer.", 0.0)], 0.0)
    assert answers(None)[1] == 0.0


@pytest.mark.parametrize(
    "answer", ["72", "#### 72", "72.0", "$72", "72.", " 72 ", "The answer is 72", 72, "70 or #### 72"]
)
def test_forms_of_the_same_answer(answer: Any) -> None:
    assert answers(answer)[1] == 1.0


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,234.5", Fraction(2469, 2)),
        ("-3", Fraction(-3)),
        ("6 * 2 = 12\n#### 12", Fraction(12)),
        ("1 2 3", Fraction(3)),
        (".5", Fraction(1, 2)),
        ("", None),
        ("#### none 5 #### x", None),
    ],
)
def test_the_final_number_of_a_text(text: str, number: Fraction | None) -> None:
    assert final_number(text) == number


@pytest.mark.parametrize("ground_truth", [None, "", "no number"])
def test_a_task_without_a_usable_ground_truth_is_named(ground_truth: Any) -> None:
    with pytest.raises(DataError, match="ground_truth must contain a number"):
        answers(ground_truth=ground_truth)


def test_a_huge_answer_ends_at_once() -> None:
    assert answers("9" * 1_000_000)[1] == 0.0


def test_it_is_called_an_oracle() -> None:
    assert "oracle" in (Gsm8kTool.__doc__ or "")
