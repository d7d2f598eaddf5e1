"""Logistic regression from a prompt's features to its route label: the baseline a learned router has to beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from toolwise.errors import ConfigError
from toolwise.routing.threshold import Floats


@dataclass(frozen=True, slots=True)
class Classifier:
    """Linear weights over standardised features."""

    weight: Floats
    """[features, routes]"""
    bias: Floats
    mean: Floats
    scale: Floats

    def log_probs(self, features: Floats) -> Floats:
        """[rows, routes]"""
        return _log_softmax((features - self.mean) / self.scale @ self.weight + self.bias)


def fit_classifier(
    features: Floats, labels: Sequence[int | None], routes: int, *, l2: float = 1e-3, iterations: int = 2000
) -> Classifier:
    """Minimizes mean cross-entropy + l2/2·|w|²; rows without a label (None) are left out.

    Uses Nesterov's accelerated gradient with a step size from the curvature bound, so nothing needs tuning, and stops
    when the gradient is close to zero.
    """
    labelled = np.array([i for i, label in enumerate(labels) if label is not None], dtype=int)
    if not len(labelled):
        raise ConfigError("no labelled rows to fit the classifier to: label the training rows first")
    x = np.asarray(features, dtype=np.float64)[labelled]
    y = np.eye(routes)[[int(labels[i] or 0) for i in labelled]]
    mean, scale = x.mean(axis=0), x.std(axis=0)
    scale = np.where(scale > 1e-9, scale, 1.0)
    x = np.concatenate([(x - mean) / scale, np.ones((len(x), 1))], axis=1)
    shrink = np.append(np.full(x.shape[1] - 1, l2), 0.0)[:, None]
    step = 1 / (0.5 * _largest_eigenvalue(x) / len(x) + l2)  # the curvature of softmax is at most 1/2
    weight = lookahead = np.zeros((x.shape[1], routes))
    momentum = 1.0
    for _ in range(iterations):
        gradient = x.T @ (np.exp(_log_softmax(x @ lookahead)) - y) / len(x) + shrink * lookahead
        updated = lookahead - step * gradient
        if ((updated - weight) * gradient).sum() > 0:  # restart when momentum points uphill
            momentum = 1.0
        next_momentum = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        lookahead = updated + (momentum - 1) / next_momentum * (updated - weight)
        weight, momentum = updated, next_momentum
        if np.abs(gradient).max() < 1e-7:
            break
    return Classifier(weight[:-1], weight[-1], mean, scale)


def _largest_eigenvalue(x: Floats) -> float:
    """An upper estimate of the largest eigenvalue of xᵀx, by power iteration."""
    vector = np.asarray(np.random.default_rng(0).standard_normal(x.shape[1]))
    norm = 1.0
    for _ in range(100):
        vector = np.asarray(x.T @ (x @ (vector / float(np.linalg.norm(vector)))))
        norm = float(np.linalg.norm(vector))
    return 1.05 * norm


def _log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
