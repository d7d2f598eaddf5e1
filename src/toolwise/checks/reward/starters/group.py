"""A reward that compares all rollouts of one task. Edit it, then check it before you train:

toolwise check reward my_reward.py --rollouts my_reward_rollouts.jsonl
"""

import re

from toolwise import EvaluateResult, Message, MetricResult, reward_function

ANSWER = re.compile(r"Answer:\s*(\S+)\s*$")


@reward_function
def my_reward(group_messages: list[list[Message]], ground_truth: str, thrift: float = 0.2) -> list[EvaluateResult]:
    """1 for the right answer, plus up to `thrift` for using fewer tool calls than other correct rollouts.

    Returns one result per rollout, in order. Results must not depend on that order. `thrift` is an option of this
    function: set it in `reward.kwargs`.
    """
    correct = [is_right(messages, ground_truth) for messages in group_messages]
    calls = [sum(len(m.tool_calls or []) for m in messages) for messages in group_messages]
    # Compare only with other correct rollouts: a wrong answer is cheap.
    needed = [n for right, n in zip(correct, calls, strict=True) if right]
    results = []
    for right, n in zip(correct, calls, strict=True):
        beaten = sum(n < other for other in needed) / len(needed) if right else 0.0
        results.append(
            EvaluateResult(
                score=float(right) + thrift * beaten,
                reason=f"{'right' if right else 'wrong'} after {n} calls",  # shown with the rollout
                metrics={"correct": MetricResult(score=float(right))},  # logged during training
            )
        )
    return results


def is_right(messages: list[Message], ground_truth: str) -> bool:
    """Handle every case: there may be no reply at all, or one without text."""
    last = messages[-1] if messages else None
    match = ANSWER.search(last.content or "") if last is not None and last.role == "assistant" else None
    return match is not None and match[1] == ground_truth
