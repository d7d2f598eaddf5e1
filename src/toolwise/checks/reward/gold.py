"""Conversations as they should have gone, and as they should not: the first must score best, the empty one must not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from pydantic import ValidationError

from toolwise.checks.reward.findings import MAX_EXAMPLES, Finding, scores_equal, usable_score
from toolwise.checks.reward.scoring_pass import Results, score_rollouts, scoring_mode, split_into_calls
from toolwise.checks.reward.stored_rollouts import StoredRollout
from toolwise.errors import DataError
from toolwise.messages import Message, as_messages
from toolwise.training.scoring import Scoring
from toolwise.types import EvaluateResult, StepData

ANSWER_FORMS = ("{}", "#### {}", "Answer: {}", "<answer>{}</answer>", "\\boxed{{}}")
"""How a bare ground truth may have to be said; the first of them that a reward takes for right counts."""

GoldAnswers = list[tuple[str, list[Message]]]
TaskKey = tuple[str, str]
"""A task in a step: what a rollout earns may depend on the step."""


@dataclass(frozen=True, slots=True)
class GoldTrial:
    """One task's gold and empty answers beside its stored rollouts."""

    stored: StoredRollout
    form: str | None
    """How the gold answer was said; None where the task has none."""
    gold: EvaluateResult | None
    empty: EvaluateResult | None
    scores: tuple[tuple[str, float], ...]
    """The stored rollouts that it was compared with, and what they scored."""

    @property
    def best(self) -> tuple[str, float] | None:
        return max(self.scores, key=lambda named: named[1], default=None)

    @property
    def margin(self) -> float:
        """By how much the gold answer leads."""
        gold, empty = usable_score(self.gold), usable_score(self.empty)
        if gold is None:
            return -inf
        return gold - max(self.best[1] if self.best else -inf, empty if empty is not None else -inf)

    @property
    def gold_is_best(self) -> bool:
        gold = usable_score(self.gold)
        return gold is not None and (self.best is None or gold >= self.best[1] or scores_equal(gold, self.best[1]))

    @property
    def empty_is_best(self) -> bool:
        """No worse than the gold answer; or, where there is none, than all rollouts of a task that they differ on."""
        empty = usable_score(self.empty)
        if empty is None:
            return False
        if (gold := usable_score(self.gold)) is not None:
            return empty > gold or scores_equal(empty, gold)
        found = [score for _, score in self.scores]
        return len(found) > 1 and not scores_equal(min(found), max(found)) and empty >= max(found)

    @property
    def passed(self) -> bool:
        return self.gold_is_best and not self.empty_is_best


async def run_gold_trials(
    scoring: Scoring, stored: Sequence[StoredRollout], results: Results, form: str | None = None
) -> list[GoldTrial]:
    """A trial for each distinct task. Forms are tried in turn for those whose gold answer does not lead yet."""
    waiting = list({_key(one): one for one in reversed(stored)}.values())[::-1]
    golds = {one.rollout.task.task_id: one.gold for one in stored if one.gold is not None}
    answers = {_key(one): _gold_answers(one, golds, form) for one in waiting}
    trials: dict[TaskKey, GoldTrial] = {}
    round_index = 0
    while waiting:
        for trial in await _run_round(scoring, stored, results, waiting, answers, round_index):
            known = trials.get(_key(trial.stored))
            if known is None or trial.margin > known.margin:
                trials[_key(trial.stored)] = trial
        round_index += 1
        waiting = [one for one in waiting if round_index < len(answers[_key(one)]) and not trials[_key(one)].passed]
    return list(trials.values())


def _key(one: StoredRollout) -> TaskKey:
    return one.batch, one.rollout.task.task_id


def _gold_answers(one: StoredRollout, golds: Mapping[str, Any], form: str | None) -> GoldAnswers:
    """Each form's name and the conversation that ends in it."""
    task = one.rollout.task
    if task.task_id in golds:
        return [("gold", _conversation(one, golds[task.task_id]))]
    if not isinstance(task.ground_truth, str) or not task.ground_truth.strip():
        return []
    said = [(shape, shape.replace("{}", task.ground_truth)) for shape in ([form] if form else ANSWER_FORMS)]
    return [(shape, _conversation(one, text)) for shape, text in said]


def _conversation(one: StoredRollout, answer: Any) -> list[Message]:
    """The prompt with the answer behind it; messages that begin with a prompt of their own are the whole."""
    prompt = list(one.rollout.task.prompt)
    if isinstance(answer, str):
        return [*prompt, Message(role="assistant", content=answer)]
    try:
        told = list(as_messages(answer))
    except (ValueError, ValidationError):
        raise DataError(
            f"task {one.rollout.task.task_id}, field gold: neither a text nor messages; give the answer's text or a "
            "list of {role, content}"
        ) from None
    return told if told and told[0].role in ("system", "developer", "user") else [*prompt, *told]


def _with_messages(one: StoredRollout, name: str, messages: list[Message]) -> StoredRollout:
    prompt = list(one.rollout.task.prompt)
    behind = messages[len(prompt) :] if messages[: len(prompt)] == prompt else messages
    steps = tuple(
        StepData(system_step_index=i, observation_data=None, action_taken={}, resulting_messages_history=[])
        for i, _ in enumerate(m for m in behind if m.role == "assistant")
    )
    named = f"{one.rollout.task.task_id} ({name})"
    return replace(one, rollout=replace(one.rollout, rollout_id=named, messages=messages, steps=steps))


async def _run_round(
    scoring: Scoring,
    stored: Sequence[StoredRollout],
    results: Results,
    tasks: Sequence[StoredRollout],
    answers: Mapping[TaskKey, GoldAnswers],
    round_index: int,
) -> list[GoldTrial]:
    """Gold and empty answers of `tasks`; rewards that compare get them in the company of the stored rollouts."""
    extras: dict[tuple[TaskKey, str], StoredRollout] = {}
    for one in tasks:
        extras[_key(one), "empty"] = _with_messages(one, "empty", _conversation(one, ""))
        if round_index < len(answers[_key(one)]):
            extras[_key(one), "gold"] = _with_messages(one, "gold", answers[_key(one)][round_index][1])
    mode = scoring_mode(scoring)
    if mode == "pointwise":
        company, scored = list(zip(stored, results, strict=True)), await score_rollouts(scoring, [*extras.values()])
    else:
        wanted = {id(one) for one in tasks}
        shared = [call for call in split_into_calls(stored, mode) if any(id(stored[place]) in wanted for place in call)]
        beside = [stored[place] for call in shared for place in call]
        together = await score_rollouts(scoring, [*beside, *extras.values()])
        company, scored = list(zip(beside, together[: len(beside)], strict=True)), together[len(beside) :]
    by_name = dict(zip(extras, scored, strict=True))
    scores: dict[TaskKey, list[tuple[str, float]]] = defaultdict(list)
    for one, result in company:
        if (score := usable_score(result)) is not None:
            scores[_key(one)].append((one.rollout.rollout_id, score))
    return [
        GoldTrial(
            stored=one,
            form=answers[_key(one)][round_index][0] if round_index < len(answers[_key(one)]) else None,
            gold=by_name.get((_key(one), "gold")),
            empty=by_name[_key(one), "empty"],
            scores=tuple(scores[_key(one)]),
        )
        for one in tasks
    ]


def _count_tasks(trials: Iterable[GoldTrial]) -> int:
    return len({trial.stored.rollout.task.task_id for trial in trials})


def check_gold(trials: Sequence[GoldTrial]) -> Finding:
    """The gold answer of a task must score no less than any stored rollout of it."""
    golden = [trial for trial in trials if trial.form is not None]
    figures: dict[str, Any] = {"tasks": _count_tasks(trials), "with_gold": _count_tasks(golden)}
    if not golden:
        says = "no gold answers: the ground truths are no texts; add a column `gold` of texts or messages"
        return Finding("gold", "warning", says, figures)
    beaten = [trial for trial in golden if not trial.gold_is_best]
    forms = sorted({trial.form for trial in golden if trial.form not in (None, "gold", "{}")})
    figures |= {"beaten": _count_tasks(beaten), "forms": forms}
    if not beaten:
        said = f", said as {' or '.join(forms)}" if forms else ""
        return Finding("gold", "ok", f"the gold answers of {_count_tasks(golden)} tasks score best{said}", figures)
    says = (
        f"{_count_tasks(beaten)} of {_count_tasks(golden)} gold answers are beaten by a stored rollout or get no score"
    )
    if any(trial.form != "gold" for trial in beaten):
        says += "; where the ground truth is not the answer, add a column `gold`"
    return Finding("gold", "wrong", says, figures, tuple(map(_describe_beaten, beaten[:MAX_EXAMPLES])))


def _describe_beaten(trial: GoldTrial) -> str:
    task_id = trial.stored.rollout.task.task_id
    gold = usable_score(trial.gold)
    if gold is None or trial.best is None:
        fault = trial.gold.error if trial.gold is not None else None
        return f"task {task_id}: the gold answer gets no score" + (f" ({fault.kind}: {fault.message})" if fault else "")
    return f"task {task_id}: the gold answer scores {gold:g}, {trial.best[0]} scores {trial.best[1]:g}"


def check_empty(trials: Sequence[GoldTrial]) -> Finding:
    """An answer without a word must not be the best of its task, nor bring the function down."""
    best = [trial for trial in trials if trial.empty_is_best]
    failed = [trial for trial in trials if trial.empty is not None and trial.empty.error is not None]
    figures = {"tasks": _count_tasks(trials), "best": _count_tasks(best), "failed": _count_tasks(failed)}
    if not best and not failed:
        return Finding(
            "empty", "ok", f"an empty answer is not the best of any of {_count_tasks(trials)} tasks", figures
        )
    says = [f"an empty answer scores best on {_count_tasks(best)} of {_count_tasks(trials)} tasks"] if best else []
    says += [f"it fails on an empty answer on {_count_tasks(failed)} of {_count_tasks(trials)} tasks"] if failed else []
    shown = [f"task {t.stored.rollout.task.task_id}: an empty answer scores {usable_score(t.empty):g}" for t in best]
    shown += [f"task {t.stored.rollout.task.task_id}: {_describe_fault(t.empty)}" for t in failed]
    return Finding("empty", "wrong", "; ".join(says), figures, tuple(shown[:MAX_EXAMPLES]))


def _describe_fault(result: EvaluateResult | None) -> str:
    return f"{result.error.kind}: {result.error.message}" if result is not None and result.error else ""
