from __future__ import annotations

from typing import Any

from toolwise.training.records import RolloutRecord
from toolwise.view.comparison import changed_tasks, contrasting_groups, describe_budgets, headline, rows_by_kind


def rollout(task_id: str, correct: float | None, **changes: Any) -> RolloutRecord:
    metrics = {} if correct is None else {"correct": correct}
    base = {
        "task_id": task_id,
        "group_id": task_id,
        "kind": "k",
        "metrics": metrics,
        "score": correct,
        "cost": 1.0,
    }
    return RolloutRecord.from_json(base | changes)


def test_at_most_eight_learned_tasks_come_first_then_some_still_wrong() -> None:
    before = [rollout(str(i), 0) for i in range(30)]
    after = [rollout(str(i), 1 if i < 20 else 0) for i in range(30)]
    assert [c.outcome for c in changed_tasks(before, after)] == ["learned"] * 8 + ["still wrong"] * 3


def test_losses_are_shown_too() -> None:
    changes = changed_tasks([rollout("a", 1)], [rollout("a", 0)])
    assert [c.outcome for c in changes] == ["lost"]


def test_what_stays_right_is_shown_only_where_it_got_cheaper() -> None:
    before = [rollout("a", 1, cost=2.0), rollout("b", 1)]
    after = [rollout("a", 1, cost=0.0), rollout("b", 1)]
    assert [(c.before.task_id, c.outcome) for c in changed_tasks(before, after)] == [("a", "cheaper")]


def test_without_verdicts_scores_decide() -> None:
    before = [rollout(i, None, score=0.5) for i in ("a", "b", "c")]
    after = [rollout(i, None, score=s) for i, s in (("a", 0.7), ("b", 0.3), ("c", 0.5))]
    assert [c.outcome for c in changed_tasks(before, after)] == ["better", "worse"]


def test_a_task_without_a_valid_score_has_neither_won_nor_lost() -> None:
    before = [rollout(i, None, score=s) for i, s in (("a", None), ("b", 1.0), ("c", None))]
    after = [rollout(i, None, score=s) for i, s in (("a", 1.0), ("b", None), ("c", None))]
    assert changed_tasks(before, after) == []


def test_the_shown_tasks_are_spread_over_the_kinds() -> None:
    before = [rollout(f"{kind}{i}", 0, kind=kind) for kind in ("a", "b") for i in range(20)]
    after = [rollout(f"{kind}{i}", 1, kind=kind) for kind in ("a", "b") for i in range(20)]
    assert [c.before.kind for c in changed_tasks(before, after)] == ["a", "b"] * 4


def test_without_a_second_validation_a_few_are_shown_as_they_were() -> None:
    changes = changed_tasks([rollout(str(i), 0) for i in range(9)], [])
    assert len(changes) == 4
    assert all(c.after is None for c in changes)


def test_telling_groups_are_those_whose_rollouts_differ() -> None:
    def trained(group: str, score: float, advantage: float | None) -> RolloutRecord:
        return rollout(group, score, group_id=group, steps=[{"advantage": advantage}])

    same = [trained("same", 1, 0.0), trained("same", 1, 0.0)]
    split = [trained("split", 0, -1.0), trained("split", 1, 1.0), trained("split", 0.5, 0.1)]
    none = [trained("none", 1, None), trained("none", 0, None)]
    groups = contrasting_groups([*same, *split, *none])
    assert [[r.score for r in group] for group in groups] == [[1, 0]]


def test_the_loss_of_an_sft_run_is_better_when_it_falls() -> None:
    summary = {"before": {"loss": 2.0}, "after": {"loss": 1.5}, "conversations": {"val": 7}}
    [row] = rows_by_kind(summary)
    assert (row.label, row.n, [change.name for change in row.changes]) == ("held-out conversations", 7, ["loss"])
    assert [(change.name, change.tone) for change in headline(summary)] == [("loss", "good")]
    assert [change.tone for change in headline({**summary, "after": {"loss": 2.5}})] == ["bad"]


def test_what_was_delivered_is_shown_with_its_interval_and_its_calibration() -> None:
    after = {"score": 0.8, "budget/cost/limit": 0.5, "budget/cost/delivered": 0.52, "budget/cost/stderr": 0.03}
    calibration = {
        "tasks": 400,
        "rolled_out": 128,
        "step": 70,
        "units": {"cost": {"limit": 0.5, "cost": 0.5, "standard_error": 0.02}},
    }
    assert describe_budgets({"after": after, "calibration": calibration}) == [
        "delivered cost 0.520 [0.461 0.579] against a budget of 0.5",
        "calibrated at step 70: cost 0.500 ± 0.020 (standard error) on 400 calibration tasks, 128 rolled out",
    ]
    assert describe_budgets({"after": {"score": 0.8}, "calibration": None}) == []
    assert describe_budgets({"after": None, "calibration": {"tasks": 64}}) == ["64 calibration tasks, not used yet"]


def test_money_is_shown_with_the_digits_of_its_budget() -> None:
    after = {"budget/usd/limit": 0.0004, "budget/usd/delivered": 0.000412, "budget/usd/stderr": 0.00001}
    units = {"usd": {"limit": 0.0004, "cost": 0.0004, "standard_error": 0.00001}}
    lines = describe_budgets(
        {"after": after, "calibration": {"tasks": 64, "rolled_out": 64, "step": 4, "units": units}}
    )
    assert lines == [
        "delivered usd 0.000412 [0.000392 0.000432] against a budget of 0.0004",
        "calibrated at step 4: usd 0.000400 ± 0.000010 (standard error) on 64 calibration tasks, 64 rolled out",
    ]
    [change] = headline({"before": {"cost": 0.00051}, "after": {"cost": 0.00041}})
    assert (change.before_text, change.after_text, change.difference_text) == ("0.000510", "0.000410", "-0.000100")


def test_kinds_without_verdicts_are_compared_by_score() -> None:
    side = {"score": 0.5, "cost": 1.0, "by_kind": {"sums": {"n": 3, "score": 0.5, "cost": 1.0}}}
    rows = rows_by_kind({"before": side, "after": side})
    assert [[change.name for change in row.changes] for row in rows] == [["score", "cost"]] * 2
    side["by_kind"]["sums"]["correct"] = 0.5  # type: ignore[index]
    assert [change.name for change in rows_by_kind({"before": side, "after": side})[1].changes] == ["correct", "cost"]
