"""The `[records]` section of a run's configuration: what is stored of rollouts. Source of docs/settings.md."""

from __future__ import annotations

from pydantic import Field, PositiveInt

from toolwise.config.loader import Section


class RecordsConfig(Section):
    token_share: float = Field(default=1.0, ge=0.0, le=1.0)
    """Share of the groups whose tokens are stored, with log-probs, advantages and their parts. Whole groups are chosen,
    always the same ones. Messages and scores of every rollout are stored in any case."""
    token_steps: PositiveInt | None = None
    """Keep the tokens of this many latest training steps and validations; unset: of all."""
    plain_steps: PositiveInt | None = 20
    """Keep the messages of this many latest training steps and validations as plain JSON lines; older files are
    compressed with gzip, `zgrep` searches both. Unset: all stay plain."""
