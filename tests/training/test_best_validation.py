from __future__ import annotations

import logging

import pytest

from toolwise.config.schema import RunConfig
from toolwise.training.best_validation import compare_with_best, early_stop
from toolwise.training.run import Progress


def config_of(**trainer: object) -> RunConfig:
    return RunConfig.model_validate({"trainer": trainer, "data": {"val": "tasks.jsonl"}})


def validate_all(config: RunConfig, progress: Progress, *scores: float) -> None:
    for score in scores:
        compare_with_best(config.trainer, progress, {"score": score})


def test_validations_are_counted_since_the_best() -> None:
    config, progress = config_of(early_stopping=2), Progress()
    validate_all(config, progress, 0.2, 0.5, 0.5)
    assert (progress.best, progress.without_best) == (0.5, 1)
    assert early_stop(config, progress) == ""
    validate_all(config, progress, 0.4)
    assert early_stop(config, progress).startswith("the last 2 validations are not better than an earlier one (score)")
    validate_all(config, progress, 0.6)
    assert early_stop(config, progress) == ""


def test_nothing_is_compared_where_nothing_depends_on_it() -> None:
    config, progress = config_of(keep_best=False), Progress()
    validate_all(config, progress, 0.2, 0.1)
    assert progress == Progress()
    assert early_stop(config, progress) == ""


def test_a_metric_that_is_missing_is_named(caplog: pytest.LogCaptureFixture) -> None:
    config, progress = config_of(early_stopping=1, best_metric="acuracy"), Progress()
    with caplog.at_level(logging.WARNING):
        validate_all(config, progress, 0.2)
    assert "trainer.best_metric is 'acuracy', but the validation reports only: score" in caplog.text
    assert progress.best is None


def test_what_a_validation_changes_is_in_the_state_of_a_checkpoint() -> None:
    config, progress = config_of(early_stopping=3), Progress()
    validate_all(config, progress, 0.5, 0.4)
    other = Progress()
    other.load_state_dict(other.state_dict() | progress.validation_state())
    assert (other.best, other.without_best) == (0.5, 1)
