"""Rich's console, status line and live display, showing text literally: no markup, links or control characters."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import IO, Any, TypeVar

import rich.console
import rich.live
from rich.progress import Progress
from rich.segment import Segment
from rich.spinner import Spinner
from rich.text import Text

from toolwise.terminal.streams import StreamProxy, escape_controls

T = TypeVar("T")


class Console(rich.console.Console):
    """Styles come from `Text`, `style=` and tables; `[red]` in a string is printed as is.

    All text passes through `render`, also inside tables and panels; control characters are escaped there.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**({"markup": False, "highlight": False, "emoji": False} | options))

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape before measuring: an escaped character is longer."""
        return super().render_str(escape_controls(text), **options)

    def render(
        self, renderable: rich.console.RenderableType, options: rich.console.ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            style = segment.style
            if style is not None and style.link:
                style = style.update_link(None)
            # A control segment is rich's own: cursor movements of a live display.
            yield segment if segment.control else Segment(escape_controls(segment.text), style)


class Live(rich.live.Live):
    """Shows whatever is printed in the meantime above the display, as plain text.

    Rich's own redirection would interpret colours and links that a program prints.
    """

    def __init__(self, renderable: Any = None, **options: Any) -> None:
        super().__init__(renderable, redirect_stdout=False, redirect_stderr=False, **options)
        self._streams: dict[str, _AboveLiveStream] = {}

    def start(self, refresh: bool = False) -> None:
        super().start(refresh)
        if self.console.is_terminal and not self._streams:
            for name in ("stdout", "stderr"):
                self._streams[name] = _AboveLiveStream(self.console, getattr(sys, name))
                setattr(sys, name, self._streams[name])

    def stop(self) -> None:
        for name, stream in self._streams.items():
            stream.flush()
            if getattr(sys, name) is stream:
                setattr(sys, name, stream.stream)
        self._streams = {}
        super().stop()


class Status(Live):
    """One line with a spinner that disappears at the end; nothing if the console is not a terminal."""

    def __init__(self, console: Console, text: str = "") -> None:
        self._spinner = Spinner("dots", Text(escape_controls(text)), style="status.spinner")
        super().__init__(self._spinner, console=console, refresh_per_second=12.5, transient=True)

    def update(self, text: str) -> None:  # type: ignore[override]
        self._spinner.update(text=Text(escape_controls(text)))


def track(items: Iterable[T], description: str, *, total: int, disable: bool = False) -> Iterator[T]:
    with Progress(console=Console(), redirect_stdout=False, redirect_stderr=False, disable=disable) as progress:
        yield from progress.track(items, total=total, description=description)


class _AboveLiveStream(StreamProxy):
    """Prints complete lines above a live display."""

    def __init__(self, console: rich.console.Console, stream: IO[str]) -> None:
        super().__init__(stream)
        self.console = console
        self._partial_line = ""

    def write(self, text: str) -> int:
        *lines, self._partial_line = f"{self._partial_line}{text}".split("\n")
        for line in lines:
            self.console.print(Text(escape_controls(line)))
        return len(text)

    def flush(self) -> None:
        if self._partial_line:
            self.write("\n")
