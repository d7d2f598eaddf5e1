"""The answer checker of the GSM8K recipe: a tool with a step reward and an episode reward."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from toolwise.errors import DataError
from toolwise.tools.base import BuiltinTool, OpenAIFunctionToolSchema, ToolResult, one_argument_schema
from toolwise.tools.function import NonNegativeNumber, checked

DEFAULT_PENALTY = 0.05

# Bounded, so that an answer of a million digits is cheap.
_NUMBER = re.compile(r"-?(?:[0-9][0-9,]{0,99}(?:\.[0-9]{1,100})?|\.[0-9]{1,100})")


@dataclass(slots=True)
class _Instance:
    ground_truth: Fraction
    reward: float = 0.0
    answers: int = 0


class Gsm8kTool(BuiltinTool):
    """Tells the model whether its answer is right.

    **This is an oracle**: with it an agent can guess until the answer is accepted. It is available only if a
    configuration names it; the calculator leaks no answers.

    `create_kwargs`: ground_truth. Configuration: `penalty` (0.05), subtracted for each further answer that is no better
    than the previous one. `calc_reward` is 1.0 if the last answer was right, else 0.0.
    """

    config_keys: ClassVar[frozenset[str]] = frozenset({"penalty"})
    default_schema = one_argument_schema(
        "calc_gsm8k_reward",
        "Checks an answer to the problem: 1.0 if it is correct, 0.0 if it is wrong or missing.",
        "answer",
        "Your answer, in digits.",
    )

    def __init__(
        self, config: dict[str, Any] | None = None, tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        penalty = self.config.get("penalty", DEFAULT_PENALTY)
        self._penalty = float(checked(penalty, NonNegativeNumber, f"tool {self.name}: penalty", "a number ≥ 0"))
        self._instances: dict[str, _Instance] = {}

    async def create(
        self, instance_id: str | None = None, ground_truth: str | float | None = None, **kwargs: Any
    ) -> str:
        instance_id = await super().create(instance_id, **kwargs)
        expected = final_number("" if ground_truth is None else str(ground_truth))
        if expected is None:
            raise DataError(
                f"tool {self.name}: create_kwargs.ground_truth must contain a number, got {ground_truth!r:.80}"
            )
        self._instances[instance_id] = _Instance(expected)
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        instance = self._instances[instance_id]
        answer = final_number(str(parameters.get("answer", "")))
        reward = 1.0 if answer == instance.ground_truth else 0.0
        no_improvement = instance.answers > 0 and reward <= instance.reward
        instance.answers += 1
        instance.reward = reward
        verdict = "Your answer is right." if reward else "Your answer is wrong."
        text = "No number was found in your answer." if answer is None else verdict
        return text, -self._penalty if no_improvement else 0.0, {"ok": answer is not None, "reward": reward}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        return self._instances[instance_id].reward

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._instances.pop(instance_id, None)


def final_number(text: str) -> Fraction | None:
    """The last number after the last `####`, or in the whole text if there is none."""
    numbers = _NUMBER.findall(text.rpartition("####")[2])
    return Fraction(numbers[-1].replace(",", "")) if numbers else None
