"""Finds out whether one side of asynchronous training starves: learner or engine mostly wait."""

from __future__ import annotations

from toolwise.types.findings import Finding

WAITS = ("async/learner_wait", "async/engine_wait")
STARVED_STEPS = 5
"""Steps that are looked at together."""
STARVED = 0.5
"""Share of their time that one side may wait."""
ENOUGH = 4
"""Beyond this, more staleness costs more than it saves."""


def explain_starvation(learner: float, engine: float, max_staleness: int, step: int) -> Finding | None:
    """A warning with a cure if one side waited too long; `learner` and `engine` are shares of the time."""
    if max(learner, engine) < STARVED:
        return None
    if learner >= engine:
        says = f"The learner waited for rollouts in {learner:.0%} of the last {STARVED_STEPS} steps' time"
        cure = "let the engine have more cores, lower rollout.max_new_tokens, or make tools and rewards faster"
    else:
        says = f"The engine had nothing to do in {engine:.0%} of the last {STARVED_STEPS} steps' time"
        cure = "raise rollout.n or data.batch_size, so that more episodes run at once, or make tools and rewards faster"
    if max_staleness < ENOUGH:
        cure = f"raise trainer.max_staleness (now {max_staleness}), so that more groups are under way; or {cure}"
    figures = {"learner_wait": learner, "engine_wait": engine}
    settings = ("trainer.max_staleness", "rollout.n", "data.batch_size", "rollout.max_new_tokens")
    steps = (step - STARVED_STEPS + 1, step)
    return Finding("starvation", "warning", says, figures, cure=cure, step=step, steps=steps, settings=settings)
