"""`toolwise score`, which scores stored rollouts again, e.g. after fixing a reward; and the options that it shares with
`toolwise check reward`: arguments and sandbox."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolwise.cli.tables import print_table
from toolwise.errors import ConfigError
from toolwise.terminal import print_json, print_line

if TYPE_CHECKING:
    from toolwise.checks.reward.rescore import RescoreReport
    from toolwise.config.schema import SandboxConfig

KwargsOption = Annotated[
    list[str] | None,
    typer.Option("--kwargs", metavar="NAME=VALUE", help="Keyword argument to pass; repeatable."),
]
TierOption = Annotated[
    str | None, typer.Option("--tier", help="Sandbox tier: standard, basic or off.", show_default=False)
]
TimeoutOption = Annotated[
    float | None, typer.Option("--timeout-s", help="Timeout of one call, in seconds.", show_default=False)
]
MemoryOption = Annotated[
    int | None, typer.Option("--memory-mb", help="Memory limit of the function, in MB.", show_default=False)
]
ReadOption = Annotated[
    list[Path] | None, typer.Option("--read", help="File or folder the function may read; repeatable.")
]
AllowOption = Annotated[
    list[str] | None, typer.Option("--allow", help="Permission to grant: network or subprocess; repeatable.")
]


def read_kwargs(options: list[str] | None) -> dict[str, Any]:
    """Parse `NAME=VALUE` options, values spelled as in a configuration file."""
    from toolwise.config.loader import apply_overrides

    for option in options or ():
        if not option.partition("=")[1] or not option.partition("=")[0].strip():
            raise ConfigError(f"--kwargs {option!r}: write it as name=value")
    return apply_overrides({}, options or [])


def override_sandbox(
    sandbox: SandboxConfig,
    tier: str | None,
    timeout_s: float | None,
    memory_mb: int | None,
    read: list[Path] | None,
    allow: list[str] | None,
) -> SandboxConfig:
    from toolwise.config.loader import build_config
    from toolwise.config.schema import SandboxConfig

    options = {"tier": tier, "timeout_s": timeout_s, "memory_mb": memory_mb, "read": read, "permissions": allow}
    settings = sandbox.model_dump() | {name: value for name, value in options.items() if value}
    return build_config(SandboxConfig, settings, source="sandbox options")


def score(
    run: Annotated[Path, typer.Argument(help="Run folder, or file of stored rollouts.", show_default=False)],
    reward: Annotated[
        str | None, typer.Option(metavar="REF", help="path.py:function or module:function (default: the run's reward).")
    ] = None,
    kwargs: KwargsOption = None,
    step: Annotated[int | None, typer.Option(min=0, help="Score only the rollouts of this training step.")] = None,
    validation: Annotated[
        bool, typer.Option("--validation", help="Score validation rollouts instead of training rollouts.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Output JSONL file (default: beside the stored rollouts).", show_default=False)
    ] = None,
    tier: TierOption = None,
    timeout_s: TimeoutOption = None,
    memory_mb: MemoryOption = None,
    read: ReadOption = None,
    allow: AllowOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Score a run's stored rollouts again, in the sandbox, and show what changed. Existing files are not modified."""
    from toolwise.checks.reward.rescore import load_run_reward, rescore, unused_path, write_rescored
    from toolwise.checks.reward.stored_rollouts import read_rollouts

    config = load_run_reward(run, reward, read_kwargs(kwargs))
    sandbox = override_sandbox(config.sandbox, tier, timeout_s, memory_mb, read, allow)
    if out is not None:
        unused_path(run, "", out)  # fail before scoring, not after it
    stored = read_rollouts(run, step=step, validation=validation)
    report, rows = rescore(config.model_copy(update={"sandbox": sandbox}), stored)
    path = unused_path(run, report.reward, out)
    write_rescored(path, rows)
    if as_json:
        print_json({**asdict(report), "out": str(path)})
    else:
        _show(report)
        print_line(f"wrote {len(rows):,} rollouts to {path}")


def _show(report: RescoreReport) -> None:
    kinds = sorted({*report.old_errors, *report.new_errors})
    errors = [(f"{k} errors", str(report.old_errors.get(k, 0)), str(report.new_errors.get(k, 0))) for k in kinds]
    print_table(
        ("", "before", "now"),
        [("mean score", _number(report.old_mean), _number(report.new_mean)), *errors],
        numbers=True,
        title=f"{report.reward} on {report.rollouts} stored rollouts",
    )
    print_line(
        f"{report.changed} of {report.rollouts} rollouts changed score; correlation {_number(report.correlation)}"
    )
    print_line(f"{report.pairs_turned} of {report.pairs} pairs within a group changed order")
    if report.not_tried:
        print_line(f"{report.not_tried} rollouts were skipped after too many timeouts")
    for change in report.largest:
        print_line(f"  {change['rollout_id']}: {change['old']:g} → {change['new']:g}")


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
