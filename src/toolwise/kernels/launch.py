"""`jit`: `triton.jit`, for kernels that several threads launch.

Triton enters a compiled kernel into its cache before the kernel is on the device, and a kernel that is being loaded
already looks ready to other threads: they would launch it without its function. So launches take turns. An update and
the engine beside it share norms and activations (`trainer.mode = "async"`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

LAUNCHES = threading.RLock()
"""Held during every launch, which includes the first one's compilation. Nothing is waited for under it but Triton."""


def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Use it like `triton.jit`, as a decorator with or without options."""
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]

    def decorate(function: Callable[..., Any]) -> Any:
        kernel = triton.jit(function, **options)
        launch = kernel.run

        def run(*args: Any, **kwargs: Any) -> Any:
            with LAUNCHES:
                return launch(*args, **kwargs)

        kernel.run = run
        return kernel

    return decorate if function is None else decorate(function)
