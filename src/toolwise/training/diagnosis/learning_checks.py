"""Checks of learning: each looks at a run's metrics so far and returns a finding, or None if nothing is wrong.

Thresholds are calibrated on recorded runs, healthy and ill (tests/fixtures/doctor): a healthy one must show nothing.
"""

from __future__ import annotations

import math

from toolwise.training.diagnosis.history import TREND_STEPS, WINDOW, History, Row, number
from toolwise.types.findings import Finding

COLLAPSED_ENTROPY = 0.1
"""Share of the entropy at the beginning."""
MEASURED_STEPS = 3
"""Of the latest steps, how many must have measured the entropy."""
NOT_IMPROVED = 0.2
"""A rise of the score below this, in standard deviations of the first scores, is none."""
RISEN_SCORE = 0.5
SPIKED_KL, HUGE_KL = 0.1, 1.0
"""Mean change of the log-prob of a token within one update, in two steps or in one."""
SPIKED_CLIPPING = 0.4
"""Share of tokens beyond the clipping range."""
DRIFT_FACTOR, DRIFT_GAP, LARGE_GAP = 10.0, 1e-4, 0.05
FALLEN_METRIC = 0.1
NO_DIFFERENCE = 0.99
"""Share of groups without a difference in rewards."""
SMALLER_LR = "a smaller actor.lr"


def entropy_collapse(history: History) -> Finding | None:
    """The policy hardly varies any more, without having become better: there is nothing left to learn from."""
    before, now = history.early("actor/entropy"), history.late("actor/entropy")
    if sum("actor/entropy" in row for row in history.rows[-WINDOW:]) < MEASURED_STEPS:  # few steps had an update
        return None
    if len(history.rows) < TREND_STEPS or not before or now is None or now > COLLAPSED_ENTROPY * before:
        return None
    if history.solved or _improved(history):
        return None
    return Finding(
        "entropy_collapse",
        "wrong",
        f"The entropy of the policy has fallen to {now:.2g} ({now / before:.0%} of {before:.2g} at the beginning) "
        f"while "
        "the score did not rise: the policy writes the same again and again, so that no rollout is better than another",
        {"entropy_before": before, "entropy": now, **_scores(history)},
        cure=f"Go back to an earlier checkpoint with a smaller {history.named('actor.lr')} or actor.entropy_coef "
        f"above 0 "
        f"{_now(history, 'actor.entropy_coef')}; a higher rollout.temperature explores more",
        step=history.step,
        steps=history.window,
        settings=("actor.lr", "actor.entropy_coef", "rollout.temperature"),
    )


def score_collapse(history: History) -> Finding | None:
    """The score was far better before, and stays down, in training or on held-out tasks."""
    now, best = history.late("score/mean"), history.best_score_step
    held_out = None if history.fallen else _fallen_held_out(history)
    if now is None or not (history.fallen or held_out):
        return None
    says = (
        f"The mean score of the latest {WINDOW} steps is {now:.3g}; the best step had {history.best_step_score:.3g}"
        if held_out is None
        else f"The held-out score has fallen from {held_out[0]:.3g} to {held_out[1]:.3g}"
        + ("" if history.chosen_tasks else ", the training score with it")
    )
    return Finding(
        "score_collapse",
        "wrong",
        f"{says}: the updates have made the policy worse",
        {"score": now, "best_score": history.best_score, "best_step_score": history.best_step_score},
        cure=f"Go back to the best checkpoint, or begin again, with a smaller {history.named('actor.lr')}, fewer "
        f"optimizer "
        f"steps on a batch ({history.named('actor.ppo_epochs')}, {history.named('actor.mini_batches')}), or "
        f"algorithm.kl "
        "against a reference",
        step=history.step,
        steps=(min(best or 1, history.window[0]), history.step),
        settings=("actor.lr", "actor.ppo_epochs", "actor.mini_batches", "algorithm.kl"),
    )


def _fallen_held_out(history: History) -> tuple[float, float] | None:
    """Best and latest held-out score, if the two latest validations are far below it and training is worse too. The
    training score does not count if a sampler chooses the tasks."""
    known, scale = [row for row in history.validations if "eval/score" in row], history.score_scale
    if len(known) < 3 or not scale:
        return None
    best = max(known[:-2], key=lambda row: number(row, "eval/score"))
    fall = number(best, "eval/score") - max(number(row, "eval/score") for row in known[-2:])
    then, now = _score_at(history, int(number(best, "step"))), history.late("score/mean")
    if fall < max(0.5 * scale, _chance(best, history)) or then is None or now is None:
        return None
    if now >= then - NOT_IMPROVED * scale and not history.chosen_tasks:
        return None
    return number(best, "eval/score"), number(known[-1], "eval/score")


def kl_spike(history: History) -> Finding | None:
    """One update has moved the policy far from the one that sampled its tokens."""
    spikes = [row for row in history.rows[-WINDOW:] if _spiked(row)]
    kl = max((abs(number(row, "actor/kl")) for row in spikes), default=0.0)
    if len(spikes) < 2 and kl < HUGE_KL:
        return None
    clipped = max(number(row, "actor/clip_frac") for row in spikes)
    return Finding(
        "kl_spike",
        "wrong",
        f"In {len(spikes)} of the latest {len(history.rows[-WINDOW:])} steps a single update moved the policy far from "
        f"the one that sampled its tokens: the log-prob of a token changed by {kl:.2g} on average, {clipped:.0%} of "
        f"the "
        "ratios were clipped",
        {"kl": kl, "clip_frac": clipped},
        cure=f"Try a smaller {history.named('actor.lr')}, longer {history.named('actor.warmup_steps')}, or fewer "
        f"optimizer "
        f"steps on a batch: {history.named('actor.ppo_epochs')}, {history.named('actor.mini_batches')}",
        step=history.step,
        steps=(int(number(spikes[0], "step")), int(number(spikes[-1], "step"))),
        settings=("actor.lr", "actor.warmup_steps", "actor.ppo_epochs", "actor.mini_batches"),
    )


def zero_advantages(history: History) -> Finding | None:
    """For several steps no group had a difference to learn from, although the tasks are not solved."""
    latest = history.rows[-WINDOW:]
    if len(latest) < WINDOW or history.setting("router.train_actor") is False or history.solved or history.fallen:
        return None
    empty = [
        number(row, "actor/updates", 1.0) == 0.0 or number(row, "frac_zero_std") >= NO_DIFFERENCE for row in latest
    ]
    if not all(empty):
        return None
    return Finding(
        "zero_advantages",
        "wrong",
        f"In the latest {WINDOW} steps the rollouts of every task had equal rewards: all advantages are 0 and "
        f"nothing is "
        f"learned, at a mean score of {history.late('score/mean') or 0.0:.3g}",
        {"frac_zero_std": history.late("frac_zero_std"), **_scores(history)},
        cure="Use a reward that distinguishes better replies from worse, more rollouts per task "
        f"({history.named('rollout.n')}), a higher {history.named('rollout.temperature')}, or tasks that the model "
        "sometimes solves",
        step=history.step,
        steps=history.window,
        settings=("rollout.n", "rollout.temperature", "reward.function"),
    )


def canary_drift(history: History) -> Finding | None:
    """The engine's log-probs move away from the learner's, so that updates are about another policy."""
    name = "canary/logprob_gap_mean"
    before, now = history.early(name), history.late(name, 3)
    if before is None or now is None or len(history.rows) < WINDOW:
        return None
    if not (
        now > LARGE_GAP or (now > DRIFT_GAP and now > DRIFT_FACTOR * min(before, number(history.rows[0], name, before)))
    ):
        return None
    return Finding(
        "canary_drift",
        "wrong",
        f"Engine and learner disagree more and more on the log-probs of the same tokens: by {now:.2g} on average, "
        f"{number(history.rows[0], name):.2g} at the first step",
        {"gap": now, "first_gap": number(history.rows[0], name)},
        cure="Look for stale weights or caches in the engine, other precision or sampling settings on the two sides; "
        'actor.old_logprobs = "recompute" corrects small gaps, actor.mismatch_check = "stop" ends such a run',
        step=history.step,
        steps=history.window,
        settings=("actor.old_logprobs", "actor.mismatch_check", "model.dtype"),
    )


def overfitting(history: History) -> Finding | None:
    """The held-out score falls while the training score does not."""
    known = [row for row in history.validations if "eval/score" in row]
    scale = history.score_scale
    if len(known) < 3 or not scale or len(history.rows) < TREND_STEPS:
        return None
    best = max(known[:-2], key=lambda row: number(row, "eval/score"))
    fall = number(best, "eval/score") - max(number(row, "eval/score") for row in known[-2:])
    then, now = _score_at(history, int(number(best, "step"))), history.late("score/mean")
    if fall < _chance(best, history) or then is None or now is None:
        return None
    if now < then - NOT_IMPROVED * scale or (history.chosen_tasks and _fallen_held_out(history)):
        return None
    last = number(known[-1], "eval/score")
    return Finding(
        "overfitting",
        "warning",
        f"The held-out score has fallen from {number(best, 'eval/score'):.3g} (step {number(best, 'step'):g}) to "
        f"{last:.3g}, while the score in training went from {then:.3g} to {now:.3g}: the model learns its training "
        f"tasks "
        "by heart",
        {"held_out_best": number(best, "eval/score"), "held_out": last, "training_then": then, "training": now},
        cure="Use the best checkpoint (trainer.keep_best), more training tasks, fewer steps "
        f"({history.named('trainer.total_steps')}), a smaller {history.named('actor.lr')}, or algorithm.kl against a "
        "reference",
        step=history.step,
        steps=(int(number(best, "step")), history.step),
        settings=("trainer.total_steps", "actor.lr", "algorithm.kl", "data.train"),
    )


def reward_hacking(history: History) -> Finding | None:
    """The score rises while the share of correct answers falls: the reward is not what is wanted."""
    scale, held_out = history.score_scale, [row for row in history.validations if "eval/correct" in row]
    if len(history.rows) < TREND_STEPS or not scale:
        return None
    if len(held_out) >= 2:
        best, last = max(held_out[:-1], key=lambda row: number(row, "eval/correct")), held_out[-1]
        where, since, noise = "held-out tasks", int(number(best, "step")), _noise(best, 0.5)
        correct = number(best, "eval/correct"), number(last, "eval/correct")
        scores: tuple[float | None, float | None] = number(best, "eval/score"), number(last, "eval/score")
    else:
        early, late = history.early("reward/correct/mean"), history.late("reward/correct/mean")
        if early is None or late is None:
            return None
        where, since, noise, correct = "training tasks", int(number(history.rows[0], "step")), 0.0, (early, late)
        scores = history.early("score/mean"), history.late("score/mean")
    before, now = scores
    if before is None or now is None or now - before < max(RISEN_SCORE * scale, 1.5 * noise * scale / 0.5):
        return None
    if correct[0] - correct[1] < max(FALLEN_METRIC, noise):
        return None
    return Finding(
        "reward_hacking",
        "wrong",
        f"The score on {where} rose from {before:.3g} to {now:.3g} while the share of correct answers fell from "
        f"{correct[0]:.0%} to {correct[1]:.0%}: the model has found another way to be rewarded",
        {"score_before": before, "score": now, "correct_before": correct[0], "correct": correct[1]},
        cure="Read the rollouts with the highest scores, and test the reward on them with `toolwise check reward`; "
        "reward "
        "the right answer alone, or give it far more weight (reward.parts)",
        step=history.step,
        steps=(since, history.step),
        settings=("reward.function", "reward.parts"),
    )


def _spiked(row: Row) -> bool:
    return abs(number(row, "actor/kl")) > SPIKED_KL or number(row, "actor/clip_frac") > SPIKED_CLIPPING


def _improved(history: History) -> bool:
    """Whether answers are better than at the beginning: in training, or on held-out tasks, by `correct` if it is
    reported."""
    name = "reward/correct/mean" if history.late("reward/correct/mean") is not None else "score/mean"
    before, now, scale = history.early(name), history.late(name), history.score_scale
    if before is not None and now is not None and now - before >= NOT_IMPROVED * scale:
        return True
    held_out = "eval/correct" if name.startswith("reward/") else "eval/score"
    known = [row for row in history.validations if held_out in row]
    rise = number(known[-1], held_out) - number(known[0], held_out) if len(known) >= 2 else 0.0
    return len(known) >= 2 and rise >= _noise(known[0], 0.5 if held_out == "eval/correct" else scale)


def _scores(history: History) -> dict[str, float | None]:
    return {"score_before": history.early("score/mean"), "score": history.late("score/mean")}


def _score_at(history: History, step: int) -> float | None:
    """The training score around a step."""
    near = [number(row, "score/mean") for row in history.rows if abs(number(row, "step") - step) <= 2]
    return math.fsum(near) / len(near) if near else None


def _noise(validation: Row, std: float) -> float:
    """Twice the standard error of a validation's mean."""
    return 2 * std / math.sqrt(max(1.0, number(validation, "eval/n", 1.0)))


def _chance(validation: Row, history: History) -> float:
    """How far below the best of many validations the next ones may be by chance: twice the error of the difference."""
    return math.sqrt(2) * _noise(validation, history.score_spread)


def _now(history: History, key: str) -> str:
    value = history.setting(key)
    return "" if value is None else f"(now {value:g})"
