"""Thinking in the report: levels by kind of step, their advantages, score against tokens, and λ."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from toolwise.training.run_folder import open_run
from toolwise.view.panels import _success_by_tokens, lambda_metrics, render_thinking, step_kinds, thinking_columns
from toolwise.view.report import write_report

PNG = b"\x89PNG"


def add_thinking(run: Path, *, kinds: bool = True, price: float = 0.02) -> None:
    file = run / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    for line in lines:
        at = {"tokens_per_step": 12.0 - 0.1 * line["step"], "names_action": 0.5, "advantage_level_2": 0.1}
        shares = {f"level_{k}_share": 0.25 for k in (1, 2, 3, 4)}
        own = at | shares | {f"{kind}/{name}": v for kind in ("easy", "hard") if kinds for name, v in shares.items()}
        prefix = "eval/" if "eval/score" in line else ""
        line |= {f"{prefix}thinking/{name}": value for name, value in own.items()}
        if not prefix:
            line |= {"thinking/lambda": price, "router/calls/lambda": 0.5}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def test_a_run_without_levels_has_no_such_section(make_run: Callable[..., Path]) -> None:
    run = make_run()
    assert render_thinking(open_run(run)) is None
    assert "<h2>Thinking</h2>" not in write_report(run).read_text("utf-8")


def test_a_run_with_levels_shows_them(make_run: Callable[..., Path]) -> None:
    run = make_run()
    add_thinking(run)
    opened = open_run(run)
    drawn = render_thinking(opened)
    assert drawn is not None
    assert drawn.startswith(PNG)
    assert step_kinds(opened) == ["easy", "hard"]
    assert lambda_metrics(opened) == ["router/calls/lambda", "thinking/lambda"]
    page = write_report(run).read_text("utf-8")
    assert "<h2>Thinking</h2>" in page
    for name in ("thinking/hard/level_4_share", "thinking/lambda", "router/calls/lambda", "thinking/names_action"):
        assert name in page


def test_success_is_that_of_validations_against_their_own_tokens(make_run: Callable[..., Path]) -> None:
    run = make_run()
    add_thinking(run)
    tokens, scores = _success_by_tokens(open_run(run))
    assert len(tokens) == len(scores) == 7
    assert tokens[0] == 12.0


def test_worlds_without_kinds_and_prices_of_nothing(make_run: Callable[..., Path]) -> None:
    run = make_run()
    add_thinking(run, kinds=False, price=0.0)
    opened = open_run(run)
    assert step_kinds(opened) == []
    assert lambda_metrics(opened) == ["router/calls/lambda"]
    assert render_thinking(opened) is not None


def test_the_table_has_no_such_columns_without_levels() -> None:
    assert thinking_columns({"step", "router/calls/lambda"}) == []
