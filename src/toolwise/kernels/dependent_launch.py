"""Programmatic dependent launch: a kernel is launched while the one before it still runs, and waits for it there.

On Hopper and later this hides most of the time between two kernels. A kernel that is launched so must wait before it
reads or writes anything; then the kernel after it may be launched.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc,import-not-found,import-untyped"
# ruff: noqa: N803  (capitals are compile-time constants)
from __future__ import annotations

from functools import cache

import torch
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from toolwise.kernels.launch import jit


@cache
def dependent_launch(device: torch.device) -> bool:
    """Whether kernels on the device can be launched so."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


@jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait for the kernel before, then allow the launch of the one after."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
