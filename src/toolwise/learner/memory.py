"""What happens when a pass of the learner runs out of memory: it is redone, as a whole, in smaller micro-batches."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from toolwise.errors import ConfigError, ToolwiseError
from toolwise.protocols import Metrics

log = logging.getLogger("toolwise.learner")
Result = TypeVar("Result")

MIN_TOKENS = 256
"""Micro-batches are not made smaller than this, or than the longest row, which needs one to itself."""


REMEDIES = (
    "set a lower actor.micro_batch_tokens or rollout.cache_mb, actor.activation_checkpointing = true, "
    'actor.optimizer_state = "bf16" or "cpu", or train adapters (actor.lora.rank)'
)


def checkpoint_activations(model: Any, setting: str) -> None:
    """Recompute activations in the backward pass instead of storing them; `setting` asks for it."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ConfigError(f"{setting}: {type(model).__name__} does not support it; set it to false")
    model.gradient_checkpointing_enable({"use_reentrant": False})


class LearnerMemoryError(ToolwiseError):
    """A pass does not fit into the device's memory, however small its micro-batches are."""


class MicroBatchLimit:
    """The tokens of a micro-batch: those of `actor.micro_batch_tokens`, and fewer once a pass did not fit."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.reclaim: Callable[[], bool] = lambda: False
        """Frees memory that the learner does not own, such as the engine's cache; returns whether there was any."""
        self._retries = 0
        self._ever = False

    def fit(
        self, work: Callable[[int], Result], rows: Sequence[int], undo: Callable[[], None] = lambda: None
    ) -> Result:
        """The result of `work(tokens)`. If it runs out of memory, `undo` discards what it did, and all of it is done
        again: with the memory that `reclaim` frees, else with half the tokens. `rows` are the lengths of its rows."""
        while True:
            result = self._try(lambda: work(self.tokens))
            if not isinstance(result, _OutOfMemory):
                return result
            undo()
            if not self._make_room(result):
                self._shrink(result, rows)

    def reserve(self, allocate: Callable[[], None]) -> None:
        """Call `allocate`; if it runs out of memory, again with what `reclaim` frees."""
        while isinstance(result := self._try(allocate), _OutOfMemory):
            if not self._make_room(result):
                raise LearnerMemoryError(
                    f"out of memory: the optimizer's state does not fit ({result.text}): {REMEDIES}"
                )

    def _try(self, work: Callable[[], Result]) -> Result | _OutOfMemory:
        """Returns the error, rather than raise it: its traceback would keep the tensors of `work` alive."""
        try:
            return work()
        except torch.OutOfMemoryError as error:
            return _OutOfMemory(str(error).splitlines()[0].partition(". GPU ")[0])

    def _make_room(self, error: _OutOfMemory) -> bool:
        """Free what can be freed without doing less at a time; whether there was anything."""
        self._retries += 1
        self._ever = True
        gc.collect()
        _empty_device_cache()
        if not self.reclaim():
            return False
        _empty_device_cache()
        log.warning("out of memory in a pass of the learner (%s): redone without the engine's cache", error.text)
        return True

    def take_metrics(self) -> Metrics:
        """Passes that were redone since the last call, and the limit; empty if none ever was."""
        retries, self._retries = self._retries, 0
        if not self._ever:
            return {}
        return {"actor/out_of_memory": float(retries), "actor/micro_batch_tokens": float(self.tokens)}

    def _shrink(self, error: _OutOfMemory, rows: Sequence[int]) -> None:
        longest, used = max(rows, default=0), min(self.tokens, sum(rows))
        if used <= max(MIN_TOKENS, longest):
            raise LearnerMemoryError(
                f"out of memory: a pass of the learner does not fit with {used:,} tokens in a micro-batch "
                f"and a longest row of {longest:,} ({error.text}): {REMEDIES}"
            )
        self.tokens = max(MIN_TOKENS, used // 2)
        log.warning(
            "out of memory in a pass of the learner with %d tokens in a micro-batch (%s): redone with %d; set "
            "actor.micro_batch_tokens = %d to begin with that",
            used,
            error.text,
            self.tokens,
            self.tokens,
        )


class _OutOfMemory:
    def __init__(self, text: str) -> None:
        self.text = text


def _empty_device_cache() -> None:
    """Return unused blocks, so that the next pass does not fail on fragments."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
