"""The `[router]` section of a run's configuration. Every field is documented here and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from toolwise.config.loader import Section


class BudgetConfig(Section):
    """What may be spent of one unit, and how its price λ is found: routing/budget.py."""

    limit: float = Field(ge=0.0)
    """B: the mean cost allowed."""
    unit: str = "cost"
    """"cost", or "search", "calculate", "other" (a family's part of it), or a unit of `prices`."""
    initial: float = Field(default=0.0, ge=0.0)
    """λ at the beginning."""
    rate: float = Field(default=0.1, ge=0.0)
    """η: what an overspending of 1 adds to λ, a dual step."""
    proportional: float = Field(default=1.0, ge=0.0)
    """What it adds while it lasts; 0 is the plain rule."""
    derivative: float = Field(default=0.0, ge=0.0)
    every: PositiveInt = 1
    """K: steps between dual steps."""
    cap: PositiveFloat | None = None


class RouterConfig(Section):
    """When to answer, when to search, when to calculate: docs/routing.md."""

    enable: bool = False
    mode: Literal["policy", "value"] = "policy"
    """Learn which route to take, or what each route earns and costs: one checkpoint then serves every budget."""
    routes: Literal["one", "independent", "stratified"] = "stratified"
    """Of a prompt's rollouts: one route for all, one drawn for each, or all three tried alike."""
    train_actor: bool = True
    """False: the language model stays as it is, bit for bit, and no update of it is computed."""
    backbone: Literal["frozen", "top", "full"] = "frozen"
    """What the router's own loss moves beside its head: nothing, the top layers, or the whole trunk."""
    top_layers: PositiveInt = 1
    pool: Literal["last", "mean"] = "last"
    """What stands for a prompt: the state of its last token, or the mean of all."""
    hidden: int = Field(default=64, ge=0)
    """Width of a layer within the head; 0: linear."""
    layers: list[int] = Field(default_factory=lambda: [-1], min_length=1)
    """Whose states, side by side: -1 the last one, 0 the first."""
    temperature: PositiveFloat = 0.05
    """value: how sharply the better route is preferred where routes are drawn."""
    optimizer: Literal["own", "actor"] = "own"
    """Its own, with what follows, or the actor's with its schedule."""
    lr: PositiveFloat = 3e-3
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0)
    min_lr_ratio: float = Field(default=0.1, ge=0.0, le=1.0)
    weight_decay: float = Field(default=0.0, ge=0.0)
    max_grad_norm: PositiveFloat = 1.0
    epochs: PositiveInt = 1
    """Optimiser steps a batch; with several, PPO's clip holds them back."""
    clip_ratio: PositiveFloat = 0.2
    entropy_coef: float = Field(default=0.3, ge=0.0)
    """Of the bonus that keeps every route tried, in units of reward: a reward of another scale wants another one."""
    entropy_final: float | None = Field(default=None, ge=0.0)
    """What the bonus has become by the end of the run: a tenth where this is not given."""
    average_last: float = Field(default=0.25, ge=0.0, le=1.0)
    """The share of the run, at its end, whose heads are averaged into the one that validates and is saved: a head of
    one step swings about the budget, their mean does not. 0: the last one."""
    label_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the cross-entropy on rows that have a label and are not MIXED."""
    labels: Path | None = None
    """A file that `toolwise data label` wrote, joined by row id; columns of the data serve as well."""
    warm_start_epochs: int = Field(default=0, ge=0)
    """Passes over the labelled tasks before the first step."""
    cost: Literal["any", "family", "calls", "prices", "tools"] = "tools"
    """What tools cost: once if any, once a family, each call, by a table of `prices`, or what the tools themselves say
    that a call costs."""
    cost_kwargs: dict[str, Any] = Field(default_factory=dict)
    """price; c_search, c_calc, c_other; prices = { usd = { search = 0.01 } }"""
    usage: Literal["auto", "executed", "text"] = "auto"
    """Where calls are counted: those made, or, where nothing executes, those written."""
    budgets: list[BudgetConfig] = Field(default_factory=list)
    """[[router.budgets]] tables, one a unit; none: routes are chosen by reward alone."""
    standardize_by_kind: bool = False
    """r_task to mean 0 and deviation 1 within each kind of row; changes which rows a short budget sacrifices."""
    divide_by_std_as_a_control: bool = False
    """For experiments, to be seen to fail: it makes the router blind to λ."""
    conditioning: Literal["rewrite", "append"] = "rewrite"
    """Change the prompt for the route, or add words behind it alone, so that its cache can be used again."""
    style: Literal["auto", "rlla", "chat"] = "auto"
    hard: bool = True
    """The other family's tools are not to be had, instead of discouraged."""
    wording: str = ""
    """A file in the form of routing/wording.toml in its place; "silent": tools are hidden without a word."""
    families: dict[str, str] = Field(default_factory=dict)
    """tool = "SEARCH", "CALCULATE" or "OTHER", over what else is said of it."""
    evaluate: Literal["sample", "argmax"] = "sample"
    """How validation chooses routes; drawing them keeps to the budget."""

    @model_validator(mode="after")
    def _check_something_learns(self) -> RouterConfig:
        if not self.train_actor and not self.enable:
            raise ValueError("train_actor is false and enable too: nothing would learn")
        return self
