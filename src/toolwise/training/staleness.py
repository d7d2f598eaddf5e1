"""What asynchronous training reports of each step: how old its tokens were, and who waited for whom."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from toolwise.engine import Engine
from toolwise.engine.weight_swap import tokens_in_flight
from toolwise.errors import ToolwiseError
from toolwise.protocols import Metrics
from toolwise.types import ScoredRollout

if TYPE_CHECKING:
    from toolwise.training.run import Run


class StepWaits:
    """The clock of one step."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.started = time.perf_counter()
        self.learner_s = 0.0
        self._busy_s = self._engine_s()

    @contextmanager
    def learner(self) -> Iterator[None]:
        """The learner waits for groups."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.learner_s += time.perf_counter() - begun

    def _engine_s(self) -> float:
        return self.run.policy.engine.busy_s

    def metrics(self, rolled_out: float) -> Metrics:
        run, finished = self.run, time.perf_counter()
        engine, seconds = run.policy.engine, max(finished - self.started, 1e-9)
        metrics = {
            "time/rollout_s": rolled_out - self.started,
            "time/update_s": finished - rolled_out,
            "time/step_s": finished - self.started,
            "async/learner_wait": self.learner_s / seconds,
            "async/engine_wait": max(0.0, 1.0 - (self._engine_s() - self._busy_s) / seconds),
            "async/queued": float(run.queue.waiting),
            "async/in_progress": float(run.queue.in_progress),
        }
        if isinstance(engine, Engine) and not run.config.cluster.address:
            # on a cluster this engine samples nothing, and workers report when a group ends: what was, not what is
            metrics["async/tokens_in_flight"] = float(tokens_in_flight(engine))
        return metrics


def staleness_metrics(scored: Sequence[ScoredRollout], version: int, bound: int) -> Metrics:
    """Of the rollouts that were learned from at `version`: published versions since each token was sampled; raises if
    one is older than `bound`, which admission prevents."""
    ages: list[int] = []
    worst = spanning = rollouts = 0
    for s in scored:
        versions = [(v, 1) for step in s.steps for v in step.tokens.token_versions or ()]
        versions += [
            (step.tokens.policy_version, len(step.tokens.token_ids))
            for step in s.steps
            if step.tokens.token_versions is None and step.tokens.policy_version is not None and step.tokens.has_ids
        ]
        if not versions:
            continue
        oldest = version - min(v for v, _ in versions)
        if oldest > bound:
            raise ToolwiseError(
                f"rollout {s.rollout.rollout_id} has tokens of {oldest} versions ago, and trainer.max_staleness is "
                f"{bound}: this is a bug, please report it"
            )
        worst, rollouts, spanning = max(worst, oldest), rollouts + 1, spanning + (len({v for v, _ in versions}) > 1)
        ages += [version - v for v, count in versions for _ in range(count)]
    if not ages:
        return {}
    return {
        "staleness/mean": sum(ages) / len(ages),
        "staleness/max": float(worst),
        "staleness/spanning": spanning / rollouts,
    }
