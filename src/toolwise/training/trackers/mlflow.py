"""Sends a run's metrics, settings, rollouts and report to MLflow, a server or a local store: `toolwise[mlflow]`."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from toolwise.errors import import_extra
from toolwise.training.trackers.dashboard import Dashboard, RolloutRow, flatten, read_identifier, write_identifier
from toolwise.types import RunStart

MAX_PARAM_CHARS = 500
"""A limit of older servers."""
MAX_PARAMS_PER_CALL = 100
RETRIES = 2
"""Of a request that fails. MLflow's own default makes the run wait minutes for a server that is gone."""
MAX_METRICS_PER_CALL = 1000


class MlflowTracker(Dashboard):
    """An MLflow run, by default where MLFLOW_TRACKING_URI says."""

    package: ClassVar[str] = "mlflow"

    def __init__(
        self,
        experiment: str = "toolwise",
        name: str | None = None,
        uri: str | None = None,
        tags: Mapping[str, str] | None = None,
        rollouts: int = 16,
        every: int = 10,
    ) -> None:
        """`uri`: such as http://host:5000 or sqlite:///mlflow.db; `name`: the run's, if not given."""
        super().__init__(rollouts, every)
        self.experiment, self.name, self.uri, self.tags = experiment, name, uri, dict(tags or {})
        self._mlflow: Any = None
        self._client: Any = None
        self._run_id = ""
        self._resumed = False

    def open(self, run: RunStart) -> None:
        self._mlflow = import_extra("mlflow", self.package)
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", str(RETRIES))
        self._client = self._mlflow.MlflowClient(tracking_uri=self.uri)
        stored = read_identifier(run.run_folder, self.package)
        if stored is not None and self._exists(stored):
            self._run_id, self._resumed = stored, True
            self._client.update_run(stored, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(self.experiment)
        experiment = self._client.create_experiment(self.experiment) if found is None else found.experiment_id
        tags = {**self.tags, "toolwise.run_folder": str(run.run_folder.resolve())}
        created = self._client.create_run(experiment, run_name=self.name or run.name, tags=tags)
        self._run_id = created.info.run_id
        write_identifier(run.run_folder, self.package, self._run_id)
        self._log_settings(run.settings)

    def send_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        now, entity = int(time.time() * 1000), self._mlflow.entities.Metric
        values = [entity(metric_name(name), value, now, step) for name, value in metrics.items()]
        for start in range(0, len(values), MAX_METRICS_PER_CALL):
            self._client.log_batch(self._run_id, metrics=values[start : start + MAX_METRICS_PER_CALL])

    def send_table(self, name: str, step: int, rows: Sequence[RolloutRow]) -> None:
        file = f"{name}-{step:06d}.json"
        if self._resumed and self._stored(file):  # a repeated step: `log_table` would append to its table
            split = {"columns": list(RolloutRow._fields), "data": [list(row) for row in rows]}
            self._client.log_dict(self._run_id, split, file)
            return
        columns = {field: [getattr(row, field) for row in rows] for field in RolloutRow._fields}
        self._client.log_table(self._run_id, columns, artifact_file=file)

    def _stored(self, file: str) -> bool:
        return any(old.path == file for old in self._client.list_artifacts(self._run_id, file.rpartition("/")[0]))

    def send_report(self, folder: Path) -> None:
        for name in ("report.html", "report.png", "summary.json"):
            if (folder / name).exists():
                self._client.log_artifact(self._run_id, str(folder / name))

    def finish(self) -> None:
        self._client.set_terminated(self._run_id, status="FINISHED" if self._ended else "FAILED")

    def _exists(self, run_id: str) -> bool:
        """Whether the run that an earlier process began is still there; errors other than its absence are raised."""
        try:
            return bool(self._client.get_run(run_id).info.lifecycle_stage == "active")
        except self._mlflow.exceptions.MlflowException as fault:
            if fault.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise

    def _log_settings(self, settings: Mapping[str, Any]) -> None:
        """As parameters, to compare runs by, and whole, as a file."""
        parameter = self._mlflow.entities.Param
        flat = flatten(settings)
        values = [parameter(metric_name(key), str(value)[:MAX_PARAM_CHARS]) for key, value in flat.items()]
        for start in range(0, len(values), MAX_PARAMS_PER_CALL):
            self._client.log_batch(self._run_id, params=values[start : start + MAX_PARAMS_PER_CALL])
        self._client.log_dict(self._run_id, dict(settings), "settings.json")


def metric_name(name: str) -> str:
    """`name` with the characters that MLflow allows."""
    return re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII)
