"""The command line: one small module a command. Heavy imports wait until a command needs them."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from toolwise.errors import ToolwiseError

app = typer.Typer(
    name="toolwise",
    help="Train language-model agents to use tools well, within a budget.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        from toolwise import __version__

        typer.echo(f"toolwise {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug logging.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    import logging

    level = logging.DEBUG if debug else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    if debug:
        for noisy in ("matplotlib", "httpx", "httpcore", "asyncio", "PIL", "urllib3", "filelock"):
            logging.getLogger(noisy).setLevel(logging.INFO)


def _register() -> None:
    from toolwise.cli import check, data, demo, doctor, evaluate, export, init, resume, rollout, run, score, sft, train

    app.command("demo")(demo.demo)
    app.command("train")(train.train)
    app.command("resume")(resume.resume)
    app.command("rollout")(rollout.rollout)
    app.command("eval")(evaluate.evaluate)
    app.command("run")(run.run)
    app.command("sft")(sft.sft)
    app.command("export")(export.export)
    app.command("score")(score.score)
    app.command("doctor")(doctor.doctor)
    app.add_typer(data.app, name="data")
    app.add_typer(check.app, name="check")
    app.add_typer(init.app, name="init")


_register()


def main() -> None:
    """Faults that a person can put right are one line on standard error and exit status 2."""
    # Threads that wait must sleep: on a shared machine spinning ones make everything many times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        app()
    except ToolwiseError as fault:
        if "--debug" in sys.argv:
            raise
        print(f"toolwise: {' '.join(str(fault).split())}", file=sys.stderr)
        for note in getattr(fault, "__notes__", ()):  # such as the traceback of a reward
            print(note, file=sys.stderr)
        sys.exit(2)
    except OSError as fault:
        if "--debug" in sys.argv or fault.strerror is None:
            raise
        where = f"{fault.filename}: " if fault.filename else ""
        print(f"toolwise: {where}{fault.strerror}; check path, permissions and free space", file=sys.stderr)
        sys.exit(2)
