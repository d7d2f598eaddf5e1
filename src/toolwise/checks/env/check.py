"""`check_env`: tests whether an environment meets the contract that rollouts rely on, one rule after another."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

from toolwise.checks.contract import CheckReport, Outcome, Parts, run_parts, short_repr
from toolwise.checks.env.env_trial import EnvSnapshot, EnvTrial, EnvViolation, open_trial
from toolwise.checks.example_values import NONSENSE, TEXTS, example_calls, nonsense_calls
from toolwise.envs.base import BaseEnv
from toolwise.errors import ToolwiseError
from toolwise.tools.base import OpenAIFunctionToolSchema
from toolwise.untrusted.json_schema import compile_parameters

MIN_BLOCK_S = 1.0
SUSPECT_SHARE = 0.75
"""If more than this share of state keys occurs once, the key is suspect: it may contain the history or a clock."""


def check_env(
    make: Callable[[], BaseEnv],
    *,
    name: str = "environment",
    actions: Sequence[Any] = (),
    gold: Sequence[Any] | None = None,
    gold_reward: float | None = None,
    seed: int = 0,
    max_steps: int = 20,
    step_timeout_s: float = 10.0,
) -> CheckReport:
    """Check the environments that `make` creates, using a new one for each episode.

    `actions` are valid actions to sample from, for environments with neither `example_actions` nor tools. `gold` is a
    sequence of actions that reaches the goal, by default the environment's `gold_actions`. The goal counts as reached
    if the last gold action ends the episode untruncated with `info["success"]`, or with a total reward above 0, or of
    at least `gold_reward`.
    """
    findings = run_parts(
        EnvChecks(make, actions, gold, gold_reward, seed, max_steps, step_timeout_s).parts(),
        essential={"life cycle"},  # nothing else works in an environment that cannot start
        explain=_explain,
        limit_s=step_timeout_s,
        min_block_s=MIN_BLOCK_S,
        blocked="warning",
    )
    return CheckReport("env", name, findings)


def _explain(fault: Exception) -> str:
    if not isinstance(fault, EnvViolation):
        raise fault
    return str(fault)


@dataclass(slots=True)
class EnvChecks:
    """The rules in order; later ones use results of earlier ones."""

    make: Callable[[], BaseEnv]
    actions: Sequence[Any]
    gold: Sequence[Any] | None
    gold_reward: float | None
    seed: int
    max_steps: int
    limit_s: float
    structured: bool = False
    specs: list[dict[str, Any]] = field(default_factory=list)
    script: list[Any] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    is_deterministic: bool = False

    def parts(self) -> Parts:
        return {
            "life cycle": self._life_cycle,
            "types": self._types,
            "done and truncated": self._endings,
            "tool specs": self._tool_specs,
            "determinism": self._determinism,
            "state key": self._state_key,
            "independence": self._independence,
            "invalid actions": self._invalid_actions,
            "after the end": self._after_the_end,
            "close": self._close,
            "gold actions": self._gold_actions,
        }

    async def _life_cycle(self) -> Outcome:
        async with self._episode() as trial:
            self.structured = trial.env.structured_actions
            tools = trial.snapshots[0].tools
            self.specs = tools if isinstance(tools, list) else []
            self._choose_actions(trial.env)
            self.script = self._scripts(1)[0]
            await trial.play(self.script)
            await trial.final_rewards()
        self.problems = trial.problems
        return "ok", f"reset, {len(trial.snapshots) - 1} steps, final_rewards and close, each within {self.limit_s:g} s"

    async def _types(self) -> Outcome:
        if self.problems:
            return "wrong", "; ".join(self.problems[:3])
        return "ok", "observations, rewards, done and info fit"

    async def _endings(self) -> Outcome:
        endings = []
        for script in [*([self.gold] if self.gold else []), *self._scripts(4)]:
            snapshots = (await self._play(script)).snapshots
            for index, snapshot in enumerate(snapshots):
                if snapshot.truncated and not snapshot.done:
                    problem = 'info["truncated"] is True but done is not; a truncated episode must be done'
                    return "wrong", f"step {index}: {problem}"
            endings.append(_ending(snapshots[-1]))
        return "ok", f"episodes tried: {', '.join(dict.fromkeys(endings))}"

    async def _tool_specs(self) -> Outcome:
        if not self.specs:
            return "ok", "none: actions are text" if not self.structured else "no tools offered"
        names = []
        for spec in self.specs:
            try:
                function = OpenAIFunctionToolSchema.model_validate(spec).function
                compile_parameters(function.name, _as_json(function.parameters))
            except (ToolwiseError, ValueError) as fault:
                return "wrong", f"{spec!r:.60}: {str(fault)[:120]}"
            names.append(function.name)
        if duplicates := sorted({name for name in names if names.count(name) > 1}):
            return "wrong", f"two tools are named {duplicates[0]!r}"
        if undescribed := [s["function"]["name"] for s in self.specs if not s["function"].get("description")]:
            return "warning", f"no description for the model to choose by: {', '.join(undescribed[:5])}"
        return "ok", f"{len(names)} tools"

    async def _determinism(self) -> Outcome:
        first, second = await self._play(self.script), await self._play(self.script)
        if difference := _first_difference(first, second):
            return "wrong", f"runs with equal seed and actions differ at {difference}; seed randomness in set_seed"
        self.is_deterministic = True
        differs = _first_difference(first, await self._play(self.script, self.seed + 1))
        return "ok", f"two runs are equal; another seed {'gives another episode' if differs else 'changes nothing'}"

    async def _state_key(self) -> Outcome:
        trials = [await self._play(script) for script in self._scripts(4)]
        keys = [snapshot.state_key for trial in trials for snapshot in trial.snapshots]
        seen = {_as_json(snapshot.observation) for trial in trials for snapshot in trial.snapshots}
        if all(key is None for key in keys):
            return "ok", "none: step-level credit groups steps by the last observation"
        if None in keys:
            return "warning", "sometimes None: those steps cannot be compared"
        if len(set(keys)) == 1 and len(seen) > 3:
            return "warning", f"constant over {len(seen)} different observations: it does not identify the state"
        unique = sum(count == 1 for count in Counter(keys).values())
        if len(keys) >= 12 and unique > SUSPECT_SHARE * len(keys):
            return "warning", f"{unique} of {len(keys)} states occurred only once: step-level credit compares little"
        return "ok", f"{len(set(keys))} states in {len(keys)} snapshots"

    async def _independence(self) -> Outcome:
        if not self.is_deterministic:
            return "skipped", "cannot be tested: the environment is not deterministic"
        solo = await self._play(self.script)
        async with self._episode() as mine, self._episode(seed=self.seed + 1) as other:
            for action, other_action in zip(self.script, self._scripts(3)[2], strict=True):
                await other.play([other_action])
                await mine.play([action])
        if difference := _first_difference(solo, mine):
            return "wrong", f"with another episode running, {difference}; keep state in the object, not in globals"
        return "ok", "an episode is not affected by another one"

    async def _invalid_actions(self) -> Outcome:
        calls = nonsense_calls(self.specs)
        probes: Sequence[Any] = [*calls, ""] if self.structured else NONSENSE
        unmarked = []
        for probe in probes:
            trial = await self._play([probe])
            if trial.problems:
                return "wrong", f"after the action {short_repr(probe)}: {trial.problems[0]}"
            surely_invalid = probe in (NONSENSE[1], *calls[:4])
            if surely_invalid and trial.snapshots[-1].info.get("is_action_valid", True):
                unmarked.append(short_repr(probe))
        if unmarked:
            return "warning", f'{unmarked[0]} was not marked by info["is_action_valid"] = False'
        return "ok", f"{len(probes)} tried, all were answered"

    async def _after_the_end(self) -> Outcome:
        for script in (self.gold or [], ["done"] if self.structured else [], *self._scripts(8)):
            async with self._episode(script) as trial:
                if trial.done:
                    return await _step_after_end(trial, script[-1])
        return "skipped", f"no episode ended within {self.max_steps} steps; pass actions that end one (--gold)"

    async def _close(self) -> Outcome:
        try:
            await EnvTrial(self._new(), self.limit_s).close()
        except EnvViolation as fault:
            return "wrong", f"without a reset: {fault}"
        trial = await self._play([])
        try:
            await trial.close()
        except EnvViolation as fault:
            return "wrong", f"second call: {fault}"
        return "ok", "works without a reset and twice"

    async def _gold_actions(self) -> Outcome:
        if self.gold is None:
            return "skipped", "none given (--gold, or gold_actions())"
        async with self._episode(self.gold) as trial:
            played, last = len(trial.snapshots) - 1, trial.snapshots[-1]
            if played < len(self.gold):
                return "wrong", f"the episode ends after {played} of {len(self.gold)} gold actions"
            total = sum(m.reward or 0.0 for m in trial.snapshots) + sum((await trial.final_rewards()).values())
        if not last.done or last.truncated:
            return "wrong", f"{played} gold actions, but the episode {_ending(last)}"
        if self.gold_reward is not None and total < self.gold_reward:
            return "wrong", f"gold actions earn {total:g}, less than {self.gold_reward:g}"
        success = last.info.get("success")
        rewarded = any(m.reward is not None for m in trial.snapshots) or total != 0
        if success is False or (success is None and self.gold_reward is None and rewarded and total <= 0):
            evidence = 'info["success"] is False' if success is False else f"they earn {total:g}"
            return "wrong", f"gold actions end the episode without reaching the goal: {evidence}"
        return "ok", f"{played} actions reach the goal, earning {total:g}"

    def _new(self) -> BaseEnv:
        try:
            return self.make()
        except ToolwiseError:
            raise
        except Exception as fault:
            raise EnvViolation(f"cannot create the environment: {type(fault).__name__}: {fault}") from fault

    @asynccontextmanager
    async def _episode(self, script: Sequence[Any] = (), seed: int | None = None) -> AsyncIterator[EnvTrial]:
        """A new environment after its reset and the actions in `script`; closed on exit."""
        async with open_trial(self._new(), self.limit_s) as trial:
            await trial.reset(self.seed if seed is None else seed)
            await trial.play(script)
            yield trial

    async def _play(self, script: Sequence[Any], seed: int | None = None) -> EnvTrial:
        async with self._episode(script, seed) as trial:
            return trial

    def _choose_actions(self, env: BaseEnv) -> None:
        if self.gold is None and (gold := env.gold_actions()) is not None:
            self.gold = list(gold)
        pool = self.actions or list(env.example_actions()) or self.gold
        self.actions = pool or (example_calls(self.specs, Random(self.seed)) if self.structured else TEXTS)

    def _scripts(self, count: int) -> list[list[Any]]:
        """Sequences of random actions, the same ones at every call."""
        randoms = [Random(f"{self.seed}/{number}") for number in range(count)]
        steps = range(self.max_steps if self.actions else 0)
        return [[random.choice(self.actions) for _ in steps] for random in randoms]


async def _step_after_end(trial: EnvTrial, action: Any) -> Outcome:
    try:
        snapshot = await trial.step(action)
    except EnvViolation as fault:
        if "took longer" in str(fault):
            raise
        return "ok", f"a step after the end is refused ({fault})"
    if not snapshot.done:
        return "wrong", "a step after the end continues the episode; raise an error, or return done=True again"
    return "ok", "a step after the end returns done again"


def _first_difference(first: EnvTrial, second: EnvTrial) -> str | None:
    for index, (mine, theirs) in enumerate(zip(first.snapshots, second.snapshots, strict=False)):
        if difference := mine.difference(theirs):
            return f"{f'step {index}' if index else 'reset'}: {difference}"
    lengths = len(first.snapshots), len(second.snapshots)
    return None if lengths[0] == lengths[1] else f"step {min(lengths)}: one episode is longer"


def _ending(snapshot: EnvSnapshot) -> str:
    return "was truncated" if snapshot.truncated else "ended" if snapshot.done else "did not end"


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True, sort_keys=True)
