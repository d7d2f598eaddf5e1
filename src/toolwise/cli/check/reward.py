"""`toolwise check reward`: run a reward in its sandbox over stored rollouts and report problems."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolwise.cli.check.findings import report_checks, show_findings
from toolwise.cli.reward_options import (
    AllowOption,
    KwargsOption,
    MemoryOption,
    ReadOption,
    TierOption,
    TimeoutOption,
    override_sandbox,
    read_kwargs,
)
from toolwise.terminal import print_line

if TYPE_CHECKING:
    from toolwise.checks.reward.check import RewardCheck


def check_reward(
    reference: Annotated[str, typer.Argument(metavar="REF", help="path.py:function or module:function.")],
    rollouts: Annotated[
        Path,
        typer.Option(help="Run folder, file of stored rollouts, or file of rows with `messages`.", show_default=False),
    ],
    kwargs: KwargsOption = None,
    step: Annotated[int | None, typer.Option(min=0, help="Check only the rollouts of this training step.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of rollouts to check.")] = 512,
    gold: Annotated[
        bool, typer.Option("--gold/--no-gold", help="Check that gold answers score best; skip for shaping rewards.")
    ] = True,
    gold_template: Annotated[
        str | None,
        typer.Option(
            help="Template that turns a bare ground truth into an answer, such as 'Answer: {}'.", show_default=False
        ),
    ] = None,
    tier: TierOption = None,
    timeout_s: TimeoutOption = None,
    memory_mb: MemoryOption = None,
    read: ReadOption = None,
    allow: AllowOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check a reward on stored rollouts, in its sandbox: results, determinism, speed, spread, steps, gold answers."""
    from toolwise.checks.reward.check import check_reward as check
    from toolwise.checks.reward.stored_rollouts import read_rollouts
    from toolwise.config.schema import RewardConfig, SandboxConfig
    from toolwise.errors import ConfigError

    if gold_template is not None and "{}" not in gold_template:
        raise ConfigError(
            f"--gold-template {gold_template!r}: mark the place of the ground truth with {{}}: 'Answer: {{}}'"
        )
    sandbox = override_sandbox(SandboxConfig(), tier, timeout_s, memory_mb, read, allow)
    config = RewardConfig(function=reference, kwargs=read_kwargs(kwargs), sandbox=sandbox)
    result = check(config, read_rollouts(rollouts, step=step, limit=limit), gold=gold, gold_form=gold_template)
    report_checks([result], result.to_json() if as_json else None, _show)


def _show(check: RewardCheck) -> None:
    show_findings(f"{check.reward} ({check.mode}) on {check.rollouts} rollouts of {check.tasks} tasks", check.findings)
    for finding in check.findings:
        if finding.details:  # plain text, so that tracebacks are not wrapped and can be copied
            lines = [f"  {line}" for detail in finding.details for line in detail.splitlines()]
            print_line("\n".join([f"\n{finding.name}:", *lines, ""]))
    if check.printed:
        more = f"  … and {check.printed_more:,} more lines" if check.printed_more else ""
        print_line("\n".join(["\noutput of the reward:", *(f"  {line}" for line in check.printed), more]))
    print_line(check.sandbox)
