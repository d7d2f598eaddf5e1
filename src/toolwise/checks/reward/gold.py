"""Gold and empty answers as test cases: the gold answer of a task must score best, the empty one must not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from pydantic import ValidationError

from toolwise.checks.reward.findings import MAX_EXAMPLES, scores_equal, usable_score
from toolwise.checks.reward.stored_rollouts import (
    Results,
    StoredRollout,
    placeholder_steps,
    score_rollouts,
    scoring_mode,
    split_into_calls,
)
from toolwise.errors import DataError
from toolwise.messages import Message, as_messages
from toolwise.training.evaluate import Scoring
from toolwise.types import EvaluateResult
from toolwise.types.findings import Finding

ANSWER_FORMS = ("{}", "#### {}", "Answer: {}", "<answer>{}</answer>", "\\boxed{{}}")
"""Formats for a bare ground truth; the first that the reward accepts counts."""

GoldAnswers = list[tuple[str, list[Message]]]
TaskKey = tuple[str, str]
"""(batch, task id): a score may depend on the training step."""


@dataclass(frozen=True, slots=True)
class GoldTrial:
    """Gold and empty answers of one task, with the scores of its stored rollouts."""

    stored: StoredRollout
    form: str | None
    """Format of the gold answer; None if the task has none."""
    gold: EvaluateResult | None
    empty: EvaluateResult | None
    scores: tuple[tuple[str, float], ...]
    """(rollout id, score) of the stored rollouts it is compared with."""

    @property
    def best(self) -> tuple[str, float] | None:
        return max(self.scores, key=lambda named: named[1], default=None)

    @property
    def margin(self) -> float:
        """By how much the gold answer beats the best stored rollout and the empty answer."""
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
        """At least as good as the gold answer; without one, as every rollout of a task whose scores differ."""
        if (empty := usable_score(self.empty)) is None:
            return False
        if (gold := usable_score(self.gold)) is not None:
            return empty > gold or scores_equal(empty, gold)
        scores = [score for _, score in self.scores]
        return len(scores) > 1 and not scores_equal(min(scores), max(scores)) and empty >= max(scores)

    @property
    def passed(self) -> bool:
        return self.gold_is_best and not self.empty_is_best


async def run_gold_trials(
    scoring: Scoring, stored: Sequence[StoredRollout], results: Results, form: str | None = None
) -> list[GoldTrial]:
    """One trial per distinct task. Tries the next form for tasks whose gold answer does not score best yet."""
    pending = list({_key(item): item for item in reversed(stored)}.values())[::-1]
    golds = {item.rollout.task.task_id: item.gold for item in stored if item.gold is not None}
    answers = {_key(item): _gold_answers(item, golds, form) for item in pending}
    trials: dict[TaskKey, GoldTrial] = {}
    round_index = 0
    while pending:
        for trial in await _run_round(scoring, stored, results, pending, answers, round_index):
            best = trials.get(_key(trial.stored))
            if best is None or trial.margin > best.margin:
                trials[_key(trial.stored)] = trial
        round_index += 1
        pending = [item for item in pending if round_index < len(answers[_key(item)]) and not trials[_key(item)].passed]
    return list(trials.values())


def _key(stored: StoredRollout) -> TaskKey:
    return stored.batch, stored.rollout.task.task_id


def _gold_answers(stored: StoredRollout, golds: Mapping[str, Any], form: str | None) -> GoldAnswers:
    """(form, conversation ending in that answer) pairs."""
    task = stored.rollout.task
    if task.task_id in golds:
        return [("gold", _conversation(stored, golds[task.task_id]))]
    if not isinstance(task.ground_truth, str) or not task.ground_truth.strip():
        return []
    return [
        (shape, _conversation(stored, shape.replace("{}", task.ground_truth)))
        for shape in ([form] if form else ANSWER_FORMS)
    ]


def _conversation(stored: StoredRollout, answer: Any) -> list[Message]:
    """The prompt followed by the answer; messages that bring their own prompt are used as they are."""
    prompt = list(stored.rollout.task.prompt)
    if isinstance(answer, str):
        return [*prompt, Message(role="assistant", content=answer)]
    try:
        messages = list(as_messages(answer))
    except (ValueError, ValidationError):
        raise DataError(
            f"task {stored.rollout.task.task_id}, field gold: not a text or messages; give the answer text or a "
            "list of {role, content}"
        ) from None
    return messages if messages and messages[0].role in ("system", "developer", "user") else [*prompt, *messages]


def _with_messages(stored: StoredRollout, name: str, messages: list[Message]) -> StoredRollout:
    prompt = list(stored.rollout.task.prompt)
    reply = messages[len(prompt) :] if messages[: len(prompt)] == prompt else messages
    steps = placeholder_steps([None for message in reply if message.role == "assistant"])
    name = f"{stored.rollout.task.task_id} ({name})"
    return replace(stored, rollout=replace(stored.rollout, rollout_id=name, messages=messages, steps=steps))


async def _run_round(
    scoring: Scoring,
    stored: Sequence[StoredRollout],
    results: Results,
    tasks: Sequence[StoredRollout],
    answers: Mapping[TaskKey, GoldAnswers],
    round_index: int,
) -> list[GoldTrial]:
    """Score the gold and empty answers of `tasks`; group and batch rewards get them along with the stored rollouts."""
    extras: dict[tuple[TaskKey, str], StoredRollout] = {}
    for item in tasks:
        extras[_key(item), "empty"] = _with_messages(item, "empty", _conversation(item, ""))
        if round_index < len(answers[_key(item)]):
            extras[_key(item), "gold"] = _with_messages(item, "gold", answers[_key(item)][round_index][1])
    mode, wanted = scoring_mode(scoring), {id(item) for item in tasks}
    calls = [] if mode == "pointwise" else split_into_calls(stored, mode)
    calls = [call for call in calls if any(id(stored[index]) in wanted for index in call)]
    compared = [stored[index] for call in calls for index in call]
    scored = await score_rollouts(scoring, [*compared, *extras.values()])
    by_name = dict(zip(extras, scored[len(compared) :], strict=True))
    scores: dict[TaskKey, list[tuple[str, float]]] = defaultdict(list)
    for item, result in zip(compared, scored, strict=False) if calls else zip(stored, results, strict=True):
        if (score := usable_score(result)) is not None:
            scores[_key(item)].append((item.rollout.rollout_id, score))
    return [
        GoldTrial(
            stored=item,
            form=answers[_key(item)][round_index][0] if round_index < len(answers[_key(item)]) else None,
            gold=by_name.get((_key(item), "gold")),
            empty=by_name[_key(item), "empty"],
            scores=tuple(scores[_key(item)]),
        )
        for item in tasks
    ]


def _count_tasks(trials: Iterable[GoldTrial]) -> int:
    return len({trial.stored.rollout.task.task_id for trial in trials})


def check_gold(trials: Sequence[GoldTrial]) -> Finding:
    """The gold answer of a task must score at least as high as any of its stored rollouts."""
    golden = [trial for trial in trials if trial.form is not None]
    figures: dict[str, Any] = {"tasks": _count_tasks(trials), "with_gold": _count_tasks(golden)}
    if not golden:
        says = "no gold answers: the ground truths are not text; add a column `gold` with texts or messages"
        return Finding("gold", "warning", says, figures)
    beaten = [trial for trial in golden if not trial.gold_is_best]
    forms = sorted({trial.form for trial in golden if trial.form not in (None, "gold", "{}")})
    figures |= {"beaten": _count_tasks(beaten), "forms": forms}
    if not beaten:
        form_note = f", in the form {' or '.join(forms)}" if forms else ""
        return Finding("gold", "ok", f"the gold answers of {_count_tasks(golden)} tasks score best{form_note}", figures)
    says = f"{_count_tasks(beaten)} of {_count_tasks(golden)} gold answers score below a stored rollout or get no score"
    if any(trial.form != "gold" for trial in beaten):
        says += "; if the ground truth is not the answer itself, add a column `gold`"
    return Finding("gold", "wrong", says, figures, tuple(map(_describe_beaten, beaten[:MAX_EXAMPLES])))


def _describe_beaten(trial: GoldTrial) -> str:
    task_id = trial.stored.rollout.task.task_id
    gold = usable_score(trial.gold)
    if gold is None or trial.best is None:
        fault = trial.gold.error if trial.gold is not None else None
        return f"task {task_id}: the gold answer gets no score" + (f" ({fault.kind}: {fault.message})" if fault else "")
    return f"task {task_id}: the gold answer scores {gold:g}, {trial.best[0]} scores {trial.best[1]:g}"


def check_empty(trials: Sequence[GoldTrial]) -> Finding:
    """An empty answer must not score best on its task, nor make the function fail."""
    best = [trial for trial in trials if trial.empty_is_best]
    failed = [(trial, trial.empty.error) for trial in trials if trial.empty is not None and trial.empty.error]
    tasks, n_best, n_failed = _count_tasks(trials), _count_tasks(best), _count_tasks(trial for trial, _ in failed)
    figures = {"tasks": tasks, "best": n_best, "failed": n_failed}
    if not best and not failed:
        return Finding("empty", "ok", f"an empty answer does not score best on any of {tasks} tasks", figures)
    says = (
        f"an empty answer scores best on {n_best} of {tasks} tasks" if best else "",
        f"the reward fails on {n_failed} of {tasks} empty answers" if failed else "",
    )
    shown = (
        *(f"task {t.stored.rollout.task.task_id}: an empty answer scores {usable_score(t.empty):g}" for t in best),
        *(f"task {t.stored.rollout.task.task_id}: {fault.kind}: {fault.message}" for t, fault in failed),
    )
    return Finding("empty", "wrong", "; ".join(filter(None, says)), figures, shown[:MAX_EXAMPLES])
