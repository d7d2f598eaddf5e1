"""Writes a run's metrics, settings and rollouts as TensorBoard event files: `toolwise[tensorboard]`.

Uses the package's own file writer, so neither TensorFlow nor torch is needed to write or to read them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from toolwise.errors import import_extra
from toolwise.training.trackers.dashboard import Dashboard, RolloutRow, flatten
from toolwise.types import RunStart


class TensorBoardTracker(Dashboard):
    """Event files in RUN/tensorboard: see them with `tensorboard --logdir RUN/tensorboard`."""

    package: ClassVar[str] = "tensorboard"

    def __init__(self, folder: str = "", rollouts: int = 16, every: int = 10) -> None:
        """`folder`: where to write, instead of RUN/tensorboard; the run's name is appended."""
        super().__init__(rollouts, every)
        self.folder = folder
        self._protos: Any = None
        self._writer: Any = None

    def open(self, run: RunStart) -> None:
        writers = import_extra("tensorboard.summary.writer.event_file_writer", self.package)
        self._protos = _Protos()
        folder = Path(self.folder).expanduser() / run.name if self.folder else run.run_folder / "tensorboard"
        self._writer = writers.EventFileWriter(str(folder), flush_secs=10)
        # What earlier files say about later steps is no longer true: readers drop it.
        self._write(run.step + 1, session_log=self._protos.events.SessionLog(status=self._protos.start))
        settings = "".join(f"    {key} = {value!r}\n" for key, value in flatten(run.settings).items())
        self._write_text("settings", run.step, settings)
        self._writer.flush()

    def send_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        value = self._protos.summary.Summary.Value
        values = [value(tag=name, simple_value=number) for name, number in metrics.items()]
        self._write(step, summary=self._protos.summary.Summary(value=values))
        self._writer.flush()

    def send_table(self, name: str, step: int, rows: Sequence[RolloutRow]) -> None:
        self._write_text(name, step, markdown_table(rows))

    def send_report(self, folder: Path) -> None:
        """Event files hold no attachments: the path of the report, and its curves as an image."""
        self._write_text("report", self._last_step, f"    {folder / 'report.html'}\n")
        curves = folder / "report.png"
        if curves.exists():
            summary = self._protos.summary.Summary
            image = summary.Image(encoded_image_string=curves.read_bytes(), colorspace=4)
            self._write(self._last_step, summary=summary(value=[summary.Value(tag="report/curves", image=image)]))

    def finish(self) -> None:
        self._writer.close()

    _last_step = 0

    def _write(self, step: int, **content: Any) -> None:
        self._last_step = max(self._last_step, step)  # validations may come late
        self._writer.add_event(self._protos.events.Event(wall_time=time.time(), step=step, **content))

    def _write_text(self, tag: str, step: int, markdown: str) -> None:
        self._write(step, summary=self._protos.text(tag, markdown))


class _Protos:
    """The messages of an event file."""

    def __init__(self) -> None:
        package = TensorBoardTracker.package
        self.events = import_extra("tensorboard.compat.proto.event_pb2", package)
        self.summary = import_extra("tensorboard.compat.proto.summary_pb2", package)
        self.tensor = import_extra("tensorboard.compat.proto.tensor_pb2", package)
        self.metadata = import_extra("tensorboard.plugins.text.metadata", package)
        self.start = self.events.SessionLog.START
        types = import_extra("tensorboard.compat.proto.types_pb2", package)
        self._string = types.DT_STRING

    def text(self, tag: str, markdown: str) -> Any:
        """A summary for the text tab."""
        metadata = self.metadata.create_summary_metadata(display_name=tag, description="")
        tensor = self.tensor.TensorProto(dtype=self._string, string_val=[markdown.encode("utf-8", "replace")])
        return self.summary.Summary(value=[self.summary.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)])


def markdown_table(rows: Sequence[RolloutRow]) -> str:
    lines = [RolloutRow._fields, ("---",) * len(RolloutRow._fields), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: object) -> str:
    text = "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").replace("\n", "<br>")
