"""What happens on the nodes, in the run folder: logs/NAME.log of each process, and cluster.jsonl, with a line for each
group, transfer, start and death, and counters of every worker."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from toolwise.serialization.json_text import json_line
from toolwise.terminal import escape_controls

MAX_LOG_BYTES = 8 << 20
"""Of each process; later lines are dropped."""
MAX_LOG_LINES = 1000
"""That a process keeps until its next reply."""
COUNTERS_S = 10.0
"""Counters of a process are written this often."""


class NodeLog:
    """Appends to the files of the run folder `out`; `show` gets the counters of each process, too."""

    def __init__(
        self, out: Path, show: Callable[[str, Mapping[str, float]], None] = lambda process, counters: None
    ) -> None:
        self.out, self.show = out, show
        self._counted: dict[str, float] = {}

    def add(self, name: str, lines: bytes, counters: Mapping[str, float]) -> None:
        """What came with a reply: new lines of the worker's log, and its counters."""
        if lines:
            path = self.out / "logs" / f"{name}.log"
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists() or path.stat().st_size < MAX_LOG_BYTES:
                text = "".join(f"{escape_controls(line)}\n" for line in lines.decode("utf-8", "replace").splitlines())
                with path.open("a", encoding="utf-8") as file:
                    file.write(text)
        now = time.monotonic()
        if counters and now - self._counted.get(name, -COUNTERS_S) >= COUNTERS_S:
            self._counted[name] = now
            self.event("counters", name, **counters)
            self.show(name, counters)

    def event(self, kind: str, worker: str, **numbers: Any) -> None:
        """One line of cluster.jsonl; `time` is that of its end, in seconds since 1970."""
        line = {"time": round(time.time(), 4), "event": kind, "process": worker, **numbers}
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / "cluster.jsonl").open("ab") as file:
            file.write(json_line(line))


class LogLines(logging.Handler):
    """The last lines that this process logs, until they are taken."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._lines: deque[str] = deque(maxlen=MAX_LOG_LINES)
        logging.getLogger("toolwise").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.append(self.format(record))
        except Exception:  # a user's line with other arguments than it names
            self.handleError(record)

    def add_print(self, *printed: Any) -> None:
        self._lines.append("reward: " + " ".join(map(str, printed)))

    def take(self) -> bytes:
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        return "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace")
