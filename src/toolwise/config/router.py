"""The `[router]` section of a run's configuration. Source of docs/settings.md."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from toolwise.config.loader import Section
from toolwise.config.routes import RouteConfig, RoutePolicyConfig, check_routes

STRATIFIED_UP_TO = 4
"""Routes that are tried equally often by default; more are sampled."""
Sampling = Literal["one", "independent", "stratified"]
TOKEN_METERS = ("tokens", "thinking_tokens", "prompt_tokens")
"""What a price list can price besides calls (routing/meters.py), also per 1,000 with _1k."""
SECONDS_METER = "seconds"
METER_NAMES = (*TOKEN_METERS, SECONDS_METER, *(f"{name}_1k" for name in TOKEN_METERS))


class BudgetConfig(Section):
    """A cost budget in one unit, and how its dual variable λ is updated (routing/budget.py)."""

    limit: float = Field(ge=0.0)
    """B: mean cost allowed."""
    unit: str = "cost"
    """"cost" (total), "search", "calculate", "other" or the name of another tool family in lower case (its part), or a
    unit of `prices`."""
    initial: float = Field(default=0.0, ge=0.0)
    """Initial λ."""
    rate: float = Field(default=0.1, ge=0.0)
    """η: how much an overspend of 1 adds to λ per dual step (integral term)."""
    proportional: float = Field(default=1.0, ge=0.0)
    """How much an overspend of 1 adds to λ while it lasts (proportional term); 0: plain dual ascent."""
    derivative: float = Field(default=0.0, ge=0.0)
    """How much a rise of the mean cost by 1 since the last dual step adds to λ (derivative term)."""
    every: PositiveInt = 1
    """K: training steps per dual step."""
    cap: PositiveFloat | None = None
    """Upper bound of λ; too low a bound can make the budget unreachable."""

    @model_validator(mode="after")
    def _check_initial(self) -> BudgetConfig:
        if self.cap is not None and self.initial > self.cap:
            raise ValueError(f"initial {self.initial:g} is above its cap {self.cap:g}")
        return self


class RandomBudgetsConfig(Section):
    """Budgets drawn at random in training, in the unit of the first budget, so that one router serves all of them."""

    low: float = Field(ge=0.0)
    """Lowest budget."""
    high: float = Field(ge=0.0)
    """Highest budget."""
    bins: int = Field(default=5, ge=2, le=64)
    """Number of budgets, evenly spaced; the limit of the first budget is added if it is not one of them. Each has its
    own λ."""

    @model_validator(mode="after")
    def _check_range(self) -> RandomBudgetsConfig:
        if self.low >= self.high:
            raise ValueError(f"low {self.low:g} is not below high {self.high:g}")
        return self

    def values(self, limit: float) -> tuple[float, ...]:
        """The budgets, in ascending order."""
        width = (self.high - self.low) / (self.bins - 1)
        spaced = [round(self.low + index * width, 12) for index in range(self.bins)]
        return tuple(sorted({*spaced, *([] if any(abs(limit - each) < 1e-9 for each in spaced) else [limit])}))


class RouterConfig(Section):
    """When to answer directly, search or calculate: docs/routing.md."""

    enable: bool = False
    """Train and use the learned router."""
    name: str = ""
    """A router of your own instead, as package.module:Class or path/to/file.py:Class; of the settings below, only
    `train_actor`, `kwargs` and `timeout_s` then apply."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of that router."""
    timeout_s: PositiveFloat = 600.0
    """Time limit of each call of that router in seconds."""
    mode: Literal["policy", "value"] = "policy"
    """Learn a policy over routes, or the value and cost of each route; with values, one checkpoint serves every
    budget."""
    routes: list[RouteConfig] = Field(default_factory=list)
    """[[router.routes]] tables: routes of your own. None: ANSWER, SEARCH-FAMILY and CALCULATE-FAMILY."""
    per_tool: bool = False
    """Instead of `routes`: one route for each tool, named like it, and ANSWER."""
    policies: dict[str, RoutePolicyConfig] = Field(default_factory=dict)
    """[router.policies.NAME] tables: models that routes can name to be answered by, instead of the trained one."""
    sampling: Literal["auto", "one", "independent", "stratified"] = "auto"
    """Routes of the rollouts of one prompt: one route for all, one sampled per rollout, or all equally often; "auto":
    all equally often up to four routes, sampled above that. Its old name is `routes`."""
    train_actor: bool = True
    """False: train only the router; the language model is not updated at all."""
    backbone: Literal["frozen", "top", "full"] = "frozen"
    """What the router loss trains besides the head: nothing, the top layers, or the whole backbone."""
    top_layers: PositiveInt = 1
    """Number of layers trained by backbone = "top"."""
    pool: Literal["last", "mean"] = "last"
    """Input of the head: the hidden state of the last prompt token, or the mean over all tokens."""
    hidden: int = Field(default=64, ge=0)
    """Width of the head's hidden layer; 0: linear head."""
    scale_inputs: bool = False
    """Scale the head's inputs to mean 0 and standard deviation 1 over the first batch. The head then learns sooner what
    tells prompts, or the turns of a conversation, apart. Needs a frozen backbone."""
    layers: list[int] = Field(default_factory=lambda: [-1], min_length=1)
    """Layers whose hidden states are concatenated: -1 is the last, 0 the first."""
    temperature: PositiveFloat = 0.05
    """value: softmax temperature when routes are sampled; lower prefers the better route more strongly."""
    optimizer: Literal["own", "actor"] = "own"
    """A separate optimizer with the settings below, or the actor's optimizer and schedule."""
    lr: PositiveFloat = 3e-3
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Schedule after the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""
    min_lr_ratio: float = Field(default=0.1, ge=0.0, le=1.0)
    """Final learning rate, as a share of the peak."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Weight decay of the optimizer."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradient clipping norm."""
    epochs: PositiveInt = 1
    """Optimizer steps per batch; with more than one, PPO clipping applies."""
    clip_ratio: PositiveFloat = 0.2
    """PPO clip range of the router loss."""
    entropy_coef: float = Field(default=0.3, ge=0.0)
    """Coefficient of the entropy bonus, which keeps every route explored; in units of reward, so adjust it to the scale
    of the rewards."""
    entropy_final: float | None = Field(default=None, ge=0.0)
    """Coefficient at the end of the run; unset: a tenth of `entropy_coef`."""
    average_last: float = Field(default=0.25, ge=0.0, le=1.0)
    """Average the heads of this last share of the run for validation and saving: the head of a single step oscillates
    around the budget, the average does not. 0: use the last head."""
    label_coef: float = Field(default=0.0, ge=0.0)
    """Weight of the cross-entropy loss on labelled rows; rows labelled MIXED are skipped."""
    labels: Path | None = None
    """Labels written by `toolwise data label`, joined by row id; label columns in the data work too."""
    warm_start_epochs: int = Field(default=0, ge=0)
    """Passes over the labelled tasks before the first step."""
    cost: Literal["any", "family", "calls", "prices", "tools"] = "tools"
    """What tools cost: "any": once if any tool is called; "family": once per tool family; "calls": per call; "prices":
    by the table `prices` in `cost_kwargs`; "tools": the price each tool declares per call."""
    cost_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Options of the cost: price; c_search, c_calc, c_other; prices = { usd = { search = 0.01 } }"""
    prices: dict[str, dict[str, float]] = Field(default_factory=dict)
    """[router.prices.UNIT] tables, instead of `cost`: tool, family or "*" = price of a call; tokens, thinking_tokens,
    prompt_tokens (per 1,000 with _1k) = price of one; seconds = price of a measured second of tools and of other
    models."""
    usage: Literal["auto", "executed", "text"] = "auto"
    """Which calls count: those executed, or those written in the text, for runs without tool execution."""
    budgets: list[BudgetConfig] = Field(default_factory=list)
    """[[router.budgets]] tables, one per unit; none: routes are chosen by reward alone."""
    random_budgets: RandomBudgetsConfig | None = None
    """Draw the first budget of each prompt at random: { low = 0.1, high = 0.9, bins = 5 }"""
    max_cost: float | None = Field(default=None, ge=0.0)
    """Hard cap on what the calls and the route of one episode may cost, in the unit of the first budget: calls beyond
    it are refused with an error that the model reads. Budgets limit means, this limits every episode. Not for a unit
    with a price of tokens or seconds."""
    budget_prompt: bool = False
    """Tell the agent its budget in a line at the end of the prompt, and after each tool result what is left of it."""
    budget_window: int = Field(default=0, ge=0)
    """Control budgets by the last prompts, this many: by what the head as it is now would have spent on them, and from
    the λ that would meet the budgets on them. Needs stratified routes and a frozen backbone. 0: by the prompts of the
    step alone, with λ from `initial`."""
    standardize_by_kind: bool = False
    """Normalize task rewards to mean 0 and standard deviation 1 within each kind of row; changes which rows lose out
    when the budget is tight."""
    divide_by_std: bool = False
    """Control experiment, expected to fail: makes the router blind to λ."""
    conditioning: Literal["rewrite", "append"] = "rewrite"
    """Rewrite the prompt for the route, or only append to it, so that its KV cache can be reused."""
    style: Literal["auto", "rlla", "chat"] = "auto"
    """Prompt format: "rlla", "chat", or detected from the prompt ("auto")."""
    hard: bool = True
    """Remove the other families' tools instead of discouraging their use."""
    wording: str = ""
    """File in the format of routing/wording.toml to use instead; "silent": hide tools without mentioning it."""
    families: dict[str, str] = Field(default_factory=dict)
    """tool = "SEARCH", "CALCULATE" or "OTHER", or with routes of your own any name; overrides any other source of the
    tool's family."""
    calibration: float = Field(default=0.1, ge=0.0, lt=1.0)
    """With budgets: share of the training tasks that is never learned from; on them every validation fits the
    thresholds that make the router deliver its budgets. 64 to 4,096 tasks, none of fewer than 256. 0: none."""
    calibration_rollouts: PositiveInt = 256
    """Calibration tasks that are rolled out under every route, once each, at the last step; a third of them before. The
    others only get a prediction."""
    eval_mode: Literal["budget", "sample", "argmax"] = "budget"
    """How routes are chosen outside of training: by the thresholds that deliver the trained budgets (sampled if there
    are none), sampled from the head, or the head's best."""
    every: Literal["prompt", "turn"] = "prompt"
    """Choose a route once per prompt, or before every turn, from the conversation so far. At every turn the prompt and
    its tools stay as they are, as with `conditioning = "append"`, and routes are sampled from the router."""
    turn_mask: Literal["refuse", "decode"] = "refuse"
    """every = "turn": how tools of other routes are ruled out in a turn. "refuse": a call of one is an error that the
    model reads; "decode": on a route without tools a call cannot even be begun, for models that were not trained to
    heed a route. Then `train_actor` must be false."""
    calibration_passes: int = Field(default=8, ge=2)
    """every = "turn": how often the calibration tasks are rolled out, at most, to find what delivers the budget;
    `calibration_rollouts` of them each time at the last step, a third before."""

    @property
    def final_entropy_coef(self) -> float:
        return self.entropy_coef / 10 if self.entropy_final is None else self.entropy_final

    def sampling_of(self, routes: int) -> Sampling:
        """How the rollouts of a prompt with this many routes are distributed."""
        if self.every == "turn":
            return "independent"
        if self.sampling != "auto":
            return self.sampling
        return "stratified" if routes <= STRATIFIED_UP_TO else "independent"

    @property
    def trains_weights(self) -> bool:
        """Whether a step changes the model's weights: for the actor, or for the router alone."""
        return self.train_actor or (self.enable and self.backbone != "frozen")

    @property
    def lowest_limits(self) -> dict[str, float]:
        """unit -> the lowest budget that has to be met"""
        limits = {budget.unit: budget.limit for budget in self.budgets}
        if self.random_budgets is not None:
            limits[self.budgets[0].unit] = self.random_budgets.low
        return limits

    @property
    def own_routes(self) -> bool:
        return bool(self.routes) or self.per_tool

    @property
    def price_list(self) -> dict[str, Any]:
        """unit -> its table: `prices`, or those of cost = "prices"; empty if neither is given."""
        given = self.cost_kwargs.get("prices") if self.cost == "prices" and not self.prices else self.prices
        return dict(given) if isinstance(given, Mapping) else {}

    @property
    def price_list_name(self) -> str:
        """The setting that `price_list` comes from."""
        return "prices" if self.prices else "cost_kwargs.prices"

    @model_validator(mode="before")
    @classmethod
    def _read_old_name(cls, values: Any) -> Any:
        """`routes` was the name of `sampling` before routes could be the user's own; all alike was its default."""
        if isinstance(values, dict) and isinstance(values.get("routes"), str):
            rest = {name: value for name, value in values.items() if name != "routes"}
            return ({} if values["routes"] == "stratified" else {"sampling": values["routes"]}) | rest
        return values

    @model_validator(mode="after")
    def _check_routes(self) -> RouterConfig:
        if self.routes and self.per_tool:
            raise ValueError("routes and per_tool are both set: leave one of them out")
        check_routes(self.routes, self.policies)
        return self

    @model_validator(mode="after")
    def _check_prices(self) -> RouterConfig:
        if self.prices and (self.cost not in ("tools", "prices") or self.cost_kwargs):
            raise ValueError("prices is a price list, and so are cost and cost_kwargs: set prices alone")
        where, tables = self.price_list_name, self.price_list
        for unit, table in tables.items():
            if not table:
                raise ValueError(f"{where}.{unit} is empty: name what costs something in it, or remove it")
            for name, price in table.items() if isinstance(table, Mapping) else ():
                if isinstance(price, int | float) and not 0 <= price < math.inf:
                    raise ValueError(f"{where}.{unit}.{name} is {price:g}: give a number of at least 0")
        first = self.budgets[0].unit if self.budgets else next(iter(tables), "")
        if self.max_cost is not None and (metered := self._metered(first)) is not None:
            raise ValueError(
                f"max_cost refuses calls and cannot hold the price of {metered} in {where}.{first}: remove one of them"
            )
        return self

    def _metered(self, *units: str) -> str | None:
        """A price of some units that is not one of calls."""
        tables = (self.price_list.get(unit) for unit in units)
        names = (name for table in tables if isinstance(table, Mapping) for name in table)
        return next((name for name in names if name in METER_NAMES), None)

    @model_validator(mode="after")
    def _check_something_learns(self) -> RouterConfig:
        if not self.train_actor and not self.enable and not self.name:
            raise ValueError("train_actor and enable are both false: nothing would be trained")
        if self.enable and self.name:
            raise ValueError("enable is true but name is another router than the learned one: leave one of them out")
        if self.kwargs and not self.name:
            raise ValueError("kwargs are those of a router of your own: set name")
        return self

    @model_validator(mode="after")
    def _check_random_budgets(self) -> RouterConfig:
        drawn = self.random_budgets
        if (drawn is not None or self.budget_prompt) and not self.budgets:
            raise ValueError("random_budgets and budget_prompt are about the first budget: add one to budgets")
        if drawn is None:
            return self
        if not drawn.low <= self.budgets[0].limit <= drawn.high:
            raise ValueError(
                f"the first budget is {self.budgets[0].limit:g}, outside random_budgets ({drawn.low:g} to "
                f"{drawn.high:g}): it is what is delivered by default, so choose it within them"
            )
        if self.mode == "value":
            raise ValueError('mode = "value" serves every budget anyway: remove random_budgets, or use mode = "policy"')
        if self.sampling == "one" or self.budget_window:
            raise ValueError('random_budgets works with neither sampling = "one" nor budget_window: remove them')
        return self

    @model_validator(mode="after")
    def _check_budget_window(self) -> RouterConfig:
        stratified = self.sampling == "stratified" or (
            not self.per_tool and self.sampling_of(len(self.routes) or 3) == "stratified"
        )
        if self.budget_window and not (stratified and self.backbone == "frozen"):
            raise ValueError(
                'budget_window needs the outcome of every route and features that stay: sampling = "stratified" and '
                'backbone = "frozen"'
            )
        return self

    @model_validator(mode="after")
    def _check_scale_inputs(self) -> RouterConfig:
        if self.scale_inputs and self.backbone != "frozen":
            raise ValueError(
                f'scale_inputs needs features that stay, but backbone is "{self.backbone}": set backbone = "frozen"'
            )
        return self

    @model_validator(mode="after")
    def _check_every(self) -> RouterConfig:
        if self.every == "prompt":
            if self.turn_mask != "refuse":
                raise ValueError('turn_mask is for turns that have their own routes: set every = "turn"')
            return self
        refused = {
            f'sampling = "{self.sampling}" (routes are sampled at every turn)': self.sampling in ("one", "stratified"),
            'mode = "value"': self.mode == "value",
            "a route with another policy": any(route.policy for route in self.routes),
            "budget_window": bool(self.budget_window),
            "more than one budget": len(self.budgets) > 1,
            "layers other than [-1]": self.layers != [-1],
            "labels (label_coef, warm_start_epochs)": bool(self.label_coef or self.warm_start_epochs),
            "standardize_by_kind": self.standardize_by_kind,
            "divide_by_std": self.divide_by_std,
            "random_budgets": self.random_budgets is not None,
            "budget_prompt": self.budget_prompt,
            "max_cost": self.max_cost is not None,
            f"a price of {self._metered(*self.price_list)}, which are counted per episode": self._metered(
                *self.price_list
            ),
        }
        for setting, present in refused.items():
            if present:
                raise ValueError(f'every = "turn" does not work with {setting}: leave it out, or set every = "prompt"')
        if self.turn_mask == "decode" and self.train_actor and self.enable:
            raise ValueError(
                'turn_mask = "decode" changes what is sampled, which the update of the actor would not know: set '
                'train_actor = false, or turn_mask = "refuse"'
            )
        return self
