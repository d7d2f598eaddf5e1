"""Shares a GPU's memory between the engine's KV cache and the update, which take turns.

The cache is given a size beside which the update should fit. If the update runs out of memory all the same, the cache
is freed and the update redone; from then on the cache is as large as the measured peak leaves, or, if that is too small
for the rollouts, freed before each update. Freeing it costs the next rollouts the capture of their graphs.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

from toolwise.engine import Engine
from toolwise.errors import ConfigError
from toolwise.protocols import Metrics

log = logging.getLogger("toolwise.training")

MARGIN = 1.08
"""The update is given this much more than is estimated or measured: blocks of memory do not fit without gaps."""
GAPS = 0.004
"""And this share of the memory in any case: gaps are as large as single tensors, however small the update is."""
SPARE_BLOCKS = 1.1
"""A smaller cache must hold this many times the most that rollouts have used."""
ENGINE_SHARE = 0.08
"""Share of the memory that the engine's forward passes may take, where they run beside updates: activations of at most
a twentieth, logits and the captured graphs."""
REMEDIES = (
    'set a lower actor.micro_batch_tokens, actor.activation_checkpointing = true, actor.optimizer_state = "bf16" or '
    '"cpu"'
)
MIN_SHARE = 0.25
"""By estimate the cache shrinks to this share of its size at most; beyond that it is freed for each update."""


class DeviceMemory(Protocol):
    def usable(self) -> int:
        """Bytes that this process can have, with what it has now."""

    def peak(self) -> int:
        """The most bytes allocated at a time since `reset_peak`."""

    def reset_peak(self) -> None: ...


class CudaMemory:
    """`DeviceMemory` of a GPU."""

    def __init__(self, device: Any) -> None:
        import torch

        self._cuda, self._device = torch.cuda, device

    def usable(self) -> int:
        free, _ = self._cuda.mem_get_info(self._device)
        return int(free) + int(self._cuda.memory_reserved(self._device))

    def peak(self) -> int:
        return int(self._cuda.max_memory_allocated(self._device))

    def reset_peak(self) -> None:
        self._cuda.reset_peak_memory_stats(self._device)


class CacheMemory:
    """Decides how large the engine's cache is, and when it is freed."""

    def __init__(self, engine: Engine, memory: DeviceMemory) -> None:
        self.engine, self.memory = engine, memory
        self.frees_each_update = False
        self.freed = 0
        self._measuring = False
        self._measured = False
        """Whether the cache has been given a size by measurement."""

    def limit(self, update_bytes: int, permanent_bytes: int) -> None:
        """Make the cache small enough for an update that is estimated to need `update_bytes`, of which
        `permanent_bytes` stay afterwards. Call before anything is generated."""
        count, fitting = self.engine.blocks.count, self._fitting(update_bytes)
        if fitting >= count:
            return
        if fitting < MIN_SHARE * count:
            self.frees_each_update = True
            fitting = max(1, min(count, self._fitting(permanent_bytes)))
        self.engine.drop_cache(blocks=fitting)
        how = "freed for each update" if self.frees_each_update else "beside which an update fits"
        log.info("the KV cache has %d blocks, %s; half of the free memory would hold %d", fitting, how, count)

    def limit_for_good(self, update_bytes: int) -> None:
        """Make the cache small enough for updates of `update_bytes` that run while the engine does. Call before
        anything is generated; raises if it would not hold one request."""
        count, smallest = self.engine.blocks.count, -(-self.engine.max_context // self.engine.blocks.size)
        fitting = min(count, self._fitting(update_bytes))
        if fitting < min(count, smallest):
            raise ConfigError(
                f"updates take {update_bytes / 1e9:.1f} GB and leave no room for a KV cache beside them: {REMEDIES}, "
                'or set trainer.mode = "sync", where they take turns'
            )
        if fitting < count:
            self.engine.drop_cache(blocks=fitting)
        log.info("the KV cache has %d blocks, beside which updates of %.1f GB fit", fitting, update_bytes / 1e9)

    def reclaim(self) -> bool:
        """For an update that has run out of memory; returns whether there was a cache to free."""
        if not self._free():
            return False
        if self._measured:
            self.frees_each_update = True
        else:
            self._measuring = True
            self.memory.reset_peak()
        return True

    def before_update(self) -> None:
        self.freed = 0
        if self.frees_each_update:
            self._free()

    def after_update(self) -> Metrics:
        """Choose the size for the next rollouts, after an update without the cache has been measured."""
        if self._measuring:
            self._measuring, self._measured = False, True
            fitting = min(self.engine.blocks.count, self._fitting(self.memory.peak()))
            if fitting >= SPARE_BLOCKS * self.engine.most_blocks and fitting > 0:
                self.engine.drop_cache(blocks=fitting)
                log.warning("the KV cache has %d blocks from now on, beside which an update fits", fitting)
            else:
                self.frees_each_update = True
                log.warning(
                    "the KV cache is freed for each update from now on: set a lower rollout.cache_mb to keep it"
                )
        return {"engine/cache_freed": float(self.freed)} if self.freed or self.frees_each_update else {}

    def _free(self) -> bool:
        freed = self.engine.drop_cache()
        self.freed += freed
        return freed

    def _fitting(self, update_bytes: int) -> int:
        room = int((1.0 - GAPS) * self.memory.usable()) - int(MARGIN * update_bytes)
        return max(0, room // self.engine.runner.block_bytes)


def build_cache_memory(
    engine: Any, learner: Any, *, sized_by_user: bool, second_copy: int | None = None
) -> CacheMemory | None:
    """For an engine on a GPU, connected with the learner; None for others, which have no cache to give. A size that the
    user has set (`rollout.cache_mb`) is not changed beforehand.

    `second_copy` are the bytes of the engine's own weights, if it has any: then it runs beside updates and never gives
    its cache away, so that the size is final, and None is returned."""
    device = learner.device
    if not isinstance(engine, Engine) or device.type != "cuda":
        return None
    from toolwise.learner.memory_estimate import CONTEXT_BYTES, permanent_parts, update_memory

    shared = CacheMemory(engine, CudaMemory(device))
    if second_copy is None:
        learner.memory.reclaim = shared.reclaim
    if not sized_by_user:
        copies = [learner.reference] if learner.reference is not None and learner.adapters is None else []
        permanent = CONTEXT_BYTES + sum(parameter.nbytes for model in copies for parameter in model.parameters())
        if learner.critic is not None:  # its gradients are gone when the actor's are computed
            permanent += sum(permanent_parts(learner.critic.model, learner.critic.optimizer).values())
        update = update_memory(learner.model, learner.optimizer, learner.config.actor, learner.memory.tokens)
        if second_copy is not None:
            beside = second_copy + int(ENGINE_SHARE * shared.memory.usable())
            shared.limit_for_good(update.peak + permanent + beside)
        else:
            shared.limit(update.peak + permanent, sum(update.permanent.values()) + permanent)
    return shared if second_copy is None else None
