"""Checks of what the agent writes and does: length, repetition, truncation, tools, cost, and who waits for whom."""

from __future__ import annotations

from toolwise.training.diagnosis.history import TREND_STEPS, WINDOW, History, Row, number
from toolwise.training.diagnosis.starvation import STARVED_STEPS, WAITS, explain_starvation
from toolwise.training.metrics import budget_unit
from toolwise.types.findings import Finding

CREPT_LENGTH, CREPT_LENGTH_UNKNOWN, CREPT_INTO_LIMIT = 2.0, 3.0, 1.75
"""How many times longer rollouts may become without more correct answers; if the reward reports no `correct`; and if it
does not and replies are now cut off, which they were not at the beginning."""
MORE_CORRECT = 0.05
RISEN_SCORE = 0.3
"""A rise of the score, in standard deviations of the first scores, that is worth longer rollouts."""
SAME_OUTPUT = 0.6
"""Share of rollouts with one and the same output."""
MIN_TASKS = 4
"""Tasks in a batch from which the same output for most of them means something."""
CUT = 0.2
"""Share of rollouts whose last reply was cut off."""
FAILED_CALLS, MIN_CALLS = 0.2, 10
OVERSPENT = 1.15
"""Share of a budget's limit."""
BUDGET_STEPS = 20
"""λ needs this many steps."""


def length_creep(history: History) -> Finding | None:
    """Rollouts become much longer without more correct answers."""
    if len(history.rows) < TREND_STEPS:
        return None
    before, now = _length(history.rows[:WINDOW]), _length(history.rows[-WINDOW:])
    first, last = history.early("reward/correct/mean"), history.late("reward/correct/mean")
    known = first is not None and last is not None
    limit = CREPT_LENGTH if known else _unknown_limit(history)
    if not before or now < limit * before or (not known and _worth_it(history)):
        return None
    if first is not None and last is not None and last - first >= MORE_CORRECT:
        return None
    correct = (
        ""
        if first is None or last is None
        else f", while the share of correct answers went from {first:.0%} to {last:.0%}"
    )
    return Finding(
        "length_creep",
        "warning",
        f"Rollouts have grown from {before:.0f} to {now:.0f} tokens{correct}: the reward pays for length",
        {"tokens_before": before, "tokens": now, "correct_before": first, "correct": last},
        cure="Read the longest rollouts; do not reward length, lower "
        f"{history.named('rollout.max_new_tokens')}, or charge for tokens (router.budgets, "
        f"algorithm.invalid_action_penalty)",
        step=history.step,
        steps=(int(number(history.rows[0], "step")), history.step),
        settings=("reward.function", "rollout.max_new_tokens"),
    )


def identical_outputs(history: History) -> Finding | None:
    """Different tasks get one and the same reply, which they did not at the beginning."""
    name, tasks = "outputs/most_common", history.setting("data.batch_size")
    before, now = history.early(name), history.late(name)
    if len(history.rows) < TREND_STEPS or before is None or now is None or history.solved:
        return None
    if now < SAME_OUTPUT or before > now / 2 or (isinstance(tasks, int) and tasks < MIN_TASKS):
        return None
    return Finding(
        "identical_outputs",
        "wrong",
        f"{now:.0%} of the rollouts of the latest {WINDOW} steps are word for word the same, whatever the task "
        f"({before:.0%} at the beginning): one reply earns the reward everywhere",
        {"share_before": before, "share": now},
        cure="Read that reply, and test the reward on it with `toolwise check reward`: it must depend on the task; a "
        f"smaller {history.named('actor.lr')} or actor.entropy_coef above 0 keeps the policy from narrowing so fast",
        step=history.step,
        steps=history.window,
        settings=("reward.function", "actor.lr", "actor.entropy_coef"),
    )


def truncation(history: History) -> Finding | None:
    """A good part of the replies is cut off."""
    share = history.late("outputs/cut")
    if len(history.rows) < WINDOW or share is None or share < CUT or history.fallen:  # a broken policy never ends
        return None
    return Finding(
        "truncation",
        "warning",
        f"{share:.0%} of the rollouts of the latest {WINDOW} steps end in a reply that was cut off after "
        f"{history.named('rollout.max_new_tokens')} tokens: the reward sees half an answer, or half a call",
        {"cut": share},
        cure=f"Raise {history.named('rollout.max_new_tokens')}, ask for shorter replies in the prompt, or leave such "
        "rollouts out of the update (algorithm.mask_truncated)",
        step=history.step,
        steps=history.window,
        settings=("rollout.max_new_tokens", "algorithm.mask_truncated"),
    )


def tool_failures(history: History) -> Finding | None:
    """A tool raises or times out often, though not always."""
    rows = history.rows[-3:]
    calls = sum(number(row, "calls/mean") * number(row, "rollouts") for row in rows)
    failed = sum(number(row, "faults/tool") for row in rows)
    if len(rows) < 3 or calls < MIN_CALLS or failed < FAILED_CALLS * calls:
        return None
    shares = {name.removeprefix("faults/tool/"): value for name, value in rows[-1].items() if "faults/tool/" in name}
    named = ", ".join(f"{name} ({share:.0%})" for name, share in sorted(shares.items(), key=lambda item: -item[1])[:3])
    return Finding(
        "tool_failures",
        "warning",
        f"{failed / calls:.0%} of the calls of the latest 3 steps raised or timed out, whatever the model asked"
        + (f": {named}" if named else ""),
        {"failed": failed, "calls": calls, "tools": shares},
        cure="Read what the tool answered in these rollouts and test it with `toolwise check tool`; if it is slow, "
        "raise "
        f"{history.named('multi_turn.tool_timeout_s')}; faults.tool ends a run in which too many fail",
        step=history.step,
        steps=(int(number(rows[0], "step")), history.step),
        settings=("multi_turn.tool_timeout_s", "faults.tool"),
    )


def budget_missed(history: History) -> Finding | None:
    """The router spends more than its budget allows, long after λ should have corrected it."""
    unit = budget_unit(name for row in history.rows[-1:] for name in row)
    if unit is None or len(history.rows) < BUDGET_STEPS:
        return None
    limit, spent = number(history.rows[-1], f"router/{unit}/budget"), history.late(f"router/{unit}/mean", 10)
    if spent is None or spent <= OVERSPENT * limit + 1e-9:
        return None
    delivered = next((row for row in reversed(history.validations) if f"eval/budget/{unit}/delivered" in row), None)
    if delivered is not None and number(delivered, f"eval/budget/{unit}/delivered") <= OVERSPENT * limit:
        return None  # a calibrated threshold holds it
    capped = (history.late(f"router/{unit}/lambda_at_cap") or 0.0) > 0.5
    cap = "raise the cap of the budget (router.budgets: cap), which binds λ; " if capped else ""
    return Finding(
        "budget_missed",
        "warning",
        f"The routes of the latest 10 steps cost {spent:.3g} {unit} on average, but the budget is {limit:.3g}"
        + (", and λ is at its cap" if capped else ""),
        {"spent": spent, "limit": limit, "lambda": number(history.rows[-1], f"router/{unit}/lambda")},
        cure=f"{cap}raise rate or proportional of the budget, train longer "
        f"({history.named('trainer.total_steps')}), or allow more: below what the tasks need, a budget costs score",
        step=history.step,
        steps=(int(number(history.rows[-10:][0], "step")), history.step),
        settings=("router.budgets",),
    )


def starvation(history: History) -> Finding | None:
    """In asynchronous training, learner or engine mostly wait."""
    rows = [row for row in history.rows[-STARVED_STEPS:] if WAITS[0] in row]
    if len(rows) < STARVED_STEPS:
        return None
    learner, engine = (sum(number(row, name) for row in rows) / STARVED_STEPS for name in WAITS)
    staleness = history.setting("trainer.max_staleness")
    return explain_starvation(learner, engine, staleness if isinstance(staleness, int) else 1, history.step)


def _unknown_limit(history: History) -> float:
    """How many times longer rollouts may become if nothing tells whether it is worth it."""
    return CREPT_INTO_LIMIT if _into_limit(history) else CREPT_LENGTH_UNKNOWN


def _into_limit(history: History) -> bool:
    """Whether replies are now cut off, which they were not at the beginning."""
    cut_before, cut = history.early("outputs/cut"), history.late("outputs/cut")
    return cut_before is not None and cut is not None and cut >= CUT and cut_before < CUT / 4


def _worth_it(history: History) -> bool:
    """Whether a clearly better score speaks for longer rollouts; not if they grow until they are cut off, as they do if
    the reward pays for length."""
    before, now = history.early("score/mean"), history.late("score/mean")
    risen = before is not None and now is not None and now - before >= RISEN_SCORE * history.score_scale
    return risen and history.score_scale > 0 and not _into_limit(history)


def _length(rows: list[Row]) -> float:
    """Mean tokens of a rollout."""
    return sum(number(row, "tokens/sampled") for row in rows) / max(1.0, sum(number(row, "rollouts") for row in rows))
