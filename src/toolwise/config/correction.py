"""The `[actor.correction]` section: options of the corrections for stale tokens. Source of docs/settings.md."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from toolwise.config.loader import Section

CorrectionName = Literal["none", "tis", "decoupled", "interpolated", "icepop", "sequence_mask", "dppo", "cispo", "gspo"]
"""What `actor.policy_loss` calls them."""


class CorrectionConfig(Section):
    """Options of the losses that correct for tokens of older weights: docs/async.md."""

    decoupled_cap: float = Field(default=0.0, ge=0.0)
    """"decoupled", "interpolated": leave out tokens whose weight exceeds this; 0: none."""
    icepop_low: float = Field(default=0.5, ge=0.0)
    """"icepop": leave out tokens whose ratio is below this."""
    icepop_high: PositiveFloat = 5.0
    """"icepop": leave out tokens whose ratio is above this."""
    sequence_low: float = Field(default=0.99, ge=0.0)
    """"sequence_mask": leave out sequences whose geometric mean ratio is below this."""
    sequence_high: PositiveFloat = 1.01
    """"sequence_mask": leave out sequences whose geometric mean ratio is above this."""
    dppo_threshold: PositiveFloat = 0.2
    """"dppo": leave out tokens whose probability has already moved by more than this in the advantage's direction."""
    cispo_high: PositiveFloat = 2.0
    """"cispo": weights are at most 1 plus this."""
    gspo_low: PositiveFloat = 3e-4
    """"gspo": ratios of sequences below 1 minus this are clipped."""
    gspo_high: PositiveFloat = 4e-4
    """"gspo": ratios of sequences above 1 plus this are clipped."""

    @model_validator(mode="after")
    def _bounds_leave_something(self) -> Self:
        for low, high in (("icepop_low", "icepop_high"), ("sequence_low", "sequence_high")):
            if getattr(self, low) >= getattr(self, high):
                raise ValueError(
                    f"{low} is {getattr(self, low):g} and {high} is {getattr(self, high):g}: everything would be left "
                    f"out; set {low} below {high}"
                )
        return self
