"""OTC: among the correct rollouts of a task, those with the fewest tool calls earn the most (arXiv 2504.14870).

    score = r_tool(m) if the rollout is correct, else 0
    r_tool(m) = sin(f·π / 2n),  f = 2nm / (m + n)     n > 0: the fewest calls of a correct rollout of the group
    r_tool(m) = cos(m·π / (2m + c))                    n = 0: some correct rollout made no call

m is the rollout's number of calls, or what they cost if `prices` are given, and c is `smoothing`. r_tool is 1 at m = n
and falls as m grows beyond it. OTC trains an actor to use few calls without a router, so it serves as a baseline of the
frontier.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from toolwise.errors import ConfigError
from toolwise.messages import Message, as_messages
from toolwise.rewards.function import Reward, reward_function
from toolwise.rewards.results import read_result
from toolwise.rewards.transcript import read_tool_calls
from toolwise.types import EvaluateResult, MetricResult


def tool_productivity(calls: float, fewest: float, smoothing: float = 1.0) -> float:
    """r_tool of a rollout with `calls` calls (or their cost); `fewest` is the minimum over the correct rollouts of its
    group."""
    if fewest == 0:
        return 1.0 if calls == 0 else math.cos(calls * math.pi / (2 * calls + smoothing))
    return math.sin(2 * fewest * calls / (calls + fewest) * math.pi / (2 * fewest))


@reward_function(mode="group")
def otc_reward(
    group_messages: Sequence[Sequence[Message]],
    ground_truth: Any,
    correct: str = "",
    threshold: float = 1.0,
    smoothing: float = 1.0,
    correct_kwargs: dict[str, Any] | None = None,
    prices: dict[str, float] | None = None,
) -> list[EvaluateResult]:
    """`correct` names a pointwise reward. A rollout is correct if the reward's "correct" metric, or else its score, is
    at least `threshold`. `prices` says what a call of each tool counts, "*" for all others; by default each counts 1.
    """
    if not correct:
        raise ConfigError("otc: `correct` is missing: name a reward that scores correctness, as module:function")
    if not smoothing > 0:
        raise ConfigError(f"otc: smoothing is {smoothing}; must be above 0")
    if (judge := Reward.of(correct, correct_kwargs or {})).mode != "pointwise":
        raise ConfigError(f"otc: {correct} is a {judge.mode} reward; name a pointwise one")
    results = [read_result(judge(as_messages(messages), ground_truth, **judge.kwargs)) for messages in group_messages]
    table = _checked_prices(prices)
    calls = [_spent(as_messages(messages), table) for messages in group_messages]
    outcomes = [result.correctness >= threshold if result.has_valid_score else False for result in results]
    fewest = min((count for count, is_correct in zip(calls, outcomes, strict=True) if is_correct), default=0)
    return [
        _otc_result(result, is_correct, count, fewest, smoothing)
        for result, is_correct, count in zip(results, outcomes, calls, strict=True)
    ]


def _checked_prices(prices: dict[str, float] | None) -> dict[str, float]:
    for name, price in (prices or {}).items():
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price < math.inf:
            raise ConfigError(f"otc: the price of {name!r} is {price!r:.40}: give a number of at least 0")
    return prices or {}


def _spent(messages: Sequence[Message], prices: dict[str, float]) -> float:
    """A call without a price, also one that names no tool, counts as the dearest one."""
    named = [call.name for m in messages if m.role == "assistant" for call in read_tool_calls(m)]
    other = prices.get("*", max(prices.values(), default=1.0))
    return math.fsum(prices.get(name or "", other) for name in named)


def _otc_result(
    result: EvaluateResult, is_correct: bool, calls: float, fewest: float, smoothing: float
) -> EvaluateResult:
    if not result.has_valid_score:
        return result
    return EvaluateResult(
        score=tool_productivity(calls, fewest, smoothing) if is_correct else 0.0,
        reason=f"{'correct' if is_correct else 'incorrect'} with {calls:g} calls; fewest of a correct one: {fewest:g}",
        metrics={"correct": MetricResult(score=float(is_correct)), "calls": MetricResult(score=calls)},
    )
