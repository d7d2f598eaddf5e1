"""Example rewards: one for a single rollout, one for a whole batch, one for all rollouts of a task."""

from toolwise import EvaluateResult, MetricResult, StepOutput, reward_function


@reward_function
def right_and_thrifty(messages, ground_truth, price_per_call=0.1, prompt_length=0):
    """Pointwise: one rollout at a time. `price_per_call` comes from `reward.kwargs` in the configuration. The run
    passes `prompt_length`, the number of messages in the prompt: assistant messages there are not the policy's.

    The score is the rollout's total, so it includes the costs of its steps.
    """
    correct = float(ground_truth in (messages[-1].content or ""))
    replies = [m for m in messages[prompt_length:] if m.role == "assistant"]
    calls = [len(reply.tool_calls or []) for reply in replies]
    return EvaluateResult(
        score=correct - price_per_call * sum(calls),
        reason="right" if correct else "wrong",
        metrics={"correct": MetricResult(score=correct)},
        step_outputs=[
            StepOutput(step_index=i, base_reward=-price_per_call * n, reason=f"{n} calls") for i, n in enumerate(calls)
        ],
    )


@reward_function
def shortest_of_the_batch(rollouts_messages, ground_truths):
    """Batch: all rollouts of a training step at once, for rewards that compare them or call a server once."""
    lengths = [len(messages[-1].content or "") for messages in rollouts_messages]
    return [1.0 - length / max(lengths, default=1) for length in lengths]


@reward_function
def rank_within_the_task(group_messages, ground_truth):
    """Group: all rollouts of one task; they share the ground truth."""
    calls = [sum(len(m.tool_calls or []) for m in messages) for messages in group_messages]
    return [float(sum(n < other for other in calls)) for n in calls]
