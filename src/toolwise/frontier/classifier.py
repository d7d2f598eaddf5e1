"""The classifier that a learned router has to beat: logistic regression from a prompt's features to its label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolwise.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Classifier:
    """Weights over standardised features."""

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
    """The regression with the least mean cross-entropy plus l2/2·|w|²; rows without a label (None) are left out.

    Nesterov's accelerated gradient, with the step that the curvature allows and no setting to tune; it ends when the
    gradient has all but vanished.
    """
    import numpy as np

    kept = np.array([i for i, label in enumerate(labels) if label is not None], dtype=int)
    if not len(kept):
        raise ConfigError("the classifier has no labelled rows to learn from: label the training rows first")
    x = np.asarray(features, dtype=np.float64)[kept]
    y = np.eye(routes)[[int(labels[i] or 0) for i in kept]]
    mean, scale = x.mean(axis=0), x.std(axis=0)
    scale = np.where(scale > 1e-9, scale, 1.0)
    x = np.concatenate([(x - mean) / scale, np.ones((len(x), 1))], axis=1)
    shrink = np.append(np.full(x.shape[1] - 1, l2), 0.0)[:, None]
    step = 1 / (0.5 * _largest_eigenvalue(x) / len(x) + l2)  # softmax curves by at most 1/2
    weight = ahead = np.zeros((x.shape[1], routes))
    momentum = 1.0
    for _ in range(iterations):
        gradient = x.T @ (np.exp(_log_softmax(x @ ahead)) - y) / len(x) + shrink * ahead
        following = ahead - step * gradient
        if ((following - weight) * gradient).sum() > 0:  # momentum that leads uphill is thrown away
            momentum = 1.0
        grown = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead = following + (momentum - 1) / grown * (following - weight)
        weight, momentum = following, grown
        if np.abs(gradient).max() < 1e-7:
            break
    return Classifier(weight[:-1], weight[-1], mean, scale)


def _largest_eigenvalue(x: Floats) -> float:
    """Of xᵀx, by power iteration, a little more than it to be safe."""
    import numpy as np

    vector = np.asarray(np.random.default_rng(0).standard_normal(x.shape[1]))
    size = 1.0
    for _ in range(100):
        vector = np.asarray(x.T @ (x @ (vector / float(np.linalg.norm(vector)))))
        size = float(np.linalg.norm(vector))
    return 1.05 * size


def _log_softmax(logits: Floats) -> Floats:
    import numpy as np

    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
