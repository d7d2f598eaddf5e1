"""Options that `check reward` and `score` share: arguments of the function, and the sandbox that it runs in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from toolwise.config.schema import SandboxConfig

KwargsOption = Annotated[
    list[str] | None,
    typer.Option("--kwargs", metavar="NAME=VALUE", help="An argument of the function; may be given again."),
]
TierOption = Annotated[
    str | None, typer.Option("--tier", help="The sandbox: standard, basic or off.", show_default=False)
]
TimeoutOption = Annotated[
    float | None, typer.Option("--timeout-s", help="Of one call, in seconds.", show_default=False)
]
MemoryOption = Annotated[int | None, typer.Option("--memory-mb", help="What it may take.", show_default=False)]
ReadOption = Annotated[list[Path] | None, typer.Option("--read", help="A file or folder that it may read.")]
AllowOption = Annotated[list[str] | None, typer.Option("--allow", help="A permission: network or subprocess.")]


def read_kwargs(given: list[str] | None) -> dict[str, Any]:
    """`NAME=VALUE` as a configuration's `reward.kwargs` would have them."""
    from toolwise.config.loader import apply_overrides
    from toolwise.errors import ConfigError

    for one in given or ():
        if not one.partition("=")[1] or not one.partition("=")[0].strip():
            raise ConfigError(f"--kwargs {one!r}: write it as name=value")
    return apply_overrides({}, given or [])


def override_sandbox(
    sandbox: SandboxConfig,
    tier: str | None,
    timeout_s: float | None,
    memory_mb: int | None,
    read: list[Path] | None,
    allow: list[str] | None,
) -> SandboxConfig:
    """`sandbox` with what was said on the command line."""
    from toolwise.config.loader import build_config
    from toolwise.config.schema import SandboxConfig

    said = {"tier": tier, "timeout_s": timeout_s, "memory_mb": memory_mb, "read": read, "permissions": allow}
    settings = sandbox.model_dump() | {name: value for name, value in said.items() if value}
    return build_config(SandboxConfig, settings, source="the sandbox's options")
