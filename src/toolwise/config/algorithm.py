"""The settings of `[algorithm]`: how advantages are computed. Every field is documented here and nowhere else."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from toolwise.config.loader import Section

log = logging.getLogger("toolwise.config.schema")

RENAMED_TERMINAL_SCORES = {"auto": "remainder", "always": "add"}
"""What old configurations may say, and what it is read as."""


class ThinkingBudgetConfig(Section):
    """A budget of thinking tokens and the price that keeps to it: routing/budget.py."""

    limit: float | None = Field(default=None, ge=0.0)
    """Thinking tokens a step, on average; without it the price stays what it is."""
    price: float = Field(default=0.0, ge=0.0)
    """What a thinking token costs, in the unit of `score`; where there is a limit, what it begins with."""
    rate: float = Field(default=0.0005, ge=0.0)
    """How much a token too many adds to the price, a step."""
    proportional: float = Field(default=0.002, ge=0.0)
    """What a token too many adds while it lasts."""
    every: PositiveInt = 1
    cap: PositiveFloat | None = None


class RlvcrConfig(Section):
    """Thinking levels: docs/thinking.md."""

    enable: bool = False
    """Think steps over again at the levels that were not used. Under another estimator than rlvcr: for the metrics."""
    step_advantage_w: float = 1.0
    thinking_diversity_w: float = Field(default=0.5, ge=0.0)
    """What a level that nobody uses is worth more than one that all do, falling to 0 over the run."""
    mode: Literal["mean_norm", "mean_std_norm"] = "mean_norm"
    score: Literal["logprob", "confidence", "neg_entropy"] = "logprob"
    gate: Literal["none", "signed", "success"] = "none"
    """"none" is document 5's form; "signed" rewards confidence in good actions and doubt in bad ones; "success" the
    first of these alone. With a success_score both also ask for less thought where all succeed."""
    combine: Literal["additive", "reweight"] = "additive"
    base: Literal["grpo", "gigpo"] = "grpo"
    """Where the rollout's own advantage comes from."""
    steps: Literal["all", "mixed", "successful"] = "all"
    """Which may be thought over: all, those of groups whose scores differ, or those of rollouts that succeeded."""
    share: float = Field(default=0.34, ge=0.0, le=1.0)
    """Of those, how many are, drawn at random; 0: none, levels and tokens are counted all the same."""
    max_added_tokens: float = Field(default=1.0, ge=0.0)
    """Tokens that may be generated for it, in multiples of what the rollouts took, kept to whatever is written; 0:
    without bound."""
    max_thought_tokens: PositiveInt = 128
    success_score: float | None = None
    """A rollout succeeded whose score is this or more; without it, one that beats the mean of its group."""
    shuffle: bool = False
    """A control, for experiments: thinking advantages dealt out anew among the steps of a batch."""
    price_rollouts: bool = False
    """Under any estimator: credit is given for each score less the price of the rollout's thinking tokens a step."""
    levels: Path | None = None
    """A template of your own in place of thinking/levels.toml."""
    budget: ThinkingBudgetConfig = ThinkingBudgetConfig()


class AlgorithmConfig(Section):
    adv_estimator: Literal["grpo", "rloo", "gigpo", "hgpo", "gae", "reinforce_plus_plus", "rlvcr"] = "grpo"
    """How credit is given: one file each in advantages/, formula on top. What follows belongs to some of them."""
    norm_adv_by_std: bool = True
    gamma: float | None = Field(default=None, ge=0.0, le=1.0)
    """Discount of later rewards; the estimator's own where it is not given (gigpo, hgpo 0.95, others 1)."""
    lam: float = Field(default=0.95, ge=0.0, le=1.0)
    """gae: how far beyond the next value to look."""
    gae_per: Literal["token", "turn"] = "token"
    whiten: bool = True
    """gae: advantages of the batch to mean 0 and deviation 1."""
    bootstrap_truncated: bool = False
    """gae: an episode that was cut short goes on by the critic's word."""
    omega: float = Field(default=0.5, ge=0.0, le=1.0)
    """gigpo, convex: omega of the episode's advantage, the rest of the step's."""
    combine: Literal["convex", "additive"] = "convex"
    step_advantage_w: float = 1.0
    """gigpo, additive: the weight of the step's advantage."""
    normalization: Literal["mean_std_norm", "mean_norm"] = "mean_std_norm"
    terminal_score: Literal["remainder", "add", "never"] = "remainder"
    """What the last step gets. "remainder": the score less the step rewards, so that a rollout's rewards add up to its
    score. "add": the whole score, where it does not contain the step rewards; every estimator then sees the score and
    the step rewards together. "never": nothing, returns are made of step rewards alone. Old configurations may say
    "auto" (now "remainder") or "always" (now "add")."""
    default_step_reward: float = 0.0
    """The reward of a step that was given none; changes the total of its rollout as well."""
    invalid_action_penalty: float = Field(default=0.0, ge=0.0)
    """Taken off the reward of a step whose action was not valid, and off the total of its rollout."""
    state_anchor: str = "auto"
    """gigpo: what makes two steps the same: state_key, last_observation, last_messages, or a function by reference."""
    anchor_messages: PositiveInt = 3
    anchor_similarity: float = Field(default=1.0, gt=0.0, le=1.0)
    anchor_history: int = Field(default=2, ge=0)
    """hgpo: anchors nested by so many earlier steps."""
    depth_alpha: float = 1.0
    zero_std_groups: Literal["drop", "keep", "refill"] = "drop"
    """Groups whose rewards are all equal teach nothing: leave them out, keep them, or roll out more tasks instead."""
    mask_truncated: bool = False
    """Learn nothing from rollouts that were cut short (steps, tokens, the world's own limit)."""
    max_refills: PositiveInt = 3
    """With "refill": further batches of tasks a step at most."""
    kl: Literal["none", "reward", "loss"] = "none"
    """Hold the policy near the model that the run began with: each token costs its distance, or adds it to the loss."""
    kl_coef: float = Field(default=0.001, ge=0.0)
    """The price of a nat; where it is adapted, what it begins with."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k2"
    """Of a KL in the loss: k2 has the right gradient, k3 a biased one, k1 none at all and is refused. In the reward it
    is always k1, which is right there."""
    kl_target: PositiveFloat | None = None
    """Adapt kl_coef until the policy stands so many nats a token from where it began."""
    kl_horizon: PositiveInt = 1000
    """How slowly: five times so many rollouts change kl_coef by a factor of e at most."""
    rlvcr: RlvcrConfig = RlvcrConfig()

    @field_validator("terminal_score", mode="before")
    @classmethod
    def _accept_old_names(cls, given: Any) -> Any:
        if isinstance(given, str) and given in RENAMED_TERMINAL_SCORES:
            _warn_renamed(given)
            return RENAMED_TERMINAL_SCORES[given]
        return given


@cache
def _warn_renamed(given: str) -> None:
    """Once a process, however often the file is read."""
    now = RENAMED_TERMINAL_SCORES[given]
    log.warning(
        'algorithm.terminal_score = "%s" is an old name and read as "%s", the rule that replaced it', given, now
    )
