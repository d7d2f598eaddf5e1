"""Supervised fine-tuning (SFT) on conversations, with the forward pass, packing and optimiser of the policy's updates.

    loss = − Σ log p(assistant token) / number of assistant tokens in the step

The count is taken over the whole step before it is split into micro-batches, so the split changes neither the loss nor
its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolwise.config.sft import SftConfig
from toolwise.errors import CheckpointError, DataError, ToolwiseError
from toolwise.learner.conversations import Example
from toolwise.learner.forward import TrunkForward, can_share_prefixes, prefers_node_layout, token_logprobs
from toolwise.learner.lora import Adapters
from toolwise.learner.memory import checkpoint_activations
from toolwise.learner.memory_estimate import default_pass_tokens
from toolwise.learner.optimizer import Optimizer
from toolwise.learner.packing import Packed, micro_batches
from toolwise.models.loader import load_weights
from toolwise.protocols import Metrics


@dataclass(frozen=True, slots=True)
class SftBatch:
    """The conversations of one step, packed into micro-batches on the model's device."""

    parts: list[Packed]
    tokens: int
    """All tokens of the conversations."""

    @property
    def targets(self) -> int:
        """Tokens to train on."""
        return sum(part.S for part in self.parts)

    @property
    def computed(self) -> int:
        """Tokens that the model computes: fewer than `tokens` if conversations share prefixes."""
        return sum(part.T for part in self.parts)


class EpochBatches:
    """Which rows each step sees: every row once per epoch, in an order that depends on the seed and the epoch alone.

    An epoch is divided into as few steps of at most about `batch_tokens` tokens as possible, all of about equal size:
    a small rest at its end would count as much as a full step.
    """

    def __init__(self, lengths: Sequence[int], batch_tokens: int, seed: int) -> None:
        if not lengths:
            raise DataError("there is nothing to train on: add conversations")
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.seed = seed
        self._count = min(len(lengths), -(-int(self.lengths.sum()) // batch_tokens))
        self._epoch: tuple[int, list[list[int]]] = (-1, [])

    def __len__(self) -> int:
        """Steps per epoch."""
        return self._count

    def __getitem__(self, step: int) -> list[int]:
        """The rows of a step; steps count from 0, over all epochs."""
        epoch, index = divmod(step, self._count)
        if self._epoch[0] != epoch:
            self._epoch = epoch, self._split(epoch)
        return self._epoch[1][index]

    def _split(self, epoch: int) -> list[list[int]]:
        order = list(range(len(self.lengths)))
        Random(f"{self.seed}/{epoch}").shuffle(order)
        sums = np.cumsum(self.lengths[order])
        cuts = [0]
        for part in range(1, self._count):
            cut = int(np.searchsorted(sums, sums[-1] * part / self._count, side="right"))
            # At least one row for this step and for each that follows.
            cuts.append(min(max(cut, cuts[-1] + 1), len(order) - (self._count - part)))
        return [order[start:stop] for start, stop in zip(cuts, [*cuts[1:], len(order)], strict=True)]


class SftLearner:
    """A model in training: `pack` rows, then `update` on them or measure their `loss`."""

    def __init__(self, model: Any, config: SftConfig) -> None:
        self.model = model.eval()  # as in RL updates: no dropout
        self.config = config
        self.version = 0
        """Number of updates so far, skipped ones included."""
        self.adapters = Adapters(model, config.lora, config.seed, "lora") if config.lora.rank else None
        if config.activation_checkpointing:
            checkpoint_activations(model, "activation_checkpointing")
        self.optimizer = Optimizer(
            model.parameters(),
            config,
            total_steps=config.steps,
            min_lr_ratio=config.min_lr_ratio,
            spike_factor=config.spike_factor,
            owner="model",
        )
        self.pass_tokens = config.micro_batch_tokens or default_pass_tokens(model, self.optimizer, config)

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    def pack(self, rows: Sequence[Example]) -> SftBatch:
        parts = micro_batches(
            rows,
            self.pass_tokens,
            share_prefixes=self.config.share_prefixes and can_share_prefixes(self.model),
            device=self.device,
            nodes=prefers_node_layout(self.model),
        )
        return SftBatch(list(parts), sum(map(len, rows)))

    def update(self, batch: SftBatch) -> Metrics:
        """One optimiser step. Reads nothing back from the device before all of its work is queued."""
        targets = batch.targets
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        entropy = torch.zeros_like(loss)
        trunk = TrunkForward(self.model)
        try:
            for part in batch.parts:
                logprobs, part_entropy = self._forward(trunk, part)
                part_loss = -logprobs.sum() / targets
                part_loss.backward()  # type: ignore[no-untyped-call]
                self.optimizer.accumulate_gradients()
                loss += part_loss.detach()
                entropy += part_entropy.detach().sum()
            self.version += 1
            norms = self.optimizer.step(self.version)
        except torch.OutOfMemoryError as fault:
            raise self._out_of_memory() from fault
        return {
            "loss": float(loss),
            "entropy": float(entropy) / max(targets, 1),
            **norms,
            "lr": self.optimizer.learning_rate(self.version),
            "skipped_updates": float(self.optimizer.guard.skipped),
            "tokens": float(targets),
            "all_tokens": float(batch.tokens),
            "computed_tokens": float(batch.computed),
        }

    @torch.no_grad()
    def loss(self, rows: Sequence[Example]) -> float:
        """Mean loss of all assistant tokens in `rows`, without training on them."""
        total, targets = torch.zeros((), dtype=torch.float64, device=self.device), 0
        trunk = TrunkForward(self.model)
        try:
            for part in self.pack(rows).parts:
                total -= self._forward(trunk, part)[0].sum()
                targets += part.S
        except torch.OutOfMemoryError as fault:
            raise self._out_of_memory() from fault
        return float(total) / max(targets, 1)

    def _forward(self, trunk: TrunkForward, part: Packed) -> tuple[Tensor, Tensor]:
        return token_logprobs(self.model, trunk(part), part, 1.0, chunk_tokens=self.config.logit_chunk_tokens)

    def _out_of_memory(self) -> ToolwiseError:
        self.optimizer.zero_grad()
        more = "" if self.config.activation_checkpointing else ", or set activation_checkpointing = true"
        return ToolwiseError(f"the GPU ran out of memory with micro_batch_tokens = {self.pass_tokens}: lower it{more}")

    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights, which `save_model` writes."""
        state: dict[str, Any] = {"version": self.version, "optimizer": self.optimizer.state_dict()}
        return state if self.adapters is None else {**state, "adapters": self.adapters.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (self.adapters is None) != ("adapters" not in state):
            raise CheckpointError("the run and the checkpoint differ in `lora`: resume with the settings it began with")
        if self.adapters is not None:
            self.adapters.load_state_dict(state["adapters"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.version = state["version"]

    def save_model(self, folder: Path) -> None:
        """Save the weights as a folder that plain `transformers` loads, with adapters merged in."""
        if self.adapters is None:
            self.model.save_pretrained(folder)
        else:
            self.adapters.save_merged(folder)

    def load_weights(self, folder: Path) -> None:
        """Load weights written by `save_model`. Adapters are part of the state instead."""
        if self.adapters is not None:
            return
        load_weights(self.model, folder)
        self.optimizer.sync_masters()


def pack_ahead(pack: Callable[[int], SftBatch], steps: Iterable[int]) -> Generator[tuple[int, SftBatch]]:
    """Each step with its batch. A thread packs the next one meanwhile, so that a GPU does not wait for it."""
    with ThreadPoolExecutor(1, thread_name_prefix="toolwise-pack") as pool:
        upcoming = ((step, pool.submit(pack, step)) for step in steps)
        current = next(upcoming, None)
        while current is not None:
            step, batch = current[0], current[1].result()
            current = next(upcoming, None)
            yield step, batch


def sft_steps(model: Any, rows: Sequence[Example], config: SftConfig) -> Iterator[Metrics]:
    """Train `model` in place on `rows`, yielding each step's metrics: the loop of `toolwise sft`, without a folder."""
    learner = SftLearner(model, config)
    batches = EpochBatches([len(row) for row in rows], config.batch_tokens, config.seed)
    for _, batch in pack_ahead(lambda step: learner.pack([rows[i] for i in batches[step]]), range(config.steps)):
        yield learner.update(batch)
