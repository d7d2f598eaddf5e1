"""The baseline classifier reaches the minimum of its loss; otherwise it would be a straw man."""

from __future__ import annotations

import numpy as np
import pytest

from toolwise.errors import ConfigError
from toolwise.frontier.classifier import Classifier, fit_classifier


def blobs(rows: int, seed: int = 0) -> tuple[np.ndarray, list[int]]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, rows)
    centres = np.array([[0, 0, 3.0], [2, 0, 0], [0, 2, 0]])
    return centres[labels] + rng.standard_normal((rows, 3)), labels.tolist()


def loss(found: Classifier, features: np.ndarray, labels: list[int], l2: float = 1e-3) -> float:
    picked = found.log_probs(features)[np.arange(len(labels)), labels]
    return float(-picked.mean() + l2 / 2 * (found.weight**2).sum())


def test_it_separates_separable_labels() -> None:
    features, labels = blobs(300)
    found = fit_classifier(features, labels, 3)
    fresh, truth = blobs(300, seed=1)
    assert np.allclose(np.exp(found.log_probs(fresh)).sum(axis=1), 1)
    assert (found.log_probs(fresh).argmax(axis=1) == truth).mean() > 0.85


def test_no_small_change_of_its_weights_lowers_the_loss() -> None:
    features, labels = blobs(200)
    found = fit_classifier(features, labels, 3)
    least = loss(found, features, labels)
    rng = np.random.default_rng(0)
    for _ in range(20):
        nudged = Classifier(
            found.weight + 1e-3 * rng.standard_normal(found.weight.shape),
            found.bias + 1e-3 * rng.standard_normal(3),
            found.mean,
            found.scale,
        )
        assert loss(nudged, features, labels) > least - 1e-9


def test_features_of_any_size_and_constant_ones_do_no_harm() -> None:
    features, labels = blobs(200)
    scaled = np.concatenate([features * [1e4, 1e-4, 1], np.full((200, 1), 7.0)], axis=1)
    plain, found = fit_classifier(features, labels, 3), fit_classifier(scaled, labels, 3)
    assert np.allclose(plain.log_probs(features), found.log_probs(scaled), atol=1e-3)


def test_rows_without_a_label_are_left_out() -> None:
    features, labels = blobs(100)
    noise = np.concatenate([features, np.full((50, 3), 99.0)])
    partly = fit_classifier(noise, [*labels, *[None] * 50], 3)
    assert np.allclose(partly.weight, fit_classifier(features, labels, 3).weight)
    with pytest.raises(ConfigError, match="no labelled rows"):
        fit_classifier(features, [None] * 100, 3)
