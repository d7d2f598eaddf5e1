"""Options shared by `check reward` and `score`: the function's arguments and its sandbox."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
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
    from toolwise.errors import ConfigError

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
    """`sandbox` with the command line's options applied."""
    from toolwise.config.loader import build_config
    from toolwise.config.schema import SandboxConfig

    options = {"tier": tier, "timeout_s": timeout_s, "memory_mb": memory_mb, "read": read, "permissions": allow}
    settings = sandbox.model_dump() | {name: value for name, value in options.items() if value}
    return build_config(SandboxConfig, settings, source="sandbox options")
