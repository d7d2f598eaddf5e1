"""The checks of an environment, one method each; `check_env` runs them and collects the findings."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from toolwise.checks.contract import Outcome, Parts, short_repr
from toolwise.checks.env.env_trial import EnvSnapshot, EnvTrial, EnvViolation, open_trial
from toolwise.checks.env.sample_actions import NONSENSE, TEXTS, example_calls, nonsense_calls
from toolwise.envs.base import BaseEnv
from toolwise.errors import ToolwiseError
from toolwise.tools.base import OpenAIFunctionToolSchema
from toolwise.untrusted.json_schema import compile_parameters

SUSPECT_SHARE = 0.75
"""If more than this share of state keys occurs once, the key is suspect: it may contain the history or a clock."""


class EnvChecks:
    """The checks in order; later checks use results of earlier ones."""

    def __init__(
        self,
        make: Callable[[], BaseEnv],
        actions: list[Any],
        gold: Sequence[Any] | None,
        gold_reward: float | None,
        seed: int,
        max_steps: int,
        limit_s: float,
    ) -> None:
        self.make = make
        self.actions = actions
        self.gold = list(gold) if gold is not None else None
        self.gold_reward = gold_reward
        self.seed = seed
        self.max_steps = max_steps
        self.limit_s = limit_s
        self.structured = False
        self.specs: list[dict[str, Any]] = []
        self.script: list[Any] = []
        self.problems: list[str] = []
        self.is_deterministic = False

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
        async with open_trial(self._new(), self.limit_s) as trial:
            self.structured = trial.env.structured_actions
            first = await trial.reset(self.seed)
            self.specs = first.tools if isinstance(first.tools, list) else []
            self._choose_actions(trial.env)
            self.script = self._random_script(0)
            await _play_script(trial, self.script)
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
                    return (
                        "wrong",
                        f'step {index}: info["truncated"] is True but done is not; a truncated episode must be done',
                    )
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
        duplicates = sorted({name for name in names if names.count(name) > 1})
        if duplicates:
            return "wrong", f"two tools are named {duplicates[0]!r}"
        undescribed = [spec["function"]["name"] for spec in self.specs if not spec["function"].get("description")]
        if undescribed:
            return "warning", f"no description for the model to choose by: {', '.join(undescribed[:5])}"
        return "ok", f"{len(names)} tools"

    async def _determinism(self) -> Outcome:
        first, second = await self._play(self.script), await self._play(self.script)
        difference = _first_difference(first.snapshots, second.snapshots)
        if difference is not None:
            return (
                "wrong",
                f"runs with equal seed and actions differ at {difference}; seed randomness in set_seed",
            )
        self.is_deterministic = True
        reseeded = (await self._play(self.script, seed=self.seed + 1)).snapshots
        differs = _first_difference(first.snapshots, reseeded) is not None
        return (
            "ok",
            f"two runs are equal; another seed {'gives another episode' if differs else 'changes nothing'}",
        )

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
            return (
                "warning",
                f"{unique} of {len(keys)} states occurred only once: step-level credit compares little",
            )
        return "ok", f"{len(set(keys))} states in {len(keys)} snapshots"

    async def _independence(self) -> Outcome:
        if not self.is_deterministic:
            return "skipped", "cannot be tested: the environment is not deterministic"
        solo = (await self._play(self.script)).snapshots
        async with open_trial(self._new(), self.limit_s) as mine, open_trial(self._new(), self.limit_s) as other:
            await mine.reset(self.seed)
            await other.reset(self.seed + 1)
            for action, other_action in zip(self.script, self._random_script(2), strict=True):
                await _play_script(other, [other_action])
                await _play_script(mine, [action])
        difference = _first_difference(solo, mine.snapshots)
        if difference is not None:
            return (
                "wrong",
                f"with another episode running, {difference}; keep state in the object, not in globals",
            )
        return "ok", "an episode is not affected by another one"

    async def _invalid_actions(self) -> Outcome:
        probes: list[Any] = list(NONSENSE)
        if self.structured:
            probes = [*nonsense_calls(self.specs), ""]
        unmarked = []
        for probe in probes:
            trial = await self._play([probe])
            if trial.problems:
                return "wrong", f"after the action {short_repr(probe)}: {trial.problems[0]}"
            surely_invalid = probe in (NONSENSE[1], *nonsense_calls(self.specs)[:4])
            if surely_invalid and trial.snapshots[-1].info.get("is_action_valid", True):
                unmarked.append(short_repr(probe))
        if unmarked:
            return "warning", f'{unmarked[0]} was not marked by info["is_action_valid"] = False'
        return "ok", f"{len(probes)} tried, all were answered"

    async def _after_the_end(self) -> Outcome:
        for script in ([*self.gold] if self.gold else [], ["done"] if self.structured else [], *self._scripts(8)):
            async with open_trial(self._new(), self.limit_s) as trial:
                await trial.reset(self.seed)
                await _play_script(trial, script)
                if trial.done:
                    return await self._step_after_end(trial, script[-1])
        return "skipped", f"no episode ended within {self.max_steps} steps; pass actions that end one (--gold)"

    async def _step_after_end(self, trial: EnvTrial, action: Any) -> Outcome:
        try:
            snapshot = await trial.step(action)
        except EnvViolation as fault:
            if "took longer" in str(fault):
                raise
            return "ok", f"a step after the end is refused ({fault})"
        if not snapshot.done:
            return "wrong", "a step after the end continues the episode; raise an error, or return done=True again"
        return "ok", "a step after the end returns done again"

    async def _close(self) -> Outcome:
        try:
            await EnvTrial(self._new(), self.limit_s).close()
        except EnvViolation as fault:
            return "wrong", f"without a reset: {fault}"
        trial = EnvTrial(self._new(), self.limit_s)
        await trial.reset(self.seed)
        await trial.close()
        try:
            await trial.close()
        except EnvViolation as fault:
            return "wrong", f"second call: {fault}"
        return "ok", "works without a reset and twice"

    async def _gold_actions(self) -> Outcome:
        if self.gold is None:
            return "skipped", "none given (--gold, or gold_actions())"
        async with open_trial(self._new(), self.limit_s) as trial:
            await trial.reset(self.seed)
            await _play_script(trial, self.gold)
            played = len(trial.snapshots) - 1
            if played < len(self.gold):
                return "wrong", f"the episode ends after {played} of {len(self.gold)} gold actions"
            total = sum(m.reward or 0.0 for m in trial.snapshots) + sum((await trial.final_rewards()).values())
        return self._judge_gold(trial.snapshots, total)

    def _judge_gold(self, snapshots: list[EnvSnapshot], total: float) -> Outcome:
        last = snapshots[-1]
        if not last.done or last.truncated:
            return "wrong", f"{len(snapshots) - 1} gold actions, but the episode {_ending(last)}"
        if self.gold_reward is not None and total < self.gold_reward:
            return "wrong", f"gold actions earn {total:g}, less than {self.gold_reward:g}"
        success = last.info.get("success")
        rewarded = any(m.reward is not None for m in snapshots) or total != 0
        if success is False or (success is None and self.gold_reward is None and rewarded and total <= 0):
            evidence = 'info["success"] is False' if success is False else f"they earn {total:g}"
            return "wrong", f"gold actions end the episode without reaching the goal: {evidence}"
        return "ok", f"{len(snapshots) - 1} actions reach the goal, earning {total:g}"

    def _new(self) -> BaseEnv:
        try:
            return self.make()
        except ToolwiseError:
            raise
        except Exception as fault:
            raise EnvViolation(f"cannot create the environment: {type(fault).__name__}: {fault}") from fault

    async def _play(self, script: Sequence[Any], seed: int | None = None) -> EnvTrial:
        async with open_trial(self._new(), self.limit_s) as trial:
            await trial.reset(self.seed if seed is None else seed)
            await _play_script(trial, script)
        return trial

    def _choose_actions(self, env: BaseEnv) -> None:
        gold_actions = env.gold_actions() if self.gold is None else None
        self.gold = list(gold_actions) if gold_actions is not None else self.gold
        pool = self.actions or list(env.example_actions()) or (self.gold or [])
        self.actions = list(pool) or (example_calls(self.specs, Random(self.seed)) if self.structured else list(TEXTS))

    def _random_script(self, number: int) -> list[Any]:
        random = Random(f"{self.seed}/{number}")
        return [random.choice(self.actions) for _ in range(self.max_steps)] if self.actions else []

    def _scripts(self, count: int) -> list[list[Any]]:
        return [self._random_script(number) for number in range(count)]


async def _play_script(trial: EnvTrial, script: Sequence[Any]) -> None:
    for action in script:
        if trial.done:
            return
        await trial.step(action)


def _first_difference(first: Sequence[EnvSnapshot], second: Sequence[EnvSnapshot]) -> str | None:
    for index, (mine, theirs) in enumerate(zip(first, second, strict=False)):
        difference = mine.difference(theirs)
        if difference is not None:
            return f"{'reset' if index == 0 else f'step {index}'}: {difference}"
    return None if len(first) == len(second) else f"step {min(len(first), len(second))}: one episode is longer"


def _ending(snapshot: EnvSnapshot) -> str:
    return "was truncated" if snapshot.truncated else "ended" if snapshot.done else "did not end"


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True, sort_keys=True)
