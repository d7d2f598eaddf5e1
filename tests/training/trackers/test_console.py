from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from toolwise.training.records import RolloutRecord
from toolwise.training.trackers import console as console_module
from toolwise.training.trackers.console import ConsoleTracker, format_duration, sparkline

NASTY = "[/] [bold]x[/bold] \ud800 \x1b[31mred\x1b[0m \x07 \r\n \u202e {} %s 🙂"


class Screen(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def screen_console(width: int = 100) -> Console:
    return Console(file=Screen(), width=width, height=50, force_terminal=True, color_system="truecolor", _environ={})


def text_on(console: Console) -> str:
    """What was drawn, without the escapes."""
    assert isinstance(console.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())


def record(text: str = "1,204 m", **changes: Any) -> RolloutRecord:
    call = {"id": "c", "type": "function", "function": {"name": "lookup", "arguments": '{"name": "Tarn"}'}}
    messages = [
        {"role": "system", "content": "secret system prompt"},
        {"role": "user", "content": "How high is Tarn?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "height 1,204 m"},
        {"role": "assistant", "content": text},
    ]
    base = {"messages": messages, "score": 0.9, "metrics": {"correct": 1.0}, "kind": "lookup", "cost": 1.0}
    return RolloutRecord.from_json(base | changes)


def plain_tracker(**options: Any) -> tuple[ConsoleTracker, io.StringIO]:
    out = io.StringIO()
    return ConsoleTracker(10, title="t", console=Console(file=out), **options), out


def test_a_pipe_gets_one_plain_line_a_step() -> None:
    tracker, out = plain_tracker(every_s=0)
    tracker.log(1, {"score/mean": 0.25, "correct/mean": 0.5, "cost/mean": 1.0, "time/tokens_per_s": 1234.4})
    tracker.log(2, {"score/mean": 0.5})
    tracker.close()
    first, second = out.getvalue().splitlines()
    assert first == "step 1/10  score 0.250  correct 50.0%  cost 1.000  tokens/s 1,234"
    assert second.startswith("step 2/10  score 0.500")


def test_the_cost_of_a_price_list_is_shown_in_the_unit_of_its_first_budget() -> None:
    tracker, out = plain_tracker(every_s=0)
    shown = {"router/usd/mean": 0.25, "router/usd/lambda": 1.5, "router/usd/budget": 0.5, "cost/mean": 7.0}
    tracker.log(1, {"router/usd@0.1/budget": 0.1, **shown, "router/seconds/budget": 9.0})
    tracker.close()
    assert out.getvalue() == "step 1/10  cost 0.250 of 0.5  λ 1.500\n"


def test_fast_steps_are_held_back_but_validation_and_the_last_step_are_not() -> None:
    tracker, out = plain_tracker(every_s=3600)
    for step in range(1, 11):
        tracker.log(step, {"score/mean": 0.1})
    tracker.log(10, {"eval/correct": 0.75})
    assert [line.split("  ")[0] for line in out.getvalue().splitlines()] == [
        "step 1/10",
        "step 10/10",
        "step 10/10",
    ]
    assert out.getvalue().endswith("validation  correct 75.0%\n")


def test_a_pipe_sees_a_rollout_now_and_then() -> None:
    tracker, out = plain_tracker()
    tracker.show_rollout(record())
    tracker.show_rollout(record("another answer"))
    assert "✓ score 0.900 · cost 1 · lookup" in out.getvalue()
    assert 'lookup(name="Tarn")' in out.getvalue()
    assert "secret system prompt" not in out.getvalue()
    assert "another answer" not in out.getvalue()


def test_a_pipe_gets_no_control_characters_even_with_colour_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    tracker, out = plain_tracker(every_s=0)
    tracker.note(NASTY)
    tracker.log(1, {"score/mean": 0.25})
    tracker.show_rollout(record(NASTY))
    tracker.close()
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", out.getvalue())


def test_an_output_that_knows_only_ascii_is_written_to_all_the_same() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    tracker = ConsoleTracker(10, title="t", console=Console(file=out))
    tracker.show_rollout(record("één 🙂"))
    assert b"says    ??n ?" in raw.getvalue()


def test_a_reader_who_went_away_does_not_end_the_run() -> None:
    tracker, out = plain_tracker(every_s=0)
    out.close()
    tracker.log(1, {"score/mean": 0.25})
    tracker.close()


def test_a_terminal_shows_metrics_trend_and_progress() -> None:
    console = screen_console()
    tracker = ConsoleTracker(10, title="my [run]", console=console)
    tracker.log(0, {"eval/correct": 0.2, "eval/score": 0.1})
    for step in range(1, 6):
        tracker.log(step, {"score/mean": step / 10, "actor/entropy": 0.5})
    tracker.log(5, {"eval/correct": 0.7, "eval/score": 0.6})
    tracker.close()
    shown = text_on(console)
    assert "my [run]" in shown
    assert "5/10" in shown
    assert "20.0% → 70.0%" in shown
    assert sparkline([step / 10 for step in range(1, 6)]) in shown


def test_a_terminal_shows_rollouts_to_read() -> None:
    console = screen_console(width=140)
    tracker = ConsoleTracker(10, title="t", console=console)
    tracker.show_rollout(record("the first"))
    tracker.show_rollout(record("the second", metrics={"correct": 0.0}))
    tracker.close()
    shown = text_on(console)
    assert "How high is Tarn?" in shown
    assert "✓ score" in shown
    assert "✗ score" in shown
    assert "the second" in shown


def test_a_rollout_stays_long_enough_to_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    console = screen_console()
    tracker = ConsoleTracker(10, title="t", console=console)
    for name in ("first", "second", "too soon"):
        tracker.show_rollout(record(name))
    monkeypatch.setattr(console_module, "MIN_PANEL_S", 0.0)
    tracker.show_rollout(record("in time"))
    tracker.close()
    assert "too soon" not in text_on(console)
    assert "in time" in text_on(console)


def test_notes_appear_above_the_display() -> None:
    console = screen_console()
    tracker = ConsoleTracker(10, title="t", console=console)
    tracker.note("loading [/] the model")
    tracker.log(1, {"score/mean": 0.1})
    tracker.note("checkpoint saved")
    tracker.close()
    assert "loading [/] the model" in text_on(console)
    assert "checkpoint saved" in text_on(console)


def test_warnings_stand_out_on_a_screen_and_in_a_log() -> None:
    console = screen_console()
    tracker = ConsoleTracker(10, title="t", console=console)
    tracker.log(1, {"score/mean": 0.1})
    tracker.warn("constant_reward", ("All [/] rollouts have the same reward", "Check the reward"))
    tracker.close()
    for said in ("─ constant_reward ─", "All [/] rollouts have the same reward", "Check the reward"):
        assert said in text_on(console)
    plain, out = plain_tracker()
    plain.warn("constant_reward", ("the cause", "the cure"))
    assert out.getvalue() == "WARNING constant_reward\n  the cause\n  the cure\n"


def test_closing_twice_or_without_a_step_is_fine() -> None:
    tracker = ConsoleTracker(10, title="t", console=screen_console())
    tracker.close()
    tracker.close()


def test_a_resumed_run_is_timed_from_where_it_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(console_module.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    tracker = ConsoleTracker(100, title="t", console=Console(file=out), every_s=0)
    for step in (90, 91, 92):
        tracker.log(step, {"score/mean": 0.1})
        now[0] += 2.0
    assert out.getvalue().splitlines()[-1].endswith("16s left")


def test_a_real_terminal_is_restored_after_the_display(tmp_path: Path) -> None:
    script = (
        "from toolwise.training.trackers.console import ConsoleTracker\n"
        "t = ConsoleTracker(3, title='run')\n"
        "t.log(1, {'score/mean': 0.5})\n"
        "t.close()\n"
    )
    leader, follower = pty.openpty()
    environ = os.environ | {
        "TERM": "xterm",
        "PYTHONIOENCODING": "utf-8",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    subprocess.run([sys.executable, "-c", script], stdout=follower, env=environ, check=True, timeout=60)
    os.close(follower)
    drawn = b""
    while True:
        try:
            chunk = os.read(leader, 65536)
        except OSError:
            break
        if not chunk:
            break
        drawn += chunk
    os.close(leader)
    assert b"\x1b[?25l" in drawn
    assert b"1/3" in drawn
    assert b"\x1b[?25h" in drawn.rpartition(b"1/3")[2]


anything = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
strange_messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "alien"]), "content": anything},
        optional={
            "tool_calls": st.lists(
                st.fixed_dictionaries(
                    {
                        "id": anything,
                        "function": st.fixed_dictionaries({"name": anything, "arguments": anything}),
                    }
                )
                | anything,
                max_size=2,
            ),
            "tool_call_id": anything,
        },
    )
    | anything,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(messages=strange_messages, score=st.none() | st.floats(), kind=st.none() | st.text())
def test_no_text_whatever_raises(messages: list[Any], score: float | None, kind: str | None) -> None:
    strange = {
        "messages": messages,
        "score": score,
        "kind": kind,
        "metrics": {"correct": score},
        "cost": score,
    }
    console = screen_console()
    on_screen = ConsoleTracker(10, title=str(kind), console=console)
    on_pipe, out = plain_tracker()
    for tracker in (on_screen, on_pipe):
        tracker.note(str(kind))
        tracker.show_rollout(RolloutRecord.from_json(strange))
        tracker.close()
    text_on(console).encode("utf-8")
    out.getvalue().encode("utf-8")


def test_a_sparkline_goes_from_low_to_high_and_stays_in_its_width() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0] * 3) == "▄▄▄"
    assert sparkline([]) == ""
    assert len(sparkline(list(range(1000)), 24)) == 24


@pytest.mark.parametrize(("seconds", "said"), [(4.4, "4s"), (63, "1m03s"), (3720, "1h02m"), (-1, "0s")])
def test_durations_are_short(seconds: float, said: str) -> None:
    assert format_duration(seconds) == said


ROUTED = {
    "score/mean": 0.1,
    "reward/correct/mean": 0.2,
    "cost/mean": 0.9,
    "router/r_task": 0.7,
    "router/cost/mean": 0.42,
    "router/cost/budget": 0.4,
    "router/cost/lambda": 0.85,
    "router/share/ANSWER": 0.5,
    "router/share/SEARCH-FAMILY": 0.3,
    "router/share/CALCULATE-FAMILY": 0.2,
}


def test_of_a_router_the_policy_is_shown_and_not_the_mean_of_all_it_tries() -> None:
    tracker, out = plain_tracker(every_s=0)
    tracker.log(1, ROUTED)
    line = out.getvalue()
    assert "score 0.700  cost 0.420 of 0.4  λ 0.850" in line
    assert "answer 50% search 30% calculate 20%" in line
    assert "correct" not in line


def test_a_validation_of_a_routed_run_is_held_against_its_budget() -> None:
    tracker, out = plain_tracker(every_s=0)
    tracker.log(1, ROUTED)
    tracker.log(1, {"eval/score": 0.8, "eval/correct": 0.8, "eval/cost": 0.44})
    assert "validation  score 0.800  correct 80.0%  cost 0.440 of 0.4" in out.getvalue()


def test_the_live_display_has_a_bar_of_routes() -> None:
    console = screen_console()
    tracker = ConsoleTracker(10, title="t", console=console)
    tracker.log(1, ROUTED)
    tracker.close()
    drawn = text_on(console)
    assert "answer 50%  search 30%  calculate 20%" in drawn
    assert "0.420 of 0.4" in drawn
    assert "λ" in drawn
