"""Bootstrap weights and the coverage of the intervals."""

from __future__ import annotations

import numpy as np

from toolwise.frontier.bootstrap import estimate, row_weights


def test_the_first_weights_are_the_sample_and_the_others_resamples_of_it() -> None:
    weights = row_weights(10, 50, 0)
    assert weights.shape == (51, 10)
    assert np.allclose(weights.sum(axis=1), 1)
    assert np.allclose(weights[0], 0.1)
    assert np.allclose(weights * 10, np.round(weights * 10))
    assert np.array_equal(weights, row_weights(10, 50, 0))
    assert not np.array_equal(weights, row_weights(10, 50, 1))


def test_the_interval_of_a_mean_has_its_nominal_coverage() -> None:
    rng = np.random.default_rng(1)
    held = 0
    for trial in range(400):
        found = estimate(row_weights(100, 300, trial) @ rng.normal(3.0, 1.0, 100))
        held += found.low <= 3.0 <= found.high
    assert 0.91 <= held / 400 <= 0.975


def test_nan_is_left_out_of_the_interval() -> None:
    found = estimate(np.array([0.5, np.nan, 0.4, 0.6]))
    assert found.value == 0.5
    assert 0.4 <= found.low < 0.42
    assert 0.58 < found.high <= 0.6
    assert np.isnan(estimate(np.array([np.nan, np.nan])).low)
