"""The critic predicts the return at the token before each sampled one. Only `gae` uses it.

It has its own trunk (a copy of the policy's, or a smaller model with the same vocabulary), a linear head initialised to
zero and its own optimiser, so that its large early errors do not disturb the policy's weights.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from toolwise.config.schema import RunConfig
from toolwise.errors import CheckpointError, ToolwiseError
from toolwise.learner import distributed
from toolwise.learner.batch import Batch
from toolwise.learner.forward import hidden_states
from toolwise.learner.loss_aggregation import token_weights
from toolwise.learner.losses import clipped_value_loss
from toolwise.learner.memory import MicroBatchLimit
from toolwise.learner.mini_batches import mini_batches
from toolwise.learner.optimizer import Optimizer
from toolwise.learner.sharding import compute_device, run_pass, shard_model
from toolwise.protocols import Metrics


class Critic:
    def __init__(
        self,
        model: Any,
        config: RunConfig,
        *,
        per: Literal["token", "turn"] = "token",
        shard: bool = False,
        offload: bool = False,
    ) -> None:
        """Takes ownership of `model`. The estimator decides whether it learns a value for every sampled token, or only
        for the first of each turn. `shard`, `offload`: see `build_learner`."""
        self.config = config
        self.memory = MicroBatchLimit(config.actor.pass_tokens)
        self.per = per
        self.model = model.eval().requires_grad_(False)
        self.trunk = model.get_decoder().requires_grad_(True)
        if shard:
            shard_model(model, offload=offload)
        width = int(self.trunk.get_input_embeddings().weight.shape[1])
        width = int(getattr(self.trunk.config, "hidden_size", width))
        self.head = torch.nn.Linear(width, 1, device=compute_device(model))
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.optimizer = Optimizer(
            [*self.trunk.parameters(), *self.head.parameters()],
            config.critic,
            total_steps=config.trainer.total_steps,
            spike_factor=config.actor.spike_factor,
            owner="critic",
            state=config.actor.optimizer_state,
        )

    @torch.no_grad()
    def values(self, batch: Batch) -> Tensor:
        """One value per sampled token of the batch, predicted before the token is sampled."""
        rows = batch.trainable_rows()

        def compute(max_tokens: int) -> Tensor:
            values = torch.zeros(len(batch), device=batch.device, dtype=self.head.weight.dtype)
            for packed, columns in batch.packed(rows, self.model, self.config.actor, max_tokens):
                computed = self._values(packed)
                if columns is not None:
                    values[columns] = computed
            return values

        return self.memory.fit(compute, batch.lengths(rows))

    def _values(self, packed: Any) -> Tensor:
        hidden = run_pass(self.model, lambda: hidden_states(self.model, packed))[packed.source]
        values: Tensor = self.head(hidden.to(self.head.weight.dtype)).squeeze(-1)
        return values

    def update(self, batch: Batch, version: int) -> Metrics:
        if batch.returns is None or batch.values is None:
            raise ToolwiseError(
                "the critic has no returns to learn from: use an estimator that computes them (gae), or no critic"
            )
        critic, seed = self.config.critic, f"critic/{self.config.seed}/{version}"
        sums: dict[str, float] = {}
        steps = 0
        for rows in mini_batches(batch, count=critic.mini_batches, epochs=critic.epochs, seed=seed):
            for name, value in self._step(batch, rows, version).items():
                sums[name] = sums.get(name, 0.0) + value
            steps += 1
        means = {f"critic/{name}": value / steps for name, value in sums.items()}
        tokens = self._learned_tokens(batch, batch.trainable_rows())
        return means | {
            "critic/skipped_updates": float(self.optimizer.guard.skipped),
            "critic/lr": self.optimizer.learning_rate(version),
            "critic/explained_variance": explained_variance(batch.values[tokens], batch.returns[tokens]),
        }

    def _learned_tokens(self, batch: Batch, rows: list[int]) -> Tensor:
        tokens = batch.predicted_tokens(rows)
        return tokens[batch.first[tokens]] if self.per == "turn" else tokens

    def _step(self, batch: Batch, rows: list[int], version: int) -> Metrics:
        tokens = self._learned_tokens(batch, rows)
        weights = torch.zeros(len(batch), device=batch.device)
        weights[tokens] = token_weights("token", batch.step[tokens], batch.rollout[tokens])
        sums = self.memory.fit(
            partial(self._accumulate, batch, rows, weights), batch.lengths(rows), self.optimizer.zero_grad
        )
        loss_sum, clip_sum = distributed.sum_over_ranks(sums.tolist(), batch.device)
        norms = self.optimizer.step(version, lambda: [batch.rollout_ids[batch.rollout_of_row[row]] for row in rows])
        return {"loss": loss_sum, "clip_frac": clip_sum, **norms}

    def _accumulate(self, batch: Batch, rows: list[int], weights: Tensor, max_tokens: int) -> Tensor:
        """Add up gradients; return the sums of losses and of clipped tokens."""
        assert batch.values is not None
        assert batch.returns is not None
        sums = torch.zeros(2, device=batch.device)
        for packed, columns in batch.packed(rows, self.model, self.config.actor, max_tokens):
            values = self._values(packed)
            if columns is None:
                (values.sum() * 0.0).backward()  # type: ignore[no-untyped-call]
                self.optimizer.accumulate_gradients()
                continue
            weight = weights[columns]
            losses, clipped = clipped_value_loss(
                values, batch.values[columns], batch.returns[columns], clip=self.config.critic.value_clip or None
            )
            # A NaN loss must not count where the weight is 0 (0 * NaN is NaN).
            losses = torch.where(weight > 0, losses, 0.0)
            loss = (losses * weight).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.accumulate_gradients()
            sums += torch.stack([loss.detach(), (clipped * weight).sum()])
        return sums

    def state_dict(self) -> dict[str, Any]:
        return {
            "trunk": dict(self.trunk.named_parameters()),
            "head": dict(self.head.named_parameters()),
            "optimizer": self.optimizer.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part, module in (("trunk", self.trunk), ("head", self.head)):
            current = dict(module.named_parameters())
            if current.keys() != state[part].keys() or any(current[k].shape != state[part][k].shape for k in current):
                raise CheckpointError(f"the checkpoint's critic has a different {part}: check critic.path")
            for name, weight in current.items():
                weight.copy_(state[part][name])
        self.optimizer.load_state_dict(state["optimizer"])


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1: perfect; 0: no better than a constant; negative: worse. 0 if all returns are equal."""
    v, r = values.double(), returns.double()
    residuals = r - v
    sums = [float(x) for x in (len(r), r.sum(), r.square().sum(), residuals.sum(), residuals.square().sum())]
    n, r1, r2, e1, e2 = distributed.sum_over_ranks(sums, values.device)
    if n < 2:
        return 0.0
    variance = r2 / n - (r1 / n) ** 2
    return 0.0 if variance <= 1e-12 else 1.0 - (e2 / n - (e1 / n) ** 2) / variance
