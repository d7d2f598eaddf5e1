"""docs/diagnosis.md lists exactly the findings that exist."""

from __future__ import annotations

import re
from pathlib import Path

from toolwise.training.diagnosis import learning_checks, rollout_checks
from toolwise.training.diagnosis.doctor import CHECKS, HEALTHY_STEPS
from toolwise.training.diagnosis.history import EARLY, TREND_STEPS, WINDOW
from toolwise.training.diagnosis.monitor import WEIGHTS_UNCHANGED
from toolwise.training.diagnosis.symptoms import FIRST_STEPS, NEARLY_ALL, SYMPTOMS, UNCHANGED_STEPS_LIMIT

PAGE = (Path(__file__).parents[3] / "docs" / "diagnosis.md").read_text(encoding="utf-8")


def test_the_page_lists_every_kind_of_finding() -> None:
    listed = set(re.findall(r"^\| `([a-z_]+)` \|", PAGE, re.MULTILINE))
    ours = {symptom.kind for symptom in SYMPTOMS} | {
        WEIGHTS_UNCHANGED,
        "no_ground_truth",
        "one_family",
        "ignored_settings",
        "prompt_too_long",
        "stopped",
        "crashed",
        *CHECKS,
    }
    assert listed == ours


def test_the_page_s_numbers_are_the_code_s() -> None:
    assert f"after {FIRST_STEPS} steps" in PAGE
    assert f"after {UNCHANGED_STEPS_LIMIT} steps, or at the end" in PAGE
    assert f"{100 * NEARLY_ALL:.0f} % or more" in PAGE
    assert f"compares the latest {WINDOW} steps with the first {EARLY}" in PAGE
    assert f"judged from step {TREND_STEPS} on" in PAGE
    assert f"that {HEALTHY_STEPS} steps in a row do not show" in PAGE
    assert f"below {100 * learning_checks.COLLAPSED_ENTROPY:.0f} % of the first" in PAGE
    assert f"more than {learning_checks.SPIKED_KL} on average" in PAGE
    assert f"more than {learning_checks.HUGE_KL:g} in one" in PAGE
    assert f"clipped {100 * learning_checks.SPIKED_CLIPPING:.0f} % of the ratios" in PAGE
    assert f"{100 * rollout_checks.SAME_OUTPUT:.0f} % of the rollouts" in PAGE
    assert f"{100 * rollout_checks.CUT:.0f} % of the replies" in PAGE
    assert f"{100 * rollout_checks.FAILED_CALLS:.0f} % of at least {rollout_checks.MIN_CALLS} calls" in PAGE
    assert (
        f"after {rollout_checks.BUDGET_STEPS} steps the router still spends {100 * rollout_checks.OVERSPENT - 100:.0f}"
        in PAGE
    )


def test_the_page_lists_every_exit_status() -> None:
    assert re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE) == ["0", "1", "2", "3", "130"]
