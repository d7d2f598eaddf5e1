"""The comparison's own arithmetic: which rate is best, which form is, and differences that are paired."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import thinking_compare as compare
import thinking_plan as plan
import thinking_report as report


def record(job: Any, success: float, tokens: float, houses: int = 40) -> Any:
    """A run with that success and these thinking tokens a step, one step a house, hard ones deep."""
    won = round(success * houses)
    evaluation: dict[str, Any] = {
        "success": "1" * won + "0" * (houses - won),
        "steps": [1] * houses,
        "thinking_tokens": [tokens] * houses,
        "levels": {"easy": [9, 0, 0, 1], "hard": [1, 0, 0, 9]},
        "right": {"easy": [9, 0, 0, 1], "hard": [0, 0, 0, 9]},
        "format_valid": 1.0,
    }
    lines = [
        {"step": n, "success": success, "thinking/tokens_per_step": tokens, "tokens/sampled": 100.0}
        for n in range(1, plan.EVALUATED[-1] + 1)
    ]
    found = [compare.Evaluation(after=after, **evaluation) for after in job.evaluated]
    return compare.Record(job, lines, found, 10.0)


def whole() -> dict[str, Any]:
    """Every run of the comparison: 4e-4 is the best rate, the gated form saves half of GRPO's tokens."""
    found = {job.name: record(job, 0.8 if job.lr == 4e-4 else 0.5, 10.0) for job in plan.sweep_jobs()}
    best = compare.best_rates(found)
    ends = {"grpo": (0.8, 24.0), "price": (0.5, 12.0), "signed": (0.8, 12.0), "shuffled": (0.4, 20.0)}
    for job in plan.paired_jobs(best):
        found[job.name] = record(job, *ends.get(job.arm, (0.6, 15.0)))
    return found


def test_rates_are_chosen_on_seeds_that_no_result_is_told_of() -> None:
    found = whole()
    assert set(compare.best_rates(found).values()) == {4e-4}
    assert not {job.seed for job in plan.sweep_jobs()} & {*plan.FIRST.seeds, *plan.SECOND.seeds}
    assert not set(plan.FIRST.seeds) & set(plan.SECOND.seeds)
    missing = {name: r for name, r in found.items() if name != plan.sweep_jobs()[0].name}
    assert compare.best_rates(missing) is None


def test_tokens_beyond_the_budget_cost_worth_where_there_is_a_budget() -> None:
    priced, free = (plan.Job("x", "sweep", arm, 100, 1e-4, (1,), 1) for arm in ("price", "grpo"))
    assert record(free, 0.5, 30.0).worth == 0.5
    assert record(priced, 0.5, plan.LIMIT).worth == 0.5
    assert record(priced, 0.5, plan.LIMIT + 10).worth == pytest.approx(0.4)


def test_records_survive_the_disk(tmp_path: Path) -> None:
    found = whole()
    compare.write_records(found, tmp_path / "records.jsonl")
    assert compare.read_records(tmp_path / "records.jsonl") == found


def test_a_run_that_did_not_end_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    first, second = plan.sweep_jobs()[:2]
    for job, last in ((first, '{"done": true, "s": 3.0}\n'), (second, "")):
        lines = [
            {"job": compare.asdict(job)},
            {"step": 1},
            {"evaluation": compare.asdict(record(job, 1.0, 1.0).at(plan.EVALUATED[-1]))},
        ]
        text = "".join(json.dumps({**line, "s": 1.0}) + "\n" for line in lines) + last
        (tmp_path / "runs" / f"{job.name}.jsonl").write_text(text)
    ready, last_of_all = compare.pending(tmp_path)
    assert first.name not in {job.name for job in ready}
    assert ready[0] == second
    assert not last_of_all


def test_the_best_form_is_the_most_successful_that_saves_enough() -> None:
    forms = {"document": (0.9, 20.0), "signed": (0.7, 11.0), "reweight": (0.8, 12.0)}
    assert report.best_form(forms, 24.0) == "reweight"
    assert report.best_form(forms, 10.0) == "document"  # none saves: then the most successful of all


def test_differences_are_paired_by_seed_and_house() -> None:
    """Two arms that differ by the same in each house have an interval of no width, however houses differ."""
    random = np.random.default_rng(1)
    base = random.random((5, 200))
    draws = report.Draws(5, 200, replicates=200)
    found = report.estimate(draws.means(base + 0.1) - draws.means(base))
    assert (found.value, found.low, found.high) == pytest.approx((0.1, 0.1, 0.1))
    wide = report.estimate(draws.means(base))
    assert wide.low < base.mean() < wide.high


def test_the_report_says_what_the_runs_say() -> None:
    figures = report.figures(whole())
    found = figures["after"][str(plan.EVALUATED[-1])]
    assert found["best"] == "signed"
    assert found["differences"]["signed - grpo"]["tokens_saved"]["value"] == pytest.approx(0.5)
    assert found["differences"]["signed - price"]["success"]["value"] == pytest.approx(0.3)
    assert all(found["verdict"].values())
    told = report.section(figures)
    assert f"| {plan.ARMS['signed'].title} | 0.0004 | 80.0 %" in told
    assert "beats the shuffled control: **yes**" in told


def test_learning_ends_where_nine_of_ten_succeed_and_alternatives_count_as_sampled() -> None:
    run = record(plan.Job("x", "paired", "on", 5, 6e-4, (10,), 40), 1.0, 10.0)
    for number, line in enumerate(run.lines):
        line |= {"success": float(number >= 4), "thinking/added_tokens_ratio": 0.5 * (number >= 5)}
    # Means of five: 0.2 at step 5, 1.0 at step 9; four steps had alternatives, half of what was sampled.
    assert report.learned(run) == {"step": 9, "tokens": 5 * 100.0 + 4 * 150.0}
    assert report.learned(record(run.job, 0.5, 10.0)) == {"step": None, "tokens": None}


def test_one_rate_for_all_leaves_the_sweep_out(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    ready, last_of_all = compare.pending(tmp_path, lr=3e-4)
    assert last_of_all
    assert {(job.kind, job.lr) for job in ready} == {("paired", 3e-4)}
    assert len(ready) == len(plan.FIRST.arms) * len(plan.FIRST.seeds)
    second, _ = compare.pending(tmp_path, lr=3e-4, comparison=plan.SECOND)
    assert {(job.arm, job.seed) for job in second} == {(a, s) for a in plan.SECOND.arms for s in plan.SECOND.seeds}


def test_to_beat_is_to_be_better_in_one_and_no_worse_in_the_other() -> None:
    def pair(success: float, saved: float) -> dict[str, dict[str, float]]:
        found = {"success": success, "tokens_saved": saved}
        return {name: {"value": value, "low": value - 0.01, "high": value + 0.01} for name, value in found.items()}

    assert report._beats(pair(0.0, 0.5))
    assert report._beats(pair(0.3, 0.0))
    assert not report._beats(pair(0.3, -0.2))
    assert not report._beats(pair(-0.1, 0.5))
    assert not report._beats(pair(0.005, 0.005))


def test_an_arm_that_lacks_a_seed_is_named_and_not_compared() -> None:
    found = whole()
    del found["paired-w0-3"]
    told = report.figures(found)
    assert told["left_out"] == ["w0"]
    assert "w0" not in told["after"]["60"]["arms"]
    assert f"Some seeds are missing for: {plan.ARMS['w0'].title}." in report.section(told)
    del found["paired-price-0"]
    with pytest.raises(SystemExit, match="price"):
        report.figures(found)
