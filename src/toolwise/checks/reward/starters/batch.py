"""A reward that scores all rollouts of a step in one call. Edit it, then check it before you train:

toolwise check reward my_reward.py --rollouts my_reward_rollouts.jsonl
"""

import re

from toolwise import EvaluateResult, Message, MetricResult, reward_function

ANSWER = re.compile(r"Answer:\s*(\S+)\s*$")


@reward_function
def my_reward(
    rollouts_messages: list[list[Message]], ground_truths: list[str], wordy: int = 200
) -> list[EvaluateResult]:
    """1 for the right answer, 0.9 if it has more than `wordy` words. Returns one result per rollout, in order.

    Use this mode for work that is cheaper in bulk, such as one request to a server. One call mixes rollouts of
    different tasks, so do not compare them here; use the mode `group` for that. `wordy` is an option of this function:
    set it in `reward.kwargs`.
    """
    answers = [final_answer(messages) for messages in rollouts_messages]
    # A single request for all answers would go here.
    return [judge(answer, truth, wordy) for answer, truth in zip(answers, ground_truths, strict=True)]


def final_answer(messages: list[Message]) -> str:
    """Handle every case: there may be no reply at all, or one without text."""
    last = messages[-1] if messages else None
    return (last.content or "") if last is not None and last.role == "assistant" else ""


def judge(answer: str, truth: str, wordy: int) -> EvaluateResult:
    match = ANSWER.search(answer)
    correct = float(match is not None and match[1] == truth)
    too_long = len(answer.split()) > wordy
    return EvaluateResult(
        score=correct * (0.9 if too_long else 1.0),
        reason=f"answered {match[1] if match else 'nothing'}; {truth} is right",  # shown with the rollout
        metrics={"correct": MetricResult(score=correct)},  # logged during training
    )
