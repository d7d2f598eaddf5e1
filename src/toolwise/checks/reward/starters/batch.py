"""A reward for all rollouts of a step at once. Change it, then look at it before you train:

toolwise check reward my_reward.py --rollouts my_reward_rollouts.jsonl
"""

import re

from toolwise import EvaluateResult, Message, MetricResult, reward_function

ANSWER = re.compile(r"Answer:\s*(\S+)\s*$")


@reward_function
def my_reward(
    rollouts_messages: list[list[Message]], ground_truths: list[str], wordy: int = 200
) -> list[EvaluateResult]:
    """1 for the right answer, a little less for one with more than `wordy` words: one result a rollout, in order.

    For work that is cheaper done together, such as one request to a server. Rollouts of different tasks come in one
    call, so compare none of them here; that is what the mode `group` is for. `wordy` is an option of this function:
    give it in `reward.kwargs`.
    """
    answers = [last_words(messages) for messages in rollouts_messages]
    # Here would stand the one call for all of them.
    return [judge(answer, truth, wordy) for answer, truth in zip(answers, ground_truths, strict=True)]


def last_words(messages: list[Message]) -> str:
    """Anything may come: no reply at all, or one without text. Look before you index."""
    last = messages[-1] if messages else None
    return (last.content or "") if last is not None and last.role == "assistant" else ""


def judge(answer: str, truth: str, wordy: int) -> EvaluateResult:
    found = ANSWER.search(answer)
    correct = float(found is not None and found[1] == truth)
    too_long = len(answer.split()) > wordy
    return EvaluateResult(
        score=correct * (0.9 if too_long else 1.0),
        reason=f"answered {found[1] if found else 'nothing'}; {truth} is right",  # shown with the rollout
        metrics={"correct": MetricResult(score=correct)},  # numbers to watch during training
    )
