"""A reward for one rollout at a time. Edit it, then check it before you train:

toolwise check reward my_reward.py --rollouts my_reward_rollouts.jsonl
"""

import re

from toolwise import EvaluateResult, Message, StepOutput, reward_function

ANSWER = re.compile(r"Answer:\s*(\S+)\s*$")


@reward_function
def my_reward(
    messages: list[Message], ground_truth: str, price_per_call: float = 0.05, prompt_length: int = 0
) -> EvaluateResult:
    """1 for the right answer, 0 for any other, minus a little for every tool call.

    `messages` is the whole conversation; each message has `role`, `content` and `tool_calls`. `ground_truth` comes from
    the data. `price_per_call` is an option of this function: set it in `reward.kwargs`, or as a column of the data.
    `prompt_length` is filled in by the run: the number of messages before the assistant first acted.
    """
    # The prompt may contain earlier replies that the policy did not write; users may speak again after it.
    replies = [m for m in messages[prompt_length:] if m.role == "assistant"]

    # Handle every case: there may be no reply at all, or one without text.
    answer = (replies[-1].content or "") if replies else ""
    match = ANSWER.search(answer)
    correct = float(match is not None and match[1] == ground_truth)
    calls = [len(reply.tool_calls or []) for reply in replies]

    return EvaluateResult(
        score=correct - price_per_call * sum(calls),
        reason=f"answered {match[1] if match else 'nothing'}; {ground_truth} is right",  # shown with the rollout
        metrics={"correct": correct},  # logged during training
        # Optional: a reward per step. Step 0 is the first assistant turn after the prompt, not the first message.
        step_outputs=[StepOutput(step_index=step, base_reward=-price_per_call * n) for step, n in enumerate(calls)],
    )
