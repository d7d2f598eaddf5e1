"""`toolwise view`: pages about runs, live or as a static folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from toolwise.terminal import print_line


def view(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, finished or still running.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8123,
    host: Annotated[str, typer.Option(help="A loopback address.")] = "127.0.0.1",
    bundle: Annotated[
        Path | None, typer.Option(help="Write the pages into this folder, to be opened without a server.")
    ] = None,
    bundle_rollouts: Annotated[
        int, typer.Option(min=1, help="With --bundle: the most rollouts per run, the latest first.")
    ] = 5000,
    browser: Annotated[bool, typer.Option(help="Open the pages in a browser, if there is a display.")] = True,
) -> None:
    """Show runs in the browser: what they learned, from which tokens, and why not. Pages follow a run as it trains."""
    from toolwise.training.run_folder import open_run, require_run

    for run in runs:
        require_run(open_run(run))
    if bundle is not None:
        from toolwise.view.static_bundle import write_bundle

        page = write_bundle(runs, bundle, max_rollouts=bundle_rollouts)
        print_line(f"written: open {page} in a browser")
        return
    from toolwise.view.view_server import serve_view

    def announce(url: str) -> None:
        names = ", ".join(run.resolve().name for run in runs)
        print_line(f"showing {names} at {url} (Ctrl-C ends it)")
        if browser and _has_display():
            import webbrowser

            webbrowser.open(url)

    try:
        serve_view(runs, host=host, port=port, on_start=announce)
    except KeyboardInterrupt:
        return


def _has_display() -> bool:
    """A browser in the terminal would take it over."""
    on_desktop = sys.platform in ("darwin", "win32") or bool(os.environ.keys() & {"DISPLAY", "WAYLAND_DISPLAY"})
    return on_desktop and "SSH_CONNECTION" not in os.environ
