"""The command line interface. Heavy imports are deferred until a command needs them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from toolwise.cli import (
    chat,
    check,
    cluster,
    data,
    doctor,
    evaluate,
    fine_tune,
    init,
    reward,
    rollout,
    rollouts,
    serve,
    train,
    view,
)
from toolwise.errors import ToolwiseError
from toolwise.terminal import guard_streams, print_error, print_line
from toolwise.terminal.streams import print_traceback

app = typer.Typer(
    name="toolwise",
    help="Train language-model agents to use tools well, within a budget.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


RENAMED_OPTIONS = {
    "--cap": "--max-cost",
    "--create": "--create-kwargs",
    "--each": "--per-task",
    "--gold-form": "--gold-template",
}
"""Old names of options, still accepted, and their current names."""


def _version(requested: bool) -> None:
    if requested:
        from toolwise import __version__

        print_line(f"toolwise {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug logging.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    import logging

    logging.basicConfig(
        level=logging.DEBUG if debug else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    if debug:
        for noisy in ("matplotlib", "httpx", "httpcore", "asyncio", "PIL", "urllib3", "filelock"):
            logging.getLogger(noisy).setLevel(logging.INFO)


_COMMANDS: dict[str, Callable[..., None]] = {
    "demo": train.demo,
    "train": train.train,
    "resume": train.resume,
    "rollout": rollout.rollout,
    "eval": evaluate.evaluate,
    "run": rollout.run,
    "chat": chat.chat,
    "serve": serve.serve,
    "view": view.view,
    "sft": fine_tune.sft,
    "export": train.export,
    "score": reward.score,
    "doctor": doctor.doctor,
}
for _name, _command in _COMMANDS.items():
    app.command(_name)(_command)
for _group in (data.app, rollouts.app, cluster.app, check.app, init.app):
    app.add_typer(_group)


def main() -> None:
    """Run the CLI. Errors the user can fix print one line on standard error and exit with status 2."""
    # Idle OpenMP threads must sleep: on a shared machine, spinning threads slow everything down many times over.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    guard_streams()
    try:
        status = app(_rename_options(sys.argv[1:]), standalone_mode=False)
    except KeyboardInterrupt:
        status = 130
    except SystemExit as end:  # an exit status that is a message: print it, as Python would
        status = end.code
        if status is not None and not isinstance(status, int):
            print_line(status, err=True)
            status = 1
    except Exception as fault:
        status = _report_error(fault)
    sys.exit(status if isinstance(status, int) else 0)


def _rename_options(arguments: list[str]) -> list[str]:
    """`arguments` with the current names of options; notes each old one on standard error."""
    renamed = list(arguments)
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in RENAMED_OPTIONS:
            print_line(f"note: {name} is now {RENAMED_OPTIONS[name]}; the old name will be removed", err=True)
            renamed[index] = f"{RENAMED_OPTIONS[name]}{equals}{value}"
    return renamed


def _report_error(fault: Any) -> int:
    """Print the error on standard error and return the exit status."""
    if hasattr(fault, "format_message"):  # from the argument parser: an unknown option, a missing argument
        context, message = getattr(fault, "ctx", None), fault.format_message()
        if message and type(fault).__name__ != "NoArgsIsHelpError":  # that one has already printed the help
            usage = f"; {context.get_usage()}; see {context.command_path} --help" if context is not None else ""
            print_error(f"{message.rstrip('.')}{usage}")
        return int(fault.exit_code)
    if "--debug" not in sys.argv:
        if isinstance(fault, ToolwiseError):
            print_error(fault)
            for note in getattr(fault, "__notes__", ()):  # e.g. the traceback of a reward function
                print_line(note, err=True)
            return 2
        if isinstance(fault, OSError) and fault.strerror is not None:
            where = f"{fault.filename}: " if fault.filename else ""
            print_error(f"{where}{fault.strerror}; check the path, permissions and free space")
            return 2
    print_traceback(fault)
    return 1
