"""Progress messages while a run starts: parts announce what they do on a logger, `show_startup` displays it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import IO

from toolwise.terminal import write_line

LOGGER = logging.getLogger("toolwise.training.startup")


def announce(text: str) -> None:
    """Announce the current action, such as "loading the model builtin:small"; silent outside `show_startup`."""
    LOGGER.info("%s", text)


@contextmanager
def show_startup(file: IO[str] | None = None, *, enabled: bool = True) -> Iterator[None]:
    """Show announcements: as one status line with a spinner on a terminal, as plain lines elsewhere.

    The status line disappears when the block ends. `file` defaults to standard output.
    """
    if not enabled:
        yield
        return
    from toolwise.terminal.display import Console, Status

    console = Console(file=file)
    level, propagate = LOGGER.level, LOGGER.propagate
    with ExitStack() as stack:
        show: Callable[[str], None] = partial(write_line, console.file)
        # Check the stream too: with FORCE_COLOR, rich treats any stream as a terminal.
        if console.is_terminal and console.file.isatty():
            show = stack.enter_context(Status(console, "starting …")).update
        handler = _Handler(show)
        LOGGER.addHandler(handler)
        LOGGER.setLevel(logging.INFO)
        LOGGER.propagate = False
        try:
            yield
        finally:
            LOGGER.removeHandler(handler)
            LOGGER.setLevel(level)
            LOGGER.propagate = propagate


class _Handler(logging.Handler):
    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__()
        self.show = show

    def emit(self, record: logging.LogRecord) -> None:
        self.show(f"{record.getMessage()} …")
