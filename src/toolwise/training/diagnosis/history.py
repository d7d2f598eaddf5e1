"""What the checks of a run look at: its metrics so far, summarised step by step, and its settings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]
"""A line of metrics.jsonl."""

WINDOW = 5
"""Steps whose mean counts as the present."""
EARLY = 5
"""First steps, whose mean counts as the beginning."""
TREND_STEPS = 12
"""A run is judged by its trend only after this many steps."""


@dataclass(slots=True)
class History:
    """Rows of training steps and of validations, in order. `add` takes one line of metrics.jsonl after the other."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """The run's configuration as nested tables; what an old one lacks is unknown."""
    rows: list[Row] = field(default_factory=list)
    validations: list[Row] = field(default_factory=list)
    best_score: float = -math.inf
    """The highest mean score of a window."""
    best_score_step: int = 0
    best_score_std: float = 0.0
    """How far apart the scores of that window were."""
    best_step_score: float = -math.inf
    """The highest mean score of a step."""
    best_step_std: float = 0.0
    highest_score: float = -math.inf
    """The highest score of a single rollout."""

    def add(self, row: Row) -> None:
        if any(name.startswith("eval/") for name in row):
            self.validations.append(row)
        elif "rollouts" in row:
            self.rows.append(row)
            self.highest_score = max(self.highest_score, number(row, "score/max", -math.inf))
            if (mean := number(row, "score/mean", -math.inf)) > self.best_step_score:
                self.best_step_score, self.best_step_std = mean, number(row, "score/std")
            score = self.late("score/mean")
            if len(self.rows) >= WINDOW and score is not None and score > self.best_score:
                self.best_score, self.best_score_step = score, self.step
                self.best_score_std = self.late("score/std") or 0.0

    @property
    def step(self) -> int:
        """The latest training step."""
        return int(number(self.rows[-1], "step")) if self.rows else 0

    @property
    def window(self) -> tuple[int, int]:
        """First and last step of the present."""
        return int(number(self.rows[-WINDOW:][0], "step")), self.step

    def early(self, name: str) -> float | None:
        """Mean of a metric at the beginning, None if it was not logged."""
        return mean_of(self.rows[:EARLY], name)

    def late(self, name: str, count: int = WINDOW) -> float | None:
        """Mean of a metric over the latest steps, None if it was not logged."""
        return mean_of(self.rows[-count:], name)

    @property
    def score_scale(self) -> float:
        """How far apart scores are at the beginning: the unit of rises and falls, whatever the reward's range."""
        return max((number(row, "score/std") for row in self.rows[:EARLY]), default=0.0)

    @property
    def score_spread(self) -> float:
        """How far apart scores are, at the beginning, at their best or now: a rare reward hardly varies at first."""
        return max(self.score_scale, self.best_score_std, self.late("score/std") or 0.0)

    @property
    def chosen_tasks(self) -> bool:
        """Whether a sampler chooses the tasks: a lower training score may then only mean harder tasks."""
        return self.setting("data.sampler") not in (None, "", "uniform")

    @property
    def fallen(self) -> bool:
        """Whether the score was far better before, by more than chance: in the mean of several steps, or in one if all
        rollouts now get the same low score. Small batches vary from step to step, which is no fall."""
        scale, now, std = self.score_scale, self.late("score/mean"), self.late("score/std")
        if not scale or now is None or std is None or len(self.rows) < WINDOW or self.chosen_tasks or self.solved:
            return False
        error = self._error(std, WINDOW)
        by_step = max(scale, STEP_ERRORS * math.hypot(self._error(self.best_step_std, 1), error))
        by_window = max(scale, WINDOW_ERRORS * math.hypot(self._error(self.best_score_std, WINDOW), error))
        equal = std <= EQUAL_SCORES * scale and self.best_step_score - now >= by_step
        return equal or self.best_score - now >= by_window

    def _error(self, std: float, steps: int) -> float:
        """Standard error of the mean score of some steps, as if the rollouts of a task were all alike."""
        n = self.setting("rollout.n")
        tasks = (self.late("rollouts") or 1.0) / (n if isinstance(n, int) and n > 0 else USUAL_GROUP)
        return std / math.sqrt(max(1.0, tasks) * steps)

    @property
    def solved(self) -> bool:
        """Whether nearly all rollouts of the present are as good as they can be."""
        correct, score, first = self.late("reward/correct/mean"), self.late("score/mean"), self.early("score/mean")
        if correct is not None:
            return correct >= SOLVED
        best, scale = self.highest_score, self.score_scale
        if score is None or first is None or not math.isfinite(best) or not scale:  # a constant reward solves nothing
            return False
        return best - score <= (1 - SOLVED) * (best if best > 0 else max(scale, best - first)) + 1e-9

    def setting(self, key: str) -> Any:
        """A setting such as `actor.lr`; None if it is unknown."""
        value: Any = self.settings
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def named(self, key: str) -> str:
        """A setting with its value: `actor.lr (now 0.001)`."""
        value = self.setting(key)
        shown = f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else value
        return key if value is None or isinstance(value, list | Mapping) else f"{key} (now {shown})"


EQUAL_SCORES = 0.3
"""Scores hardly differ if their standard deviation is below this share of the first."""
WINDOW_ERRORS, STEP_ERRORS = 4.0, 2.0
"""A fall of the score must be so many standard errors deep: below the best of many windows, or below one step if all
scores are now equal."""
USUAL_GROUP = 8
"""Rollouts of a task, if the settings do not say."""
SOLVED = 0.9
"""Share of the highest score, or of correct answers, from which nothing much is left to learn."""


def number(row: Row, name: str, default: float = 0.0) -> float:
    """A finite value of a row; `default` if there is none."""
    value = row.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else default


def mean_of(rows: Iterable[Row], name: str) -> float | None:
    values = [number(row, name, math.nan) for row in rows]
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else None
