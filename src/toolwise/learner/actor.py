"""The actor owns the policy's weights: it annotates scored rollouts with log-probs and values, and learns from credited
ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolwise.config.schema import RunConfig
from toolwise.errors import CheckpointError, ConfigError, ToolwiseError
from toolwise.learner import distributed
from toolwise.learner.batch import Batch, build_batch, with_zero_advantages
from toolwise.learner.corrections import build_loss
from toolwise.learner.critic import Critic
from toolwise.learner.fingerprint import checksum
from toolwise.learner.forward import TrunkForward, token_logprobs
from toolwise.learner.kl import KlCoefficient, check_kl_loss, k3
from toolwise.learner.lora import Adapters
from toolwise.learner.loss_aggregation import token_weights
from toolwise.learner.loss_terms import MetricSums, metric_names, policy_loss_terms, uses_old_logprobs
from toolwise.learner.losses import GradientCheck
from toolwise.learner.memory import MicroBatchLimit, checkpoint_activations
from toolwise.learner.memory_estimate import default_pass_tokens
from toolwise.learner.mini_batches import mini_batches
from toolwise.learner.mismatch import Evidence, check_logprobs, importance_metrics
from toolwise.learner.optimizer import Optimizer
from toolwise.learner.packing import Packed
from toolwise.learner.reference import build_reference
from toolwise.learner.rows import require_tokens
from toolwise.learner.sharding import compute_device, is_sharded, run_pass, shard_model
from toolwise.learner.token_statistics import TokenStatistics
from toolwise.models.loader import load_weights
from toolwise.protocols import Annotation, Metrics, PolicyLoss
from toolwise.types import AnnotatedRollout, CreditedRollout, ScoredRollout, ThinkingByRollout, UpdatedTokens

MAX_PROBE_ROWS = 8


@dataclass(frozen=True, slots=True)
class MiniBatchResult:
    """What the forward pass of one optimiser step computes besides gradients."""

    metrics: Metrics
    logprobs: Tensor
    """One per token of the batch; NaN for tokens of other mini-batches."""
    loss_share: Tensor
    """Each rollout's share of the loss."""


class Actor:
    """Shares its model with the local policy, so the next sampled token already uses the updated weights."""

    def __init__(
        self,
        model: Any,
        config: RunConfig,
        *,
        needs: frozenset[Annotation] = frozenset(),
        critic: Critic | None = None,
        extra_parameters: Sequence[Tensor] = (),
        loss: PolicyLoss | None = None,
        shard: bool = False,
        offload: bool = False,
    ) -> None:
        """`extra_parameters`: weights outside `model` that the actor's optimiser updates too. `loss`: that of the
        configuration if None. `shard`, `offload`: see `build_learner`."""
        actor, algorithm = config.actor, config.algorithm
        if algorithm.kl == "loss":
            check_kl_loss(algorithm.kl_estimator)
        self.model = model
        self.config = config
        self.critic = critic
        self.loss = loss or build_loss(actor, actor.policy_loss)
        self._gradient_check = GradientCheck(self.loss)
        self._recomputes = uses_old_logprobs(actor, self.loss) and not actor.one_step
        """Whether `annotate` computes the old log-probs; a single step takes its own."""
        self.version = self._at_version = 0
        self.updated: Mapping[str, UpdatedTokens] = {}
        self._statistics: TokenStatistics | None = None
        self.adapters = Adapters(model, actor.lora, config.seed) if actor.lora.rank else None
        required: dict[Annotation, bool] = {
            "old_logprobs": self._recomputes,
            "ref_logprobs": algorithm.kl != "none",
            "values": critic is not None,
        }
        self.required_annotations = needs | {name for name, is_required in required.items() if is_required}
        if shard and self.adapters is not None:  # the reference shares the weights, divided as they are
            shard_model(model, offload=offload)
        self.reference = build_reference(model, self.adapters) if "ref_logprobs" in self.required_annotations else None
        for sharded in (model, self.reference) if shard and self.adapters is None else ():
            if sharded is not None:
                shard_model(sharded, offload=offload)
        self.optimizer = Optimizer(
            [*model.parameters(), *extra_parameters],
            actor,
            total_steps=actor.schedule_steps or config.trainer.total_steps,
            min_lr_ratio=actor.min_lr_ratio,
            spike_factor=actor.spike_factor,
            state=actor.optimizer_state,
        )
        self.kl = KlCoefficient(algorithm.kl_coef, algorithm.kl_target, algorithm.kl_horizon)
        if "values" in self.required_annotations and critic is None:
            raise ConfigError("the advantage estimator needs values but the actor has no critic: pass one")
        self._trunk: TrunkForward | None = None
        self.memory = MicroBatchLimit(actor.micro_batch_tokens or default_pass_tokens(model, self.optimizer, actor))
        self.optimizer.reserve = self.memory.reserve
        if critic is not None:
            critic.memory, critic.optimizer.reserve = self.memory, self.memory.reserve
        if actor.activation_checkpointing:
            checkpoint_activations(model, "actor.activation_checkpointing")

    def weights_checksum(self) -> str:
        """Checksum of the trainable weights (with LoRA, the adapters): it changes whenever one of them does."""
        return checksum(self.model.parameters())

    @property
    def device(self) -> torch.device:
        return compute_device(self.model)

    @property
    def precision(self) -> torch.dtype:
        """Of log-probs and losses: fp32, or the weights' own if that is higher."""
        return torch.promote_types(next(self.model.parameters()).dtype, torch.float32)

    def annotate(
        self, scored: Sequence[ScoredRollout], thinking: ThinkingByRollout | None = None
    ) -> list[AnnotatedRollout]:
        """Add old log-probs, reference log-probs and values, each only if the estimator or the settings need it."""
        require_tokens(scored)
        takes_part = bool(scored) or is_sharded(self.model)  # other processes' passes wait for this one's
        columns = self._annotations(scored) if self.required_annotations and takes_part else {}
        kl_coef = self.kl.value if self.config.algorithm.kl == "reward" else None
        return [
            AnnotatedRollout(
                s,
                **{name: per_rollout[index] for name, per_rollout in columns.items()},
                thinking=(thinking or {}).get(s.rollout.rollout_id),
                kl_coef=kl_coef,
            )
            for index, s in enumerate(scored)
        ]

    def _annotations(self, scored: Sequence[ScoredRollout]) -> dict[str, list[Any]]:
        """The required annotations, one entry per rollout."""
        batch, steps = build_batch(with_zero_advantages(scored), self.device), [s.steps for s in scored]
        columns: dict[str, list[Any]] = {}
        if "old_logprobs" in self.required_annotations:
            columns["old_logprobs"] = batch.per_step(self._logprobs(self.model, batch), steps)
        if self.reference is not None:
            columns["ref_logprobs"] = batch.per_step(self._logprobs(self.reference, batch), steps)
        if self.critic is not None:
            columns["values"] = batch.per_step(self.critic.values(batch), steps)
        return columns

    def update(self, credited: Sequence[CreditedRollout]) -> Metrics:
        """Update the critic, then the actor; return their metrics. If a loss fails before any weight has changed,
        `version` has not changed either."""
        batch = build_batch(credited, self.device)
        [tokens] = distributed.sum_over_ranks([float(len(batch.trainable_rows()))], self.device)
        at_version, version = self.version, self.version + 1
        self._at_version = at_version
        self.updated = {}
        if not tokens:
            self.version = version
            return {"actor/updates": 0.0}
        self._check(batch)
        self._statistics = TokenStatistics(batch)
        metrics: Metrics = {}
        if self.critic is not None:
            self.version = version
            metrics = self.critic.update(batch, version)
        sums: dict[str, float] = {}
        updates = 0
        actor, seed = self.config.actor, f"{self.config.seed}/{version}"
        # The model stays in the policy's mode: dropout would move the ratio off 1 before any weight has moved.
        parts = list(mini_batches(batch, count=actor.mini_batches, epochs=actor.ppo_epochs, seed=seed))
        for rows in parts:
            step = self._gradients(batch, rows)
            if not updates:
                metrics |= self._check_mismatch(batch, rows, step.logprobs, at_version)
            if updates == len(parts) - 1:
                self._gradient_check.require(batch.advantages)
            self.version = version
            norms = self.optimizer.step(self.version, partial(suspects, batch, rows, step.loss_share))
            for name, value in (step.metrics | norms).items():
                sums[name] = sums.get(name, 0.0) + value
            updates += 1
        self.updated, self._statistics = self._statistics.per_rollout(credited), None
        means = {name: value / updates for name, value in sums.items()}
        return metrics | self._report(batch, means, updates) | self.memory.take_metrics()

    def dry_run_update(self, credited: Sequence[CreditedRollout]) -> Metrics:
        """Run the forward and backward pass of an update and the mismatch check, without changing weights or optimiser
        state."""
        batch = build_batch(credited, self.device)
        rows = batch.trainable_rows()
        if not rows:
            return {}
        self._check(batch)
        self._statistics = None
        self._at_version = self.version
        try:
            logprobs = self._gradients(batch, rows).logprobs
            self._gradient_check.require(batch.advantages)
            return self._check_mismatch(batch, rows, logprobs, self.version)
        finally:
            self.optimizer.zero_grad()

    def _report(self, batch: Batch, means: Metrics, updates: int) -> Metrics:
        guard = self.optimizer.guard
        metrics = {f"actor/{name}": value for name, value in means.items()} | {
            "actor/updates": float(updates),
            "actor/skipped_updates": float(guard.skipped),
            "actor/skipped_spikes": float(guard.spikes),
            "actor/lr": self.optimizer.learning_rate(self.version),
        }
        if self.reference is not None:
            metrics |= self._update_kl(batch)
        return metrics

    def _update_kl(self, batch: Batch) -> Metrics:
        """Measure the KL between the policy that sampled these tokens and the reference, and adapt β for the next
        update."""
        assert batch.ref_logprobs is not None
        tokens = batch.predicted_tokens(batch.trainable_rows())
        old = batch.rollout_logprobs if batch.old_logprobs is None else batch.old_logprobs
        distance = k3(old[tokens], batch.ref_logprobs[tokens]).double().sum()
        total, count, rollouts = distributed.sum_over_ranks(
            [float(distance), float(len(tokens)), len(batch.rollout_ids)], self.device
        )
        metrics = {"kl/reference": total / count, "kl/coef": self.kl.value}
        self.kl.adapt(total / count, int(rollouts))
        return metrics

    def _gradients(self, batch: Batch, rows: list[int]) -> MiniBatchResult:
        """Accumulate the gradients of one optimiser step over its micro-batches. If they do not fit into memory, the
        step begins again with smaller ones, so that no row counts twice."""
        actor = self.config.actor
        tokens = batch.predicted_tokens(rows)
        weights = torch.zeros(len(batch), device=self.device)
        weights[tokens] = token_weights(
            actor.loss_aggregation, batch.step[tokens], batch.rollout[tokens], length=actor.loss_length
        )
        logprobs, loss_share, sums = self.memory.fit(
            partial(self._accumulate, batch, rows, weights), batch.lengths(rows), self.optimizer.zero_grad
        )
        return MiniBatchResult(sums.means(len(tokens)), logprobs, loss_share)

    def _accumulate(
        self, batch: Batch, rows: list[int], weights: Tensor, max_tokens: int
    ) -> tuple[Tensor, Tensor, MetricSums]:
        logprobs = torch.full((len(batch),), torch.nan, device=self.device, dtype=self.precision)
        loss_share = torch.zeros(len(batch.rollout_ids), device=self.device, dtype=self.precision)
        sums = MetricSums(self.device, metric_names(self.config.actor, self.loss))
        trunk = self._trunk = TrunkForward.prepared(self.model, self._trunk)
        for packed, columns in batch.packed(rows, self.model, self.config.actor, max_tokens):
            new_logprobs, entropy = self._forward(self.model, trunk, packed)
            if columns is None:
                (new_logprobs.sum() * 0.0).backward()  # type: ignore[no-untyped-call]
                self.optimizer.accumulate_gradients()
                continue
            terms = policy_loss_terms(
                self.config, self.loss, self.kl.value, batch, columns, new_logprobs, entropy, self._at_version
            )
            self._gradient_check.observe(terms.policy, new_logprobs)
            weight = weights[columns]
            (terms.total * weight).sum().backward()  # type: ignore[no-untyped-call]
            self.optimizer.accumulate_gradients()
            logprobs[columns] = new_logprobs.detach()
            if self._statistics is not None:
                self._statistics.add(columns, new_logprobs, entropy, terms.metrics)
            loss_share.index_add_(0, batch.rollout[columns], terms.total.detach().abs() * weight)
            sums.add(terms, weight, packed.T)
        return logprobs, loss_share, sums

    def _forward(
        self, model: Any, trunk: TrunkForward, packed: Packed, temperature: float | None = None
    ) -> tuple[Tensor, Tensor]:
        chosen, chunk = temperature or self.config.rollout.temperature, self.config.actor.logit_chunk_tokens
        return run_pass(model, lambda: token_logprobs(model, trunk(packed), packed, chosen, chunk_tokens=chunk))

    @torch.no_grad()
    def _logprobs(
        self, model: Any, batch: Batch, rows: Sequence[int] | None = None, temperature: float | None = None
    ) -> Tensor:
        chosen = batch.trainable_rows() if rows is None else rows

        def compute(max_tokens: int) -> Tensor:
            logprobs, trunk = torch.zeros(len(batch), device=self.device, dtype=self.precision), TrunkForward(model)
            for packed, columns in batch.packed(chosen, model, self.config.actor, max_tokens):
                computed = self._forward(model, trunk, packed, temperature)[0]
                if columns is not None:
                    logprobs[columns] = computed
            return logprobs

        return self.memory.fit(compute, batch.lengths(chosen))

    def _check_mismatch(self, batch: Batch, rows: list[int], logprobs: Tensor, version: int) -> Metrics:
        """Compare the rollout's log-probs with those the first optimiser step computed, before any weight moves. Where
        tokens may be stale, only those of the learner's own version must agree."""
        tokens = all_tokens = batch.predicted_tokens(rows)
        stale_metrics: Metrics = {}
        if self.config.trainer.allowed_staleness:
            fresh = batch.version[all_tokens] == version
            stale_metrics = importance_metrics((logprobs - batch.rollout_logprobs)[all_tokens], fresh)
            tokens = all_tokens[fresh]
            fresh_rows = set(batch.row[tokens].tolist())
            rows = [row for row in rows if row in fresh_rows]
        probe_rows = rows[:: max(1, len(rows) // MAX_PROBE_ROWS)]
        probe_tokens = batch.predicted_tokens(probe_rows)

        def probe(temperature: float) -> float:
            logprobs = self._logprobs(self.model, batch, probe_rows, temperature)
            return float((logprobs - batch.rollout_logprobs)[probe_tokens].abs().mean())

        evidence = Evidence(
            gaps=(logprobs - batch.rollout_logprobs)[tokens],
            rows=batch.row[tokens],
            versions=batch.version[tokens],
            version=version,
            temperature=self.config.rollout.temperature,
            probe=probe,
        )
        try:
            return check_logprobs(evidence, self.model.dtype, self.config.actor.mismatch_check) | stale_metrics
        except ToolwiseError:
            self.optimizer.zero_grad()
            raise

    def _check(self, batch: Batch) -> None:
        if self._recomputes and batch.old_logprobs is None:
            raise ToolwiseError("the rollouts have no old log-probs: call annotate() before computing advantages")
        if self.reference is not None and batch.ref_logprobs is None:
            raise ToolwiseError("the rollouts have no reference log-probs: call annotate() before computing advantages")

    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights, which `save_model` writes in the `transformers` format."""
        state: dict[str, Any] = {
            "version": self.version,
            "optimizer": self.optimizer.state_dict(),
            "kl": self.kl.state_dict(),
        }
        if self.critic is not None:
            state["critic"] = self.critic.state_dict()
        if self.adapters is not None:
            state["adapters"] = self.adapters.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "learners" in state:
            raise CheckpointError("the checkpoint is of several learners: resume it on a cluster (--cluster)")
        for name, part in (("critic", self.critic), ("adapters", self.adapters)):
            if (part is None) != (name not in state):
                has = "has none" if part is not None else "has one"
                raise CheckpointError(f"the run and the checkpoint differ in `{name}`: the checkpoint {has}")
            if part is not None:
                part.load_state_dict(state[name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.kl.load_state_dict(state["kl"])
        self.version = state["version"]

    def weights_to_save(self) -> dict[str, Tensor] | None:
        return dict(self.model.state_dict()) if self.adapters is None else None

    def save_model(self, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
        """Save the weights as a folder that plain `transformers` loads, with adapters merged in."""
        if self.adapters is None:
            self.model.save_pretrained(folder, state_dict=weights)
        else:
            self.adapters.save_merged(folder)

    def load_weights(self, folder: Path) -> None:
        """Load weights written by `save_model` into the model, in place, so the policy sees them too."""
        if self.adapters is not None:
            return  # the base model never changes, and load_state_dict restores the adapters
        load_weights(self.model, folder)
        self.optimizer.sync_masters()


def suspects(batch: Batch, rows: Sequence[int], loss_share: Tensor) -> list[str]:
    """Rollouts to blame for a skipped step: those whose loss is not finite, else the three with the largest share."""
    rollouts = sorted({batch.rollout_of_row[row] for row in rows})
    shares = dict(zip(rollouts, torch.nan_to_num(loss_share[rollouts], nan=torch.inf).tolist(), strict=True))
    not_finite = [rollout for rollout in rollouts if shares[rollout] == torch.inf]
    return [
        batch.rollout_ids[rollout]
        for rollout in not_finite or sorted(rollouts, key=shares.__getitem__, reverse=True)[:3]
    ]
