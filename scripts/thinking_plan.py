"""The arms that `scripts/thinking_compare.py` compares, and their runs.

Fixed before any paired run, on other seeds:

    evaluation  after 30 and after 60 steps, without choosing checkpoints: one episode in each of 1,000 held-out houses,
                at temperature 1, the same houses and seeds for all arms
    sweep       the same learning rates for each arm, falling linearly to zero, on separate seeds (100, 101) and 200
                separate houses; the best has the highest mean worth over both evaluations. Controls take the rate of
                the arm they control, and the signed gates that of the success gate
    worth       success, minus 0.01 per thinking token per step beyond the budget, where the arm has one
    first       nine arms, seeds 0 to 4
    second      seeds 5 to 9: a form designed after the first comparison had been looked at, and what it must beat
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RATES = [4e-4, 6e-4]
TUNING_SEEDS = [100, 101]
EVALUATED = (30, 60)
"""Steps after which arms are evaluated: during learning, and at the end."""
TASKS, ROLLOUTS = 4, 16
HOUSES, TUNING_HOUSES = 1000, 200
TRAINED_ON = 2000
"""Training houses; few occur twice in a run."""
LIMIT = 12.0
"""The budget: thinking tokens per step."""
LONGEST_THOUGHT = 40
"""Maximum tokens of an alternative's thought; those in the SFT data have up to 33."""

PRICE = {"limit": LIMIT, "price": 0.02, "rate": 5e-4, "proportional": 2e-3, "cap": 0.04}
COMPARED = {"share": 0.34, "max_thought_tokens": LONGEST_THOUGHT, "budget": PRICE}


@dataclass(frozen=True)
class Arm:
    """One arm: its estimator, and its settings in `algorithm.rlvcr`."""

    title: str
    estimator: str
    rlvcr: dict[str, Any]
    rate_of: str = ""
    """Arm whose learning rate it takes; empty: its own."""

    @property
    def priced(self) -> bool:
        return "budget" in self.rlvcr


SIGNED = {
    **COMPARED,
    "gate": "signed",
    "steps": "successful",
    "share": 1.0,
    "mode": "mean_std_norm",
    "thinking_diversity_w": 0.0,
}
SUCCESS = {**SIGNED, "gate": "success", "success_score": 1.0, "step_advantage_w": 0.5}
ON = {**SIGNED, "success_score": 1.0}
ARMS = {
    "grpo": Arm("GRPO", "grpo", {"share": 0.0}),
    "gigpo": Arm("GiGPO", "gigpo", {"share": 0.0}),
    "price": Arm("GRPO + price", "grpo", {"share": 0.0, "subtract_thinking_cost": True, "budget": PRICE}),
    "document": Arm("RLVCR, original", "rlvcr", COMPARED),
    "signed": Arm("RLVCR, signed gate", "rlvcr", SIGNED, rate_of="success"),
    "success": Arm("RLVCR, success gate", "rlvcr", SUCCESS),
    "reweight": Arm("RLVCR, reweighted", "rlvcr", {**COMPARED, "combine": "reweight", "steps": "successful"}),
    "w0": Arm("RLVCR, w = 0", "rlvcr", {**COMPARED, "step_advantage_w": 0.0}, rate_of="grpo"),
    "shuffled": Arm("RLVCR, success gate, shuffled", "rlvcr", {**SUCCESS, "shuffle": True}, rate_of="success"),
    "on": Arm("RLVCR, signed gate + success", "rlvcr", ON, rate_of="success"),
    "on_shuffled": Arm("RLVCR, signed gate + success, shuffled", "rlvcr", {**ON, "shuffle": True}, rate_of="success"),
}


@dataclass(frozen=True)
class Comparison:
    """Arms paired by seed."""

    seeds: tuple[int, ...]
    arms: tuple[str, ...]
    forms: tuple[str, ...]
    """The RLVCR forms among them; the best must beat the other arms."""
    control: str
    """The arm with shuffled thinking advantages."""


FIRST = Comparison(
    seeds=(0, 1, 2, 3, 4),
    arms=("grpo", "gigpo", "price", "document", "signed", "success", "reweight", "w0", "shuffled"),
    forms=("document", "signed", "success", "reweight"),
    control="shuffled",
)
SECOND = Comparison(
    seeds=(5, 6, 7, 8, 9), arms=("grpo", "price", "signed", "on", "on_shuffled"), forms=("on",), control="on_shuffled"
)
COMPARISONS = {"first": FIRST, "second": SECOND}


@dataclass(frozen=True)
class Job:
    """One run."""

    name: str
    kind: str
    """sweep or paired"""
    arm: str
    seed: int
    lr: float
    evaluated: tuple[int, ...]
    """Steps after which it is evaluated; the last one ends the run."""
    houses: int
    """Episodes per evaluation."""
    changes: tuple[str, ...] = ()
    """Further settings as `a.b=c`, for single runs; none in the comparison."""


def sweep_jobs() -> list[Job]:
    return [
        Job(f"sweep-{arm}-{lr:g}-{seed}", "sweep", arm, seed, lr, EVALUATED, TUNING_HOUSES)
        for seed in TUNING_SEEDS
        for arm, settings in ARMS.items()
        if not settings.rate_of
        for lr in sorted(RATES)
    ]


def paired_jobs(best: dict[str, float], comparison: Comparison = FIRST) -> list[Job]:
    return [
        Job(f"paired-{arm}-{seed}", "paired", arm, seed, best[ARMS[arm].rate_of or arm], EVALUATED, HOUSES)
        for seed in comparison.seeds
        for arm in comparison.arms
    ]
