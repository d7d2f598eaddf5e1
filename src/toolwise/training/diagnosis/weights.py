"""Explains why no weight of the actor has changed, from a step's rollouts and metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from toolwise.config.schema import RunConfig
from toolwise.types import ScoredRollout, StopReason

UNCHANGED_STEPS_LIMIT = 10
"""Number of steps after which unchanged weights are a finding."""
_PREFER = (
    "use a reward that distinguishes better replies from worse, more rollouts per task (rollout.n), a higher "
    "rollout.temperature, or tasks that the model sometimes solves"
)


def explain_unchanged(
    config: RunConfig, scored: Sequence[ScoredRollout], metrics: Mapping[str, float], dropped: str
) -> tuple[str, str]:
    """Cause and fix according to the latest step; `dropped` describes the groups of all steps without an update."""
    if not any(s.trainable for s in scored):
        return _nothing_usable(config, scored)
    lr, grad_norm, update_norm = (metrics.get(f"actor/{name}", 0.0) for name in ("lr", "grad_norm", "update_norm"))
    if not metrics.get("actor/updates"):
        return (
            f"{dropped} dropped, because the rewards within each are equal or too few of its rollouts are usable",
            f"To get differences to learn from, {_PREFER}",
        )
    if grad_norm == 0:
        return (
            "the gradient is 0, because all advantages are 0 or the rollouts of a task are identical",
            f"To get differences to learn from, {_PREFER}",
        )
    if lr == 0:
        return f"the learning rate is 0 (actor.lr = {config.actor.lr:g})", "Look at actor.lr_schedule and warmup_steps"
    if update_norm == 0 and metrics.get("actor/skipped_updates"):
        return (
            f"every optimizer step was skipped, the latest with a gradient norm of {grad_norm:.3g}",
            "The log names the rollouts: look for very large rewards; actor.spike_factor = 0 skips only non-finite "
            "gradients",
        )
    return (
        f"updates of norm {update_norm:.1e} are rounded away in {config.model.dtype} weights",
        f"Raise actor.lr (now {config.actor.lr:g})",
    )


def _nothing_usable(config: RunConfig, scored: Sequence[ScoredRollout]) -> tuple[str, str]:
    if not scored:
        return "there were no rollouts", "Look at the log"
    unscored = [s for s in scored if s.rollout.trainable and not s.result.has_valid_score]
    (reason, _), *_ = Counter(s.rollout.stop_reason for s in scored).most_common(1)
    if unscored and len(unscored) * 2 >= len(scored):
        detail = " ".join((unscored[0].result.reason or "the result is not valid").split())
        return f"no rollout got a valid score: {detail}", "Test the reward on stored rollouts: toolwise check reward"
    fault = next((s.rollout.fault for s in scored if s.rollout.stop_reason is reason and s.rollout.fault), None)
    detail = f": {fault.partition(': shorten')[0]}" if fault else ""
    if reason is StopReason.PROMPT_TOO_LONG:
        return (
            f"no prompt fits the context{detail}",
            f"Shorten the prompts, or lower rollout.max_new_tokens (now {config.rollout.max_new_tokens})",
        )
    if reason.trainable:
        return "no rollout could be trained on", "Read some in rollouts/: `fault` and `error` say what is wrong"
    return f"the rollouts ended with {reason.value}{detail}", "Fix the tool, environment or server"
