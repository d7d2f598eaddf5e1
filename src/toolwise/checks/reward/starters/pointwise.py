"""A reward for one rollout at a time. Change it, then look at it before you train:

toolwise check reward my_reward.py --rollouts my_reward_rollouts.jsonl
"""

import re

from toolwise import EvaluateResult, Message, StepOutput, reward_function

ANSWER = re.compile(r"Answer:\s*(\S+)\s*$")


@reward_function
def my_reward(
    messages: list[Message], ground_truth: str, price_per_call: float = 0.05, prompt_length: int = 0
) -> EvaluateResult:
    """1 for the right answer, 0 for any other, less a little for every tool call.

    `messages` is the whole conversation; each message has `role`, `content` and `tool_calls`. `ground_truth` comes from
    the data. `price_per_call` is an option of this function: give it in `reward.kwargs`, or as a column of the data.
    `prompt_length` is given by the run: how many of the messages were there before the assistant first acted.
    """
    # The prompt may hold earlier replies, which the policy did not write; users may speak again after it.
    replies = [m for m in messages[prompt_length:] if m.role == "assistant"]

    # Anything may come: no reply at all, or one without text. Look before you index.
    said = (replies[-1].content or "") if replies else ""
    found = ANSWER.search(said)
    correct = float(found is not None and found[1] == ground_truth)
    calls = [len(reply.tool_calls or []) for reply in replies]

    return EvaluateResult(
        score=correct - price_per_call * sum(calls),
        reason=f"answered {found[1] if found else 'nothing'}; {ground_truth} is right",  # shown with the rollout
        metrics={"correct": correct},  # numbers to watch during training
        # Optional: what each step earned. Step 0 is the first time that the assistant acted, not the first message.
        step_outputs=[StepOutput(step_index=step, base_reward=-price_per_call * n) for step, n in enumerate(calls)],
    )
