"""Each check of learning on hand-made metrics: one run that shows the disease, and others that only look like it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from toolwise.training.diagnosis import learning_checks as checks
from toolwise.training.diagnosis.history import History
from toolwise.types.findings import Finding

SETTINGS = {"actor": {"lr": 1e-3, "ppo_epochs": 4}, "rollout": {"n": 8}}


def history(
    steps: int = 20,
    validations: Sequence[dict[str, float]] = (),
    settings: dict[str, Any] | None = None,
    **columns: float | Callable[[int], float],
) -> History:
    """A run of `steps` steps; a column is a number, or a function of the step. `__` stands for `/`."""
    result = History(SETTINGS if settings is None else settings)
    by_step = {int(row["step"]): row for row in validations}
    for step in range(1, steps + 1):
        values = {n.replace("__", "/"): v(step) if callable(v) else v for n, v in columns.items()}
        result.add({"step": step, "rollouts": 32.0, "score/std": 0.4, **values})
        if step in by_step:
            result.add(by_step[step])
    return result


def falling(start: float, end: float) -> Callable[[int], float]:
    """From `start` to `end` within 10 steps."""
    return lambda step: start + (end - start) * min(1.0, (step - 1) / 10)


def found(finding: Finding | None, kind: str) -> Finding:
    assert finding is not None
    assert finding.name == kind
    assert finding.cure
    assert finding.settings
    assert finding.steps
    return finding


def test_an_entropy_that_is_gone_without_a_better_score_has_collapsed() -> None:
    run = history(actor__entropy=falling(1.0, 0.01), score__mean=0.3, reward__correct__mean=0.3)
    finding = found(checks.entropy_collapse(run), "entropy_collapse")
    assert finding.severity == "critical"
    assert "actor.lr (now 0.001)" in finding.cure
    assert finding.figures["entropy"] == pytest.approx(0.01)


@pytest.mark.parametrize(
    "columns",
    [
        {"actor__entropy": falling(1.0, 0.01), "score__mean": 0.95, "reward__correct__mean": 0.95},  # solved
        {"actor__entropy": falling(1.0, 0.01), "reward__correct__mean": falling(0.3, 0.6)},  # better
        {"actor__entropy": falling(1.0, 0.3), "score__mean": 0.3, "reward__correct__mean": 0.3},  # still varied
        {"score__mean": 0.3},  # not measured
        {"steps": 6, "actor__entropy": falling(1.0, 0.01), "score__mean": 0.3},  # too early to say
    ],
)
def test_a_policy_that_became_certain_because_it_is_better_has_not(columns: dict[str, Any]) -> None:
    assert checks.entropy_collapse(history(**columns)) is None


def test_a_score_that_falls_and_stays_down_has_collapsed() -> None:
    run = history(score__mean=lambda step: 0.8 if step <= 10 else 0.1)
    finding = found(checks.score_collapse(run), "score_collapse")
    assert finding.figures["best_score"] == pytest.approx(0.8)
    assert finding.steps[0] <= 10 < finding.steps[1]
    assert "actor.lr (now 0.001)" in finding.cure


def test_a_policy_that_the_first_update_destroys_is_found_by_scores_that_no_longer_differ() -> None:
    run = history(
        steps=5, score__mean=lambda step: 0.6 if step == 1 else 0.0, score__std=lambda step: 0.4 * (step == 1)
    )
    found(checks.score_collapse(run), "score_collapse")


def test_held_out_scores_show_a_collapse_too() -> None:
    scores = validations("score", 0.6, 0.7, 0.1, 0.1)
    run = history(score__mean=falling(0.4, 0.1), validations=scores)
    assert "held-out" in found(checks.score_collapse(run), "score_collapse").says
    assert checks.overfitting(run) is None


@pytest.mark.parametrize(
    "score",
    [
        lambda step: 0.8 if step % 2 else 0.3,  # it varies from step to step
        lambda step: 0.1 if step == 15 else 0.8,  # one bad step
        lambda step: 0.8 - 0.01 * step,  # a little worse
    ],
)
def test_a_score_that_varies_has_not(score: Callable[[int], float]) -> None:
    assert checks.score_collapse(history(score__mean=score)) is None


def test_updates_that_go_too_far_are_found_by_kl_or_by_clipping() -> None:
    kl = found(checks.kl_spike(history(actor__kl=lambda step: 0.5 if step > 17 else 0.001)), "kl_spike")
    assert kl.steps == (18, 20)
    found(checks.kl_spike(history(actor__kl=0.001, actor__clip_frac=0.6)), "kl_spike")


@pytest.mark.parametrize("columns", [{"actor__kl": 0.02, "actor__clip_frac": 0.2}, {"actor__kl": 0.0}, {}])
def test_ordinary_updates_are_not(columns: dict[str, float]) -> None:
    assert checks.kl_spike(history(**columns)) is None


def test_one_large_step_is_no_spike() -> None:
    assert checks.kl_spike(history(actor__kl=lambda step: 0.5 if step == 18 else 0.001)) is None


@pytest.mark.parametrize("columns", [{"actor__updates": 0.0}, {"frac_zero_std": 1.0}])
def test_groups_without_a_difference_teach_nothing(columns: dict[str, float]) -> None:
    run = history(score__mean=0.2, reward__correct__mean=0.2, **columns)
    finding = found(checks.zero_advantages(run), "zero_advantages")
    assert finding.steps == (16, 20)
    assert "rollout.n (now 8)" in finding.cure


@pytest.mark.parametrize(
    "columns",
    [
        {"frac_zero_std": 1.0, "reward__correct__mean": 0.97},  # nothing left to learn
        {"frac_zero_std": 1.0, "score__mean": 0.99, "score__max": 1.0},  # the same, without `correct`
        {"frac_zero_std": lambda step: 1.0 if step % 3 else 0.8},  # some groups differ
        {"frac_zero_std": 1.0, "settings": {"router": {"train_actor": False}}},  # only the router learns
    ],
)
def test_a_solved_task_is_no_disease(columns: dict[str, Any]) -> None:
    assert checks.zero_advantages(history(**{"score__mean": 0.2, **columns})) is None


@pytest.mark.parametrize("gap", [lambda step: 1e-7 * 3**step, lambda step: 0.01 * step])
def test_log_probs_that_drift_apart_are_found(gap: Callable[[int], float]) -> None:
    run = history(canary__logprob_gap_mean=gap)
    assert "drift" in found(checks.canary_drift(run), "canary_drift").name


@pytest.mark.parametrize("gap", [lambda step: 5e-8 * (1 + step % 9), lambda step: 0.02 + 0.002 * (step % 5)])
def test_rounding_in_single_or_half_precision_is_no_drift(gap: Callable[[int], float]) -> None:
    assert checks.canary_drift(history(canary__logprob_gap_mean=gap)) is None


def validations(name: str, *values: float, n: int = 100) -> list[dict[str, float]]:
    return [{"step": 4.0 * (i + 1), f"eval/{name}": value, "eval/n": float(n)} for i, value in enumerate(values)]


def test_a_held_out_score_that_falls_while_training_goes_well_is_overfitting() -> None:
    run = history(score__mean=falling(0.3, 0.9), validations=validations("score", 0.5, 0.6, 0.55, 0.35, 0.3))
    finding = found(checks.overfitting(run), "overfitting")
    assert finding.severity == "warning"
    assert finding.steps[0] == 8
    assert (finding.figures["held_out_best"], finding.figures["held_out"]) == (0.6, 0.3)


@pytest.mark.parametrize(
    ("scores", "n", "score"),
    [
        ((0.5, 0.6, 0.65, 0.7, 0.7), 100, falling(0.3, 0.9)),  # it rises
        ((0.5, 0.6, 0.58, 0.57, 0.59), 100, falling(0.3, 0.9)),  # it varies
        ((0.5, 0.6, 0.6, 0.5, 0.45), 16, falling(0.3, 0.9)),  # few tasks
        ((0.5, 0.6, 0.6, 0.36, 0.35), 16, falling(0.3, 0.9)),  # the best of few was lucky
        ((0.5, 0.6, 0.6, 0.3, 0.6), 100, falling(0.3, 0.9)),  # one bad validation
        ((0.5, 0.6, 0.6, 0.2, 0.1), 100, falling(0.9, 0.1)),  # training gets worse too: another disease
    ],
)
def test_other_held_out_scores_are_not(scores: tuple[float, ...], n: int, score: Callable[[int], float]) -> None:
    assert checks.overfitting(history(score__mean=score, validations=validations("score", *scores, n=n))) is None


def test_a_score_that_rises_while_answers_get_worse_is_hacked() -> None:
    rows = validations("correct", 0.4, 0.6, 0.3, 0.1)
    scored = [row | {"eval/score": score} for row, score in zip(rows, (0.3, 0.4, 0.6, 0.9), strict=True)]
    finding = found(checks.reward_hacking(history(validations=scored)), "reward_hacking")
    assert (finding.figures["correct_before"], finding.figures["correct"]) == (0.6, 0.1)
    assert (finding.figures["score_before"], finding.figures["score"]) == (0.4, 0.9)
    assert finding.steps == (8, 20)
    assert "toolwise check reward" in finding.cure


def test_without_validations_the_training_tasks_tell() -> None:
    run = history(score__mean=falling(0.3, 0.9), reward__correct__mean=falling(0.6, 0.2))
    assert "training tasks" in found(checks.reward_hacking(run), "reward_hacking").says


@pytest.mark.parametrize(
    ("score", "correct"),
    [
        (falling(0.3, 0.9), falling(0.3, 0.9)),  # both rise
        (falling(0.3, 0.2), falling(0.6, 0.2)),  # both fall: no one is rewarded for it
        (falling(0.3, 0.9), falling(0.5, 0.45)),  # hardly less correct
    ],
)
def test_scores_that_go_with_the_answers_are_not(
    score: Callable[[int], float], correct: Callable[[int], float]
) -> None:
    assert checks.reward_hacking(history(score__mean=score, reward__correct__mean=correct)) is None


def test_a_sampler_that_turns_to_harder_tasks_is_no_collapse_but_a_fall_on_held_out_tasks_is() -> None:
    def run(sampler: str, *held_out: float) -> History:
        scores = validations("score", *held_out)
        settings = {**SETTINGS, "data": {"sampler": sampler}}
        return history(score__mean=lambda s: 0.8 if s < 10 else 0.1, settings=settings, validations=scores)

    assert checks.score_collapse(run("difficulty")) is None
    assert checks.score_collapse(run("difficulty", 0.3, 0.4, 0.5, 0.5)) is None
    said = found(checks.score_collapse(run("difficulty", 0.6, 0.7, 0.1, 0.1)), "score_collapse").says
    assert "held-out" in said
    assert "training" not in said
    for order in ("", "uniform"):
        found(checks.score_collapse(run(order)), "score_collapse")


@pytest.mark.parametrize(("best", "solved"), [(0.0, True), (-0.2, True), (0.5, False)])
def test_penalties_are_solved_once_nearly_all_rollouts_have_the_highest_score(best: float, solved: bool) -> None:
    run = history(score__mean=falling(-0.7, min(best, 0.0)), score__max=best, frac_zero_std=1.0)
    assert run.solved is solved
    assert (checks.zero_advantages(run) is None) is solved


def test_a_fall_that_a_small_batch_shows_by_chance_is_none() -> None:
    def run(rollouts: float) -> History:
        return history(
            score__mean=lambda s: 0.02 if s < 6 else 0.6 if s < 13 else 0.3,
            score__std=lambda s: 0.14 if s < 6 else 0.48,
            rollouts=rollouts,
        )

    assert checks.score_collapse(run(64.0)) is None
    found(checks.score_collapse(run(512.0)), "score_collapse")
