"""The `[trainer]` section of a run's configuration: length, checkpoints, observers. Source of docs/settings.md."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from toolwise.config.loader import Section


class ObserverEntry(Section):
    """A tracker or callback with arguments."""

    name: str
    """package.module:Name or path/to/file.py:Name; of a tracker also "tensorboard", "wandb" or "mlflow"."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class or function."""


class ObserverSettings(Section):
    """Who follows a run."""

    console: bool = True
    """Show progress on the console."""
    trackers: list[str | ObserverEntry] = Field(default_factory=list)
    """Trackers, which receive the metrics: "tensorboard", "wandb", "mlflow" (each an extra), or your own as
    package.module:Name or path/to/file.py:Name; tables {name = …, kwargs = {…}} add options: docs/trackers.md."""
    callbacks: list[str | ObserverEntry] = Field(default_factory=list)
    """Callbacks, which see every step, validation and checkpoint and may stop the run; given like trackers."""
    observer_timeout_s: PositiveFloat = 300.0
    """Time limit of each call of a tracker or callback in seconds; one that exceeds it is no longer called."""


class TrainerConfig(ObserverSettings):
    total_steps: PositiveInt = 100
    """Number of training steps."""
    mode: Literal["sync", "async"] = "sync"
    """"sync": roll out, then update. "async": both at the same time, on two copies of the weights: docs/async.md."""
    max_staleness: int = Field(default=1, ge=0)
    """"async": how many published versions a token may be behind the learner when it is learned from. 0 gives the
    results of "sync"."""
    several_stale_updates: bool = False
    """"async": allow several optimizer steps on a batch (actor.ppo_epochs, actor.mini_batches) whose tokens may be
    stale, which compounds."""
    keep_cache: bool = False
    """"async": replies that are being written when a version is published keep their keys and values, of the weights
    before; false: they are computed again. docs/async.md has what each costs."""
    save_every: PositiveInt = 10
    """Steps between checkpoints."""
    async_checkpoints: bool = True
    """Write checkpoints while training goes on, from a copy of the weights and the optimizer's state in CPU memory;
    false: training waits until they are written. The results are the same."""
    keep_checkpoints: PositiveInt = 2
    """Number of latest checkpoints to keep."""
    keep_best: bool = True
    """Also keep the checkpoint with the best validation, and save one at each new best. With router.budgets, a
    validation within them (up to 5 % over) beats any that is not, and scores are compared at equal cost."""
    best_metric: str = "score"
    """Validation metric that decides: "correct", "lookup/score", …; "-cost": lower is better."""
    early_stopping: PositiveInt | None = None
    """End the run after this many validations in a row without a new best, compared as `keep_best` does: with
    router.budgets at equal cost. Unset: train for all `total_steps`."""

    @property
    def allowed_staleness(self) -> int:
        """`max_staleness` in the mode that has any."""
        return self.max_staleness if self.mode == "async" else 0
