"""Trains the router's head, and optionally the trunk.

With a frozen trunk the features of a prompt are kept with the prediction until the prompt
is learned from, so that each prompt needs one forward pass, however many rollouts it has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolwise.config.schema import RunConfig
from toolwise.learner.optimizer import Optimizer
from toolwise.protocols import Metrics
from toolwise.routing.head.budget_window import BudgetWindow
from toolwise.routing.head.head import RouterHead, save_head
from toolwise.routing.head.loss import (
    RouterBatch,
    calibration_error,
    entropies,
    expected_loss,
    label_loss,
    sampled_loss,
    value_loss,
)
from toolwise.routing.head.predictor import Encode, HeadPredictor, prompt_features
from toolwise.routing.samples import RoutePrediction, RouterExample


class RouterLearner(HeadPredictor):
    """`actor_optimizer` is shared with the head (`router.optimizer = "actor"`), or synchronized after the head's own
    optimizer has updated the trunk."""

    def __init__(
        self,
        model: Any,
        head: RouterHead,
        config: RunConfig,
        *,
        actor_optimizer: Optimizer | None = None,
        encode: Encode | None = None,
        trained: Any = None,
    ) -> None:
        """`trained` is the copy of the model that is updated, if that is not the one that predicts: in asynchronous
        training."""
        super().__init__(model, head, micro_batch_tokens=config.actor.pass_tokens, encode=encode)
        router = self.config = config.router
        self.total_steps = config.trainer.total_steps
        self.trained = model if trained is None else trained
        self.trunk = trunk_weights(self.trained, router.backbone, router.top_layers)
        self.stale = config.trainer.allowed_staleness > 0
        self.actor_optimizer = actor_optimizer
        shared = actor_optimizer if router.optimizer == "actor" else None
        self.shares_optimizer = shared is not None
        self.optimizer = shared or Optimizer(
            [*self.head.parameters(), *self.trunk],
            router,
            total_steps=self.total_steps,
            min_lr_ratio=router.min_lr_ratio,
            owner="router",
        )
        self.updates = 0
        self.window = BudgetWindow(router.budget_window) if router.budget_window else None

    def learn(self, examples: Sequence[RouterExample], multipliers: Sequence[float] = ()) -> Metrics:
        """One update: `epochs` optimizer steps over all examples."""
        self.updates += 1
        if not examples:
            return {"router/updates": 0.0}
        config, sums = self.config, defaultdict[str, float](float)
        batch = RouterBatch(examples, self.head.out.weight)
        metrics = {"router/updates": float(config.epochs), "router/lr": self.optimizer.learning_rate(self.updates)}
        metrics |= self._calibration_metrics(batch)
        for _ in range(config.epochs):
            for name, value in self._step(batch, multipliers).items():
                sums[name] += value / config.epochs
        if config.average_last > 0 and self.updates > self.total_steps * (1.0 - config.average_last):
            self.average.add(self.head, multipliers)
        else:
            self.average.reset()  # the run was extended after it had ended
        if self.window is not None:
            self.window.add(examples)
        return metrics | {f"router/{name}": value for name, value in sums.items()}

    def dual_estimates(
        self, limits: Sequence[float], multipliers: Sequence[float]
    ) -> tuple[list[float], list[float | None]]:
        """What the policy spends on the window, and the λ that would meet the budgets there, per budget; both empty
        without a window."""
        if self.window is None or not len(self.window):
            return [], []
        value = self.head.settings.mode == "value"
        temperature = self.head.settings.temperature if value else self.entropy_coef
        return self.window.means(self.head, multipliers), self.window.solve(limits, temperature)

    def supervised_step(self, predictions: Sequence[RoutePrediction], labels: Sequence[int]) -> Metrics:
        """A cross-entropy step at the learning rate of the next update; it does not advance the schedule."""
        batch = RouterBatch(
            [RouterExample(prediction, (), label=label) for prediction, label in zip(predictions, labels, strict=True)],
            self.head.out.weight,
        )
        return {f"router/{name}": value for name, value in self._step(batch, (), only_labels=True).items()}

    def _step(self, batch: RouterBatch, multipliers: Sequence[float], *, only_labels: bool = False) -> Metrics:
        self._scale_inputs(batch)
        if self.trunk:
            self.optimizer.sync_masters()  # the actor's update has changed them
        sums = defaultdict[str, float](float)
        for part in batch.parts(self._prompts_per_part(batch) if self.trunk else len(batch.examples)):
            with self._others_frozen():
                loss, metrics = self._loss(part, batch, multipliers, only_labels)
                loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.accumulate_gradients()
            for name, value in metrics.items():
                sums[name] += value
        norms = self.optimizer.step(self.updates + only_labels)
        if self.trunk and self.actor_optimizer is not None:
            self.actor_optimizer.sync_masters()
        return sums | norms

    @torch.no_grad()
    def _scale_inputs(self, batch: RouterBatch) -> None:
        """Before the first step: while the head's output weights are 0, this changes no route's probability."""
        features = [example.prediction.head_inputs[1] for example in batch.examples]
        if self.trunk or not self.config.scale_inputs or len(features) < 2 or bool(self.head.out.weight.any()):
            return
        self.head.scale_inputs(torch.stack(features))
        self.optimizer.sync_masters()

    def _features(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        s = self.head.settings
        return prompt_features(self.trained, prompts, pool=s.pool, layers=s.layers, max_tokens=self.micro_batch_tokens)

    def _prompts_per_part(self, batch: RouterBatch) -> int:
        longest = max(len(example.prediction.head_inputs[0]) for example in batch.examples)
        return max(1, self.micro_batch_tokens // max(1, longest))

    def _loss(
        self, part: RouterBatch, batch: RouterBatch, multipliers: Sequence[float], only_labels: bool
    ) -> tuple[Tensor, Metrics]:
        """The loss of a part of the batch; the parts add up to the mean over the batch."""
        config, inputs = self.config, [example.prediction.head_inputs for example in part.examples]
        encoded = self._features([p for p, _ in inputs]) if self.trunk else torch.stack([s for _, s in inputs])
        outputs = part.of_bins(self.head(encoded))
        prompts, rollouts = len(batch.examples), max(1, len(batch.actions))
        if self.head.settings.mode == "value" and not only_labels:
            loss = value_loss(outputs, part.prompt_index, part.actions, part.targets) / rollouts
            entropy = entropies(part.masked(self.head.logits(outputs.detach(), multipliers))).sum()
            return loss, {"loss": float(loss.detach()), "entropy": float(entropy) / prompts}
        logits = part.masked(self.head.logits(outputs, multipliers))
        entropy = entropies(logits).sum() / prompts
        if only_labels:
            supervised = label_loss(logits, part.labels) / max(1, batch.labelled)
            return supervised, {"label_loss": float(supervised.detach())}
        clip = config.clip_ratio if config.epochs > 1 or self.stale else None  # against the head that sampled
        if part.advantages is not None:
            policy = expected_loss(logits, part.advantages, part.has_advantage, part.old_logprobs, clip=clip) / prompts
        else:
            old = part.old_logprobs[part.prompt_index, part.actions]
            policy = (
                sampled_loss(logits, part.prompt_index, part.actions, part.sampled_advantages, old, clip=clip)
                / rollouts
            )
        loss = policy - self.entropy_coef * entropy
        metrics = {"loss": float(policy.detach()), "entropy": float(entropy.detach())}
        if batch.labelled:
            supervised = label_loss(logits, part.labels) / batch.labelled
            loss = loss + config.label_coef * supervised
            metrics["label_loss"] = float(supervised.detach())
        return loss, metrics

    @contextmanager
    def _others_frozen(self) -> Iterator[None]:
        """No gradients for weights that the router does not train: they would leak into the actor's step."""
        trained = {id(weight) for weight in self.trunk}
        parameters = self.trained.parameters() if trained else ()  # a frozen trunk is not in the graph at all
        others = [w for w in parameters if w.requires_grad and id(w) not in trained]
        for weight in others:
            weight.requires_grad_(False)
        try:
            yield
        finally:
            for weight in others:
                weight.requires_grad_(True)

    @property
    def entropy_coef(self) -> float:
        start, end = self.config.entropy_coef, self.config.final_entropy_coef
        return start + (end - start) * min(1.0, self.updates / self.total_steps)

    @torch.no_grad()
    def _calibration_metrics(self, batch: RouterBatch) -> Metrics:
        """How far the predictions used for routing were from the outcomes, before learning from them."""
        if self.head.settings.mode != "value" or not len(batch.actions):
            return {}
        predictions = batch.predictions[batch.prompt_index, batch.actions]
        return {
            f"router/calibration/{name}": calibration_error(predictions[:, i], batch.targets[:, i])
            for i, name in enumerate(("reward", *self.head.settings.units))
        }

    def save(self, folder: Any, metadata: dict[str, Any]) -> None:
        multipliers: dict[str, float] = metadata.get("multipliers", {})
        head, saved_multipliers = self.average.of(self.head, list(multipliers.values()))
        save_head(
            head, Path(folder), metadata | {"multipliers": dict(zip(multipliers, saved_multipliers, strict=True))}
        )

    def state_dict(self) -> dict[str, Any]:
        """Without the trunk's weights, which are in the model's file, and without a shared optimizer's state."""
        return {
            "head": dict(self.head.named_parameters()),
            "updates": self.updates,
            "average": self.average.state_dict(),
            **({} if self.window is None else {"window": self.window.state_dict()}),
            **({} if self.shares_optimizer else {"optimizer": self.optimizer.state_dict()}),
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._copy_head_weights(state["head"], "the checkpoint's router has")
        if not self.shares_optimizer:
            self.optimizer.load_state_dict(state["optimizer"])
        self.average.load_state_dict(state.get("average") or {}, self.head)
        if self.window is not None:
            self.window.load_state_dict(state.get("window") or {}, self.head.out.weight.device)
        self.updates = state["updates"]


def trunk_weights(model: Any, backbone: str, top_layers: int) -> list[Tensor]:
    """The trunk's weights that the router's loss trains: none, the top layers and the final norm, or all."""
    trunk = model.get_decoder()
    if backbone == "frozen":
        return []
    top = [*trunk.layers[-top_layers:], *([trunk.norm] if hasattr(trunk, "norm") else [])]
    modules = [trunk] if backbone == "full" else top
    return [weight for module in modules for weight in module.parameters() if weight.requires_grad]
