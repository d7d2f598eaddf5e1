"""Builds a run's rewards and their sandbox from the configuration, and scores rollouts with them: in training, in
validation and in `toolwise eval`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any

from toolwise.config.moved_modules import current_module
from toolwise.config.schema import RewardConfig, SandboxConfig
from toolwise.errors import ConfigError, RewardError
from toolwise.protocols import Router
from toolwise.rewards.align import align_rollouts
from toolwise.rewards.combine import CompositeReward, WeightedReward, part_names
from toolwise.rewards.executor import EPISODE_REWARDS, episode_reward, task_kwargs
from toolwise.rewards.function import Reward
from toolwise.rewards.printed_output import PrintCallback
from toolwise.routing.inference_router import InferenceRouter
from toolwise.sandbox import RewardExecutor, Sandbox
from toolwise.sandbox.targets import reference_of
from toolwise.types import EvaluateResult, Rollout, ScoredRollout, Task

if TYPE_CHECKING:
    from toolwise.training.rollout_setup import RolloutSetup

RewardSource = str | Callable[..., Any] | Reward
RewardSources = RewardSource | list[Any] | tuple[Any, ...]
"""One reward, or several whose scores are added; each may be a (reward, weight) pair."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """Rewards, ready to score rollouts."""

    rewards: CompositeReward
    sandbox: Sandbox | None
    """None if no function is called, because the rewards come from the episodes themselves."""

    async def evaluate(self, rollouts: Sequence[Rollout], *, step: int) -> list[EvaluateResult]:
        """One result per rollout, in order. Rollouts in which the agent never acted are not scored."""
        answered = [rollout for rollout in rollouts if not rollout.unanswered]
        executor = RewardExecutor(self.sandbox)
        results = iter(await self.rewards.evaluate(executor, answered, step=step) if answered else [])
        return [_unscored_result(rollout) if rollout.unanswered else next(results) for rollout in rollouts]

    def set_print_callback(self, on_print: PrintCallback | None) -> None:
        """Call `on_print` with what the functions print from now on."""
        if self.sandbox is not None:
            self.sandbox.on_print = on_print

    def check(self, tasks: Sequence[Task]) -> None:
        """Raise if a reward function has a required argument that nothing provides."""
        for part in self.rewards.parts:
            _check_arguments(part.reward, tasks)

    def describe(self) -> str:
        """The sandbox, and the rewards that run outside of it, in one line."""
        if self.sandbox is None:
            return "sandbox: none needed, no reward function is called"
        outside = ", ".join(part.reward.name for part in self.rewards.parts if part.reward.function is not None)
        shown = f"; in the trainer's process: {outside}" if outside and self.sandbox.tier != "off" else ""
        return f"{self.sandbox.describe()}{shown}"

    def close(self) -> None:
        if self.sandbox is not None:
            self.sandbox.close()


def build_scoring(config: RewardConfig, rewards: RewardSources | None = None) -> Scoring:
    """Build from the rewards given in Python, else from `reward.parts` or `reward.function` of the configuration."""
    sources: list[tuple[RewardSource, dict[str, Any], float]]
    if isinstance(rewards, list | tuple):
        if config.kwargs and len(weighted_sources(rewards)) > 1:
            raise ConfigError(
                "reward.kwargs applies to a single reward, but there are several: set kwargs per reward with "
                "Reward.of(f, {…}), or as [[reward.parts]] in the configuration"
            )
        sources = [(source, config.kwargs, weight) for source, weight in weighted_sources(rewards)]
    elif rewards is not None:
        sources = [(rewards, config.kwargs, 1.0)]
    elif config.parts and config.function:
        raise ConfigError("reward.function and reward.parts are both set: make the function one of the parts")
    elif config.parts:
        sources = [(part.function, part.kwargs, part.weight) for part in config.parts]
    elif config.function:
        sources = [(config.function, config.kwargs, 1.0)]
    else:
        raise ConfigError("reward.function is missing: name one as package.module:function or path/to/file.py:function")
    named = [part.name for part in config.parts] if rewards is None else []
    names = part_names([source for source, _, _ in sources], named)
    calls_functions = any(not isinstance(source, str) or source not in EPISODE_REWARDS for source, _, _ in sources)
    sandbox = Sandbox(**config.sandbox.model_dump(exclude={"trusted"})) if calls_functions else None
    try:
        parts = tuple(
            WeightedReward(_reward(source, kwargs, sandbox, config.sandbox), weight, name)
            for (source, kwargs, weight), name in zip(sources, names, strict=True)
        )
        return Scoring(CompositeReward(parts, config.combine), sandbox)
    except BaseException:
        if sandbox is not None:
            sandbox.close()
        raise


def weighted_sources(rewards: Sequence[Any]) -> list[tuple[RewardSource, float]]:
    """(source, weight) pairs from `[a, b]`, `[(a, 0.5), "file.py:b"]` or a single pair."""
    if not rewards:
        raise ConfigError("reward is an empty list: pass at least one function")
    pairs: list[Any] = [
        part if _is_pair(part) else (part, 1.0) for part in ([rewards] if _is_pair(rewards) else rewards)
    ]
    for source, _ in pairs:
        if not isinstance(source, str | Reward) and not callable(source):
            raise ConfigError(
                f"reward: a part is a {type(source).__name__}; pass functions, references such as file.py:name, or "
                "(function, weight)"
            )
    return [(source, float(weight)) for source, weight in pairs]


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Real)


def _reward(source: RewardSource, kwargs: dict[str, Any], sandbox: Sandbox | None, config: SandboxConfig) -> Reward:
    """Load the reward in this process only if it is trusted or there is no sandbox; else a worker loads it and
    reports its signature."""
    if isinstance(source, str) and source in EPISODE_REWARDS:
        return Reward.of(episode_reward(source), kwargs)
    target = (source.reference or source.function) if isinstance(source, Reward) else source
    module = target.rpartition(":")[0] if isinstance(target, str) else str(getattr(target, "__module__", ""))
    trusted = current_module(module) in map(current_module, config.trusted)
    if sandbox is None or config.tier == "off" or trusted:
        return replace(Reward.of(source, kwargs), timeout_s=None if trusted else config.timeout_s)
    assert target is not None  # a Reward has a reference or a function
    try:
        reference = target if isinstance(target, str) else reference_of(target)
    except RewardError as fault:
        raise RewardError(f'{fault}, or set reward.sandbox.tier = "off" to run it in this process') from None
    if isinstance(source, Reward):
        return Reward(source.name, sandbox.signature_of(reference), {**source.kwargs, **kwargs}, reference=reference)
    name = source if isinstance(source, str) else str(getattr(source, "__name__", type(source).__name__))
    return Reward(name, sandbox.signature_of(reference), dict(kwargs), reference=reference)


def _unscored_result(rollout: Rollout) -> EvaluateResult:
    reason = f"not scored, the agent never acted: {rollout.stop_reason.value}"
    return EvaluateResult(is_score_valid=False, reason=f"{reason}: {rollout.fault}" if rollout.fault else reason)


def _check_arguments(reward: Reward, tasks: Sequence[Task]) -> None:
    required = reward.signature.missing_arguments({"step", "prompt_length", *reward.kwargs})
    if not required or not tasks:
        return
    columns = [task_kwargs(reward, task) for task in tasks]
    if reward.mode == "batch":  # a batch call gets every column that any of its tasks has
        missing = [(name, "no task has") for name in required if not any(name in available for available in columns)]
    else:
        lacking = (
            (name, task)
            for task, available in zip(tasks, columns, strict=True)
            for name in required
            if name not in available
        )
        missing = [(name, f"task {task.task_id} does not have") for name, task in lacking][:1]
    for name, who in missing:
        raise RewardError(
            f"reward {reward.name} requires the argument {name!r}, which {who}: "
            "set it in reward.kwargs, add a column to the data, or give it a default"
        )


async def validate(setup: RolloutSetup, *, step: int = 0) -> list[ScoredRollout]:
    """One rollout per held-out task, greedy unless `validation.do_sample` is set; samples depend on `step`."""
    decisions = setup.router.decide(setup.validation_tasks, 1, step, label="eval", explore=False)
    rollouts = await setup.scheduler.roll_out(decisions, do_sample=setup.config.validation.do_sample)
    return with_router_credit(setup.router, await score(setup, rollouts, step=step))


def with_router_credit(router: Router, scored: Sequence[ScoredRollout]) -> list[ScoredRollout]:
    """The rollouts with what the router knows about each, for the records and the actor's batch: see `RouterCredit`."""
    return list(router.annotate(scored) if isinstance(router, InferenceRouter) else scored)


async def score(setup: RolloutSetup, rollouts: Sequence[Rollout], *, step: int = 0) -> list[ScoredRollout]:
    """Score all rollouts and align the rewards to steps; raises only if too many rewards failed."""
    return align_results(setup, rollouts, await setup.scoring.evaluate(rollouts, step=step))


def failed_part(reward: str, kind: str) -> str:
    """What a reward's fault is blamed on: an episode that failed has no reward, whose function is not at fault."""
    return f"the {reward}" if kind == "env_fault" and reward in EPISODE_REWARDS else f"the reward {reward}"


def align_results(
    setup: RolloutSetup, rollouts: Sequence[Rollout], results: Sequence[EvaluateResult]
) -> list[ScoredRollout]:
    """Align rewards to steps; raises if too many of them failed."""
    faults = [(r, result.error) for r, result in zip(rollouts, results, strict=True) if result.error is not None]
    if len(faults) > setup.config.reward.max_error_rate * len(rollouts):
        rollout, fault = faults[0]
        reason = " ".join(fault.message.split())
        what = failed_part(setup.scoring.rewards.name, fault.kind)
        error = RewardError(
            f"{what} failed on {len(faults)} of {len(rollouts)} rollouts, more than "
            f"reward.max_error_rate allows; first on {rollout.rollout_id}: {fault.kind}: {reason}"
        )
        if fault.traceback:
            error.add_note(fault.traceback.rstrip())
        raise error
    return align_rollouts(rollouts, results)
