"""The `[algorithm]` section of a run's configuration: how advantages are computed. Source of docs/settings.md.

The options of a built-in estimator are a frozen class here. The section inherits it, and so does the estimator in
`advantages/`, which is built from the settings that it has a field for: an option is declared once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from toolwise.config.loader import Section, note_renamed
from toolwise.types.credit import RewardSettings

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Combination = Literal["convex", "additive"]
StepNormalization = Literal["mean_std_norm", "mean_norm"]
LevelNormalization = Literal["mean_norm", "mean_std_norm"]
LevelScoreKind = Literal["logprob", "confidence", "neg_entropy"]
Gate = Literal["none", "signed", "success"]
LevelCombination = Literal["additive", "reweight"]
KlEstimator = Literal["k1", "k2", "k3"]
RENAMED_TERMINAL_SCORES = {"auto": "remainder", "always": "add"}
"""Old names of `terminal_score`, still accepted, and their current names."""


class ThinkingBudgetConfig(Section):
    """A budget of thinking tokens and the dual variable λ that enforces it (routing/budget.py)."""

    limit: float | None = Field(default=None, ge=0.0)
    """Average number of thinking tokens allowed per step; unset: λ stays at `price`."""
    unit: str = ""
    """Instead of `limit`: a unit of `router.prices` with a budget that prices thinking tokens; λ is then the router's λ
    of that unit times the price of a thinking token, so that thought and tools are paid for in one currency."""
    price: float = Field(default=0.0, ge=0.0)
    """λ: cost of one thinking token, in units of `score`; with a limit, the initial value."""
    rate: float = Field(default=0.0005, ge=0.0)
    """How much each token over the limit adds to λ per update (integral term)."""
    proportional: float = Field(default=0.002, ge=0.0)
    """How much each token over the limit adds to λ while the excess lasts (proportional term)."""
    every: PositiveInt = 1
    """Training steps between updates of λ."""
    cap: PositiveFloat | None = None
    """Upper bound of λ."""

    @model_validator(mode="after")
    def _check_one_source(self) -> ThinkingBudgetConfig:
        if self.unit and (self.limit is not None or self.price):
            raise ValueError("unit takes λ from the router: remove limit and price")
        return self


@dataclass(frozen=True, kw_only=True)
class RlvcrOptions:
    """Options of `advantages.Rlvcr`."""

    step_advantage_w: float = 1.0
    """Weight of the thinking advantage."""
    thinking_diversity_w: NonNegativeFloat = 0.5
    """Bonus for rarely used levels: an unused level gets this much more than one that every step uses. Annealed to
    0 over the run."""
    mode: LevelNormalization = "mean_norm"
    """Center the scores of a step's levels, or also divide them by their standard deviation."""
    score: LevelScoreKind = "logprob"
    """How an action is scored after each level's thought: mean log-prob of its tokens, exp of that, or minus their mean
    entropy."""
    gate: Gate = "none"
    """"none" adds the thinking advantage to all tokens of the step; "signed" multiplies it by the sign of the rollout's
    advantage, which rewards confidence in good actions and doubt in bad ones; "success" applies it to successful
    rollouts only. With a `success_score`, both gates also train shorter thinking where a whole group succeeds."""
    combine: LevelCombination = "additive"
    """"additive" adds the thinking advantage; "reweight" (CoPO) trains on the rows of all four levels, weighted by
    their scores."""
    success_score: float | None = None
    """A rollout with at least this score counts as successful; unset: one that beats the mean of its group."""
    shuffle: bool = False
    """Control experiment: shuffle the thinking advantages among the steps of a batch."""


class RlvcrConfig(Section, RlvcrOptions):
    """Thinking levels and the RLVCR advantage: docs/thinking.md."""

    enable: bool = False
    """Generate and score alternative thoughts at the levels a step did not use. With an estimator other than rlvcr,
    only for the metrics."""
    base: Literal["grpo", "gigpo"] = "grpo"
    """Estimator of the rollout's own advantage."""
    steps: Literal["all", "mixed", "successful"] = "all"
    """Which steps get alternatives: all, those of groups whose scores differ, or those of successful rollouts."""
    share: float = Field(default=0.34, ge=0.0, le=1.0)
    """Share of those steps that do, chosen at random; 0: none, but levels and tokens are still counted."""
    max_added_tokens: float = Field(default=1.0, ge=0.0)
    """Hard limit on the tokens generated for alternatives, as a multiple of the tokens sampled in the rollouts; 0: no
    limit."""
    max_thought_tokens: PositiveInt = 128
    """Maximum tokens per alternative thought."""
    subtract_thinking_cost: bool = False
    """With any estimator: subtract λ times the thinking tokens per step from each score before advantages are
    computed."""
    levels: Path | None = None
    """Template file to use instead of thinking/levels.toml."""
    budget: ThinkingBudgetConfig = ThinkingBudgetConfig()


@dataclass(frozen=True, kw_only=True)
class GaeOptions:
    """Options of `advantages.Gae`."""

    lam: Fraction = 0.95
    """gae: λ, which trades bias for variance."""
    whiten: bool = True
    """gae: normalize the advantages of a batch to mean 0 and standard deviation 1."""
    bootstrap_truncated: bool = False
    """gae: bootstrap truncated episodes from the critic's value."""


@dataclass(frozen=True, kw_only=True)
class GigpoOptions:
    """Options of `advantages.Gigpo`."""

    omega: Fraction = 0.5
    """gigpo, convex: weight ω of the episode advantage; the step advantage gets 1 − ω."""
    combine: Combination = "convex"
    """gigpo: ω·A_episode + (1 − ω)·A_step, or A_episode + w·A_step as in the paper."""
    step_advantage_w: float = 1.0
    """gigpo, additive: weight w of the step advantage."""
    normalization: StepNormalization = "mean_std_norm"
    """gigpo: center advantages and divide by the standard deviation, or only center them."""
    anchor_messages: PositiveInt = 3
    """gigpo: number of messages compared by "last_messages"."""
    anchor_similarity: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """gigpo: texts at least this similar (difflib ratio) are the same state; 1: only equal texts."""


@dataclass(frozen=True, kw_only=True)
class HgpoOptions:
    """Options of `advantages.Hgpo`, besides those of GiGPO."""

    anchor_history: NonNegativeInt = 2
    """hgpo: number of earlier states by which anchors are nested."""
    depth_alpha: float = 1.0
    """hgpo: exponent α of the weight (d + 1)^α of depth d; 0 weighs all depths equally."""


@dataclass(frozen=True, kw_only=True)
class HdpoOptions:
    """Options of `advantages.Hdpo`."""

    efficiency_w: NonNegativeFloat = 0.15
    """hdpo: weight w of the advantage for low cost among the correct rollouts of a group."""
    correct_threshold: float = 1.0
    """hdpo: a rollout is correct if the reward's "correct" metric, or else its score, is at least this."""


class AlgorithmConfig(Section, RewardSettings, GaeOptions, GigpoOptions, HgpoOptions, HdpoOptions):
    adv_estimator: str = "grpo"
    """Advantage estimator: "grpo", "rloo", "gigpo", "hgpo", "gae", "reinforce_plus_plus", "rlvcr", "hdpo", "pareto", or
    your own as package.module:Name or path/to/file.py:Name (docs/algorithms.md). Many settings below apply to some
    estimators only."""
    estimator_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of an estimator of your own."""
    norm_adv_by_std: bool = True
    """grpo: divide advantages by the group's standard deviation."""
    gamma: float | None = Field(default=None, ge=0.0, le=1.0)
    """Discount factor; unset: the estimator's default (0.95 for gigpo and hgpo, 1 for the others)."""
    gae_per: Literal["token", "turn"] = "token"
    """gae: time steps are sampled tokens, or turns."""
    state_anchor: str = "auto"
    """gigpo: what identifies a state: "auto" (the environment's state key, else the last observation), "state_key",
    "last_observation", "last_messages", or a function by reference."""
    zero_std_groups: Literal["drop", "keep", "refill"] = "drop"
    """Groups whose rewards are all equal carry no signal: drop them, keep them, or roll out more tasks instead."""
    mask_truncated: bool = False
    """Do not train on truncated rollouts (step limit, token limit, or the environment's own limit)."""
    max_refills: PositiveInt = 3
    """With "refill": maximum number of additional task batches per step."""
    kl: Literal["none", "reward", "loss"] = "none"
    """KL penalty towards the initial model: none, subtracted from the reward of each token, or added to the loss."""
    kl_coef: float = Field(default=0.001, ge=0.0)
    """KL coefficient, per nat; with `kl_target`, the initial value."""
    kl_estimator: KlEstimator = "k2"
    """Estimator of the KL in the loss: k2 has the correct gradient, k3 a biased one; k1 has none and is refused. In the
    reward, k1 is always used, which is correct there."""
    kl_target: PositiveFloat | None = None
    """Adapt kl_coef to hold the KL at this many nats per token."""
    kl_horizon: PositiveInt = 1000
    """How slowly kl_coef adapts: it changes by at most a factor of e in 5 × kl_horizon rollouts."""
    rlvcr: RlvcrConfig = RlvcrConfig()

    @field_validator("terminal_score", mode="before")
    @classmethod
    def _accept_old_names(cls, name: Any) -> Any:
        if isinstance(name, str) and name in RENAMED_TERMINAL_SCORES:
            new_name = RENAMED_TERMINAL_SCORES[name]
            note_renamed(f'algorithm.terminal_score = "{name}"', f'"{new_name}"')
            return new_name
        return name
