"""A reward for all rollouts of one task, which it may compare. Change it, then look at it before you train:

toolwise check reward my_reward.py --rollouts my_reward_rollouts.jsonl
"""

import re

from toolwise import EvaluateResult, Message, MetricResult, reward_function

ANSWER = re.compile(r"Answer:\s*(\S+)\s*$")


@reward_function
def my_reward(group_messages: list[list[Message]], ground_truth: str, thrift: float = 0.2) -> list[EvaluateResult]:
    """1 for the right answer, and up to `thrift` more for fewer tool calls than others needed to get it right.

    One result a rollout, in order. The result must not depend on the order itself. `thrift` is an option of this
    function: give it in `reward.kwargs`.
    """
    correct = [is_right(messages, ground_truth) for messages in group_messages]
    calls = [sum(len(m.tool_calls or []) for m in messages) for messages in group_messages]
    # Compared with those that were right as well: a wrong answer is cheap to give.
    needed = [n for right, n in zip(correct, calls, strict=True) if right]
    results = []
    for right, n in zip(correct, calls, strict=True):
        beaten = sum(n < other for other in needed) / len(needed) if right else 0.0
        results.append(
            EvaluateResult(
                score=float(right) + thrift * beaten,
                reason=f"{'right' if right else 'wrong'} after {n} calls",  # shown with the rollout
                metrics={"correct": MetricResult(score=float(right))},  # numbers to watch during training
            )
        )
    return results


def is_right(messages: list[Message], ground_truth: str) -> bool:
    """Anything may come: no reply at all, or one without text. Look before you index."""
    last = messages[-1] if messages else None
    found = ANSWER.search(last.content or "") if last is not None and last.role == "assistant" else None
    return found is not None and found[1] == ground_truth
