"""Reward signatures, and the porting hint for signatures of other libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolwise.config.schema import RewardConfig
from toolwise.errors import RewardError
from toolwise.rewards import Reward, reward_function
from toolwise.rewards.function import Signature
from toolwise.training.evaluate import build_scoring


def trl(prompts: Any, completions: Any, answer: Any, scale: float = 2.0, **kwargs: Any) -> list[float]:
    return []


def trl_alone(completions: Any, **kwargs: Any) -> list[float]:
    return []


def verl(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None) -> float:
    return 0.0


def verl_batch(
    data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any, **kwargs: Any
) -> list[float]:
    return []


@pytest.mark.parametrize(
    ("function", "first", "shapes"),
    [
        (
            trl,
            "prompts",
            [
                "def trl(messages, ground_truth, answer, scale=2.0, **kwargs)",
                "def trl(rollouts_messages, ground_truths,",
            ],
        ),
        (trl_alone, "completions", ["def trl_alone(messages, ground_truth, **kwargs)"]),
        (verl, "data_source", ["def verl(messages, ground_truth, data_source, extra_info=None)"]),
        (
            verl_batch,
            "data_sources",
            ["def verl_batch(rollouts_messages, ground_truths, data_source, extra_info, **kwargs)"],
        ),
    ],
)
def test_a_reward_of_another_library_is_shown_its_signature(function: Any, first: str, shapes: list[str]) -> None:
    with pytest.raises(RewardError) as caught:
        Reward.of(function)
    said = str(caught.value)
    assert f"its first parameter is {first!r}" in said
    assert 'messages[-1]["content"]' in said
    assert all(shape in said for shape in shapes)
    assert "\n" not in said


def test_a_column_may_have_such_a_name() -> None:
    def judged(messages: Any, ground_truth: Any, prompt: str, completions: int = 1) -> float:
        return 0.0

    assert Reward.of(judged).signature.names == ("prompt", "completions")


def test_whoever_says_the_mode_may_name_the_first_as_they_like() -> None:
    @reward_function(mode="batch")
    def judged(completions: Any, truths: Any) -> list[float]:
        return []

    assert Reward.of(judged).mode == "batch"


@pytest.mark.parametrize("decorator", ["", "from toolwise import reward_function\n@reward_function\n"])
@pytest.mark.parametrize("tier", ["standard", "off"])
def test_it_is_said_when_a_run_starts(tier: str, decorator: str, tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(f"{decorator}def judge(completions, **kwargs):\n    return [0.0]\n")
    config = RewardConfig.model_validate({"function": f"{tmp_path / 'r.py'}:judge", "sandbox": {"tier": tier}})
    with pytest.raises(RewardError, match=r"write def judge\(messages, ground_truth, \*\*kwargs\)") as caught:
        build_scoring(config)
    assert str(caught.value).startswith("reward ")


def test_async_functions_are_known_and_cross_as_data() -> None:
    async def later(messages: Any, ground_truth: Any) -> float:
        return 0.0

    class Judge:
        async def __call__(self, messages: Any, ground_truth: Any) -> float:
            return 0.0

    for function in (later, Judge()):
        signature = Signature.of(function, "f")
        assert signature.is_async
        plain = {
            **signature.to_json(),
            **{key: list(getattr(signature, key)) for key in ("first", "names", "required")},
        }
        assert Signature.from_json(plain) == signature
    assert not Signature.of(lambda messages, ground_truth: 0.0, "f").is_async
