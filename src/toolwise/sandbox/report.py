"""Reports which sandbox layers were requested and which of them this machine provides, found by probing."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field

from toolwise.sandbox.faults import SandboxError, WorkerFault
from toolwise.sandbox.layers.bubblewrap import host_namespaces, unavailable_reason, worker_view
from toolwise.sandbox.layers.hardening import LAYER_REQUIREMENTS, LAYERS, OWN_DISK, Plan, Tier
from toolwise.sandbox.processes import start_process
from toolwise.sandbox.scratch_root import ScratchRoot
from toolwise.sandbox.targets import Target, readable_folders
from toolwise.sandbox.worker import Worker

FILE_MB = 16
PERMISSIONS = ("network", "subprocess")
_cache: dict[tuple[Tier, tuple[str, ...]], Report] = {}


@dataclass(frozen=True, slots=True)
class Report:
    """Layers that are active (layer -> how) and missing (layer -> why)."""

    requested: Tier
    got: Tier
    layers: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    permissions: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        return not self.missing

    @property
    def own_disk(self) -> bool:
        """Whether the kernel limits disk usage, so that it need not be measured."""
        return self.layers.get("limits", "").endswith(f" {OWN_DISK}")

    def __str__(self) -> str:
        if self.requested == "off":
            return "sandbox: off, as requested: user code runs in this process with all your permissions"
        got = ", ".join(f"{name} ({how})" for name, how in self.layers.items()) or "a separate process"
        allowed = f"; allowed: {', '.join(self.permissions)}" if self.permissions else ""
        gaps = "; ".join(f"{name} ({why}; it needs {LAYER_REQUIREMENTS[name]})" for name, why in self.missing.items())
        return f"sandbox: requested {self.requested}, got {self.got}: {got}{allowed}; missing: {gaps or 'nothing'}"


def probe(tier: Tier, permissions: Iterable[str] = (), *, require: bool = False) -> Report:
    """Start a throwaway worker that hardens itself and then tries to break out. Cached per tier and permissions.

    With `require`, a missing layer is a `SandboxError`.
    """
    names = tuple(sorted(set(permissions)))
    unknown = [name for name in names if name not in PERMISSIONS]
    if unknown:
        raise SandboxError(f"unknown permission {unknown[0]!r}: use {' or '.join(PERMISSIONS)}")
    if tier == "off":
        return Report("off", "off", permissions=names)
    if tier not in LAYERS:
        raise SandboxError(f"unknown sandbox tier {tier!r}: use 'standard', 'namespaced', 'basic' or 'off'")
    if (tier, names) not in _cache:
        _cache[tier, names] = _probe(tier, names)
    if require and not _cache[tier, names].complete:
        raise SandboxError(f"{_cache[tier, names]} (require=True)")
    return _cache[tier, names]


def _probe(tier: Tier, permissions: tuple[str, ...]) -> Report:
    layers = LAYERS[tier] if platform.system() == "Linux" else LAYERS["basic"]
    missing = {layer: f"this is {platform.system()}" for layer in LAYERS[tier] if layer not in layers}
    no_namespaces = unavailable_reason("network" in permissions) if "namespaces" in layers else ""
    read = tuple(readable_folders())
    with closing(ScratchRoot()) as root:
        scratch = root.new_folder()
        process = start_process(scratch, worker_view(layers, read, str(scratch), permissions, FILE_MB))
        outside = host_namespaces(process.view)
        plan = Plan(layers, str(scratch), read, 256, FILE_MB, permissions=permissions, outside=outside)
        worker = Worker(process, plan)
        try:
            worker.seal(Target("", ()), probe=True)
            probed = worker.probe()
        except WorkerFault as fault:
            raise SandboxError(f"the sandbox cannot be probed: {fault}{fault.traceback}") from None
        finally:
            worker.end()
    broken = {layer: str(why) for layer, why in probed.items() if why and layer in worker.layers}
    missing |= worker.missing | broken | ({"namespaces": no_namespaces} if no_namespaces else {})
    got = {layer: how for layer, how in worker.layers.items() if layer not in broken}
    tiers: tuple[Tier, ...] = ("namespaced", "standard")
    highest: Tier = next((name for name in tiers if set(LAYERS[name]) <= set(got)), "basic")
    return Report(tier, highest, got, missing, permissions)
