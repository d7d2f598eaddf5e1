"""docs/diagnosis.md lists exactly the findings that exist."""

from __future__ import annotations

import re
from pathlib import Path

from toolwise.training.diagnosis.monitor import WEIGHTS_UNCHANGED
from toolwise.training.diagnosis.symptoms import FIRST_STEPS, NEARLY_ALL, SYMPTOMS, UNCHANGED_STEPS_LIMIT

PAGE = (Path(__file__).parents[3] / "docs" / "diagnosis.md").read_text(encoding="utf-8")


def test_the_page_lists_every_kind_of_finding() -> None:
    listed = set(re.findall(r"^\| `([a-z_]+)` \|", PAGE, re.MULTILINE))
    ours = {symptom.kind for symptom in SYMPTOMS} | {
        WEIGHTS_UNCHANGED,
        "no_ground_truth",
        "one_family",
        "prompt_too_long",
        "starvation",
        "stopped",
    }
    assert listed == ours


def test_the_page_s_numbers_are_the_code_s() -> None:
    assert f"after {FIRST_STEPS} steps" in PAGE
    assert f"after {UNCHANGED_STEPS_LIMIT} steps, or at the end" in PAGE
    assert f"{100 * NEARLY_ALL:.0f} % or more" in PAGE


def test_the_page_lists_every_exit_status() -> None:
    assert re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE) == ["0", "1", "2", "3", "130"]
