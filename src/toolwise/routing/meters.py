"""What a rollout used besides calls, as amounts that a price list can price: tokens, thinking tokens, seconds.

    tokens            sampled by the policy, thoughts included
    thinking_tokens   those inside thoughts
    prompt_tokens     read by the policy, summed over turns, as servers charge for them
    seconds           measured time of the calls, without waiting for a worker, and of the replies where another model
                      than the trained one answers; noisy

With `_1k` after its name, an amount of tokens is in thousands, as prices in money are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from toolwise.config.router import METER_NAMES, SECONDS_METER
from toolwise.types import Rollout

CountThinking = Callable[[Rollout], int]
THINKING_METER = "thinking_tokens"
_THOUSANDS = "_1k"
METERS: dict[str, tuple[str, float]] = {
    name: (name.removesuffix(_THOUSANDS), 1e-3 if name.endswith(_THOUSANDS) else 1.0) for name in METER_NAMES
}
"""name in a price list -> (what is measured, the factor from its amount to that of the name)"""


def read_meters(rollout: Rollout, names: Collection[str], count_thinking: CountThinking | None) -> dict[str, float]:
    """The amounts by the names of a price list. Without `count_thinking`, thinking tokens are the share of the sampled
    tokens that thoughts have of the characters."""
    amounts: dict[str, float] = {}
    for name in names:
        measured, factor = METERS[name]
        amounts[name] = factor * _amount(measured, rollout, count_thinking)
    return amounts


def _amount(measured: str, rollout: Rollout, count_thinking: CountThinking | None) -> float:
    usage = rollout.usage
    if measured == "tokens":
        return float(usage.sampled_tokens)
    if measured == "prompt_tokens":
        return float(usage.prompt_tokens)
    if measured == SECONDS_METER:
        # The trained model's own replies are generated in large batches, which says nothing about a single question.
        return sum(usage.tool_s.values()) + (usage.reply_s if rollout.answered_by else 0.0)
    return float(estimate_thinking(rollout) if count_thinking is None else count_thinking(rollout))


def estimate_thinking(rollout: Rollout) -> float:
    """Thinking tokens from the lengths of texts, where there is no tokenizer to count them."""
    total = 0.0
    for step in rollout.steps:
        text = step.raw_policy_output or ""
        thought, closed, _ = text.partition("</think>")
        inside = len(thought.rpartition("<think>")[2]) if closed else 0
        total += len(step.tokens.token_ids) * inside / max(1, len(text))
    return total
