"""Progress messages while a run starts: parts announce what they do, `show_startup` displays it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import IO

from toolwise.terminal import write_line

_displays: list[Callable[[str], None]] = []


def announce(text: str) -> None:
    """Announce the current action, such as "loading the model builtin:small"; silent outside `show_startup`."""
    for show in _displays:
        show(f"{text} …")


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
    with ExitStack() as stack:
        show: Callable[[str], None] = partial(write_line, console.file)
        # Check the stream too: with FORCE_COLOR, rich treats any stream as a terminal.
        if console.is_terminal and console.file.isatty():
            show = stack.enter_context(Status(console, "starting …")).update
        _displays.append(show)
        stack.callback(_displays.remove, show)
        yield
