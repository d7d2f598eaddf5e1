"""Sends a run's metrics, settings, rollouts and report to Weights & Biases, online or offline: `toolwise[wandb]`."""

from __future__ import annotations

import atexit
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Literal

from toolwise.errors import import_extra
from toolwise.training.trackers.dashboard import Dashboard, RolloutRow, read_identifier, write_identifier
from toolwise.types import RunStart
from toolwise.untrusted.time_limit import TimeLimitExceeded, call_within

EXIT_LIMIT_S = 10.0
"""At exit W&B waits until its service has sent everything, for minutes if the server does not answer."""

STEP = "training_step"
"""The x axis. W&B's own step only grows, but a resumed run repeats the steps after its checkpoint."""


class WandbTracker(Dashboard):
    """A W&B run. `mode="offline"` writes RUN/wandb only, for `wandb sync` later."""

    package: ClassVar[str] = "wandb"

    def __init__(
        self,
        project: str = "toolwise",
        entity: str | None = None,
        name: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: Literal["online", "offline"] | None = None,
        rollouts: int = 16,
        every: int = 10,
    ) -> None:
        """As in `wandb.init`; `name`: the run's, `mode`: that of WANDB_MODE, if not given."""
        super().__init__(rollouts, every)
        self.options = {"project": project, "entity": entity, "group": group, "tags": list(tags) or None, "mode": mode}
        self.name = name
        self._wandb: Any = None
        self._run: Any = None

    def open(self, run: RunStart) -> None:
        self._wandb = import_extra("wandb", self.package)
        self._wandb.setup()
        atexit.register(_end_service, self._wandb)  # after W&B's own, so that it is called before it
        folder, settings = run.run_folder, self._wandb.Settings(console="off", silent=True)
        identifier = read_identifier(folder, self.package) or secrets.token_hex(4)
        self._run = self._wandb.init(
            **self.options,
            id=identifier,
            name=self.name or run.name,
            resume="allow",
            dir=str(folder),
            config=dict(run.settings),
            settings=settings,
        )
        write_identifier(folder, self.package, identifier)
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)

    def send_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, STEP: step})

    def send_table(self, name: str, step: int, rows: Sequence[RolloutRow]) -> None:
        table = self._wandb.Table(columns=list(RolloutRow._fields), data=[list(row) for row in rows])
        self._run.log({name: table, STEP: step})

    def send_report(self, folder: Path) -> None:
        report = self._wandb.Artifact(f"report-{self._run.id}", type="report")
        for name in ("report.html", "report.png", "summary.json"):
            if (folder / name).exists():
                report.add_file(str(folder / name))
        self._run.log_artifact(report)

    def finish(self) -> None:
        self._run.finish()


def _end_service(wandb: Any) -> None:
    """Wait for W&B's service only so long; it goes on by itself."""
    with suppress(TimeLimitExceeded, Exception):
        call_within(EXIT_LIMIT_S, wandb.teardown)
