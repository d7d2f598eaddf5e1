"""What holds in every run, whatever the seed: each check gives the words for what is wrong, or nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
from sim_people import WatchedToolEnv, is_good
from sim_stage import DEAF_MOODS, GOOD, Episode, Mood, Visit
from sim_world import Play

from toolwise.concurrency.deadlines import GRACE_S
from toolwise.learner.batch import build_batch
from toolwise.types import AnnotatedRollout, CreditedRollout, EvaluateResult, Rollout, ScoredRollout, StopReason

LEGAL = {
    "pending": {"running", "completed", "failed"},
    "running": {"tool_calling", "interacting", "completed", "failed"},
    "tool_calling": {"running", "completed", "failed"},
    "interacting": {"running", "completed", "failed"},
    "completed": set(),
    "failed": set(),
}
Words = Iterator[str]


def violations(run: Play) -> list[str]:
    """All that is wrong with a run."""
    found = [f"crashed: {run.crash!r}"] if run.crash is not None else []
    found += run.stage.violations
    for check in CHECKS:
        found += check(run)
    return found


def tick_s(run: Play) -> float:
    """How far apart in time things of the same instant may be."""
    return 20 * run.plan.jitter_s + run.stage.loop.stalled_s + 1e-6


def every_request_ends_once(run: Play) -> Words:
    for episode, states in run.states.items():
        path = ["pending", *(state for _, state in states)]
        for before, after in pairwise(path):
            if after not in LEGAL[before]:
                yield f"{episode}: {before} -> {after} in {path}"
        if path[-1] not in ("completed", "failed"):
            yield f"{episode}: left {path[-1]}"
    began = {e for e, world in run.worlds.items() if world.times}
    for episode in began - set(run.states):
        yield f"{episode}: began and never told of its end"


def every_tool_is_released_once(run: Play) -> Words:
    for tool in run.tools:
        for instance, counts in tool.done.items():
            if counts["created"] and counts["release"] != 1:
                yield f"{instance}: released {counts['release']} times"
            if not counts["created"] and counts["release"]:
                yield f"{instance}: released and never made"
    for episode, world in run.worlds.items():
        began, closed = "set_seed" in world.times, len(world.times.get("close", ()))
        if closed != 1 and (began or closed):
            yield f"{episode}: its world was closed {closed} times"


def all_results_are_there_in_order(run: Play) -> Words:
    done = [(r.batch_data_id, r.rollout_offset) for r in run.done]
    if len(set(done)) != len(done):
        yield f"handed over more than once: {done}"
    if run.result is None or run.crash is not None:
        return
    keys = [(r.batch_data_id, r.rollout_offset) for r in run.result]
    if run.plan.listens == "roll_out" and keys != run.plan.episodes:
        yield f"roll_out gave {keys}, not {run.plan.episodes}"
    for group in run.groups:
        offsets = [r.rollout_offset for r in group]
        places = {r.batch_data_id for r in group}
        n = run.plan.sizes[min(places)] if places else 0
        if offsets != list(range(n)) or len(places) > 1:
            yield f"a group of {[(r.batch_data_id, r.rollout_offset) for r in group]}"
    if run.plan.listens == "groups" and sorted(keys) != run.plan.episodes:
        yield f"groups gave {sorted(keys)}, not {run.plan.episodes}"
    if run.plan.listens == "groups" and len(run.groups) != len(run.plan.sizes):
        yield f"{len(run.groups)} groups of {len(run.plan.sizes)}"
    if run.plan.listens != "stops early" and sorted(done) != run.plan.episodes:
        yield f"on_done heard of {sorted(done)}"


def deadlines_hold(run: Play) -> Words:
    plan, tick = run.plan, tick_s(run)
    for episode, world in run.worlds.items():
        if "set_seed" not in world.times or "final_rewards" not in world.times:
            continue
        began, closing = world.times["set_seed"][0], world.times["final_rewards"][0]
        everybody = run.stage.visits if plan.lock_step else _of(run, episode)
        grace = GRACE_S if any(v.mood in DEAF_MOODS for v in everybody) or not plan.sessions else 0.0
        if closing - began > plan.deadline_s + grace + tick:
            yield f"{episode}: decided after {closing - began:g} s; the deadline is {plan.deadline_s:g} s"
        ended = run.states.get(episode, [(began, "")])[-1][0]
        longest = plan.deadline_s + GRACE_S + 2 * (plan.close_timeout_s + GRACE_S)
        if ended - began > longest + tick:
            yield f"{episode}: over after {ended - began:g} s, {longest:g} s at most"
        for visit in _of(run, episode):
            first = visit.what in ("get_action", "create", "execute", "reset", "step", "start", "respond")
            if first and visit.began - began > plan.deadline_s + tick:
                yield f"{episode}: {visit.what} began {visit.began - began:g} s in, past {plan.deadline_s:g} s"
            if first and visit.began > closing:
                yield f"{episode}: {visit.what} began after the end"
    for visit in run.stage.visits:
        if visit.what in ("create", "execute", "calc_reward", "release", "respond", "start", "finish"):
            heard = visit.heard if visit.heard is not None else run.over_at
            if heard - visit.began > plan.tool_timeout_s + tick:
                yield f"{visit.who}: {visit.what} ran for {heard - visit.began:g} s, not {plan.tool_timeout_s:g} s"
    for cause, at in (("cancelled", run.cancelled_at), ("stopped", run.stopped_at)):
        longest = GRACE_S + 2 * (plan.close_timeout_s + GRACE_S)
        if at is not None and run.over_at - at > longest + tick:
            yield f"{cause} at {at:g} s and over only at {run.over_at:g} s"


def nothing_is_left_behind_uncounted(run: Play) -> Words:
    # A tool that came too late is being released by a task that works, and mostly one that waits for it.
    least = len({id(v) for v in (*run.deaf, *run.late)})
    if not least <= len(run.left_behind) <= least + len(run.late):
        yield f"still at work after the end: {run.left_behind}; deaf are {[(v.who, v.what) for v in run.deaf]}"
    if len(run.deaf) > run.newly_abandoned:
        yield f"{len(run.deaf)} left behind, and {run.newly_abandoned} counted"
    if run.stragglers:
        yield f"at work long after everybody could have ended: {run.stragglers}"


def what_is_handed_over_stays(run: Play) -> Words:
    for episode, told in run.before_curtain.items():
        if told != run.after_curtain[episode]:
            yield f"{episode}: changed after it was handed over"


def histories_grow(run: Play) -> Words:
    for episode, rollout in run.rollouts.items():
        messages, seen = list(rollout.messages), 0
        for step in rollout.steps:
            observed, resulting = list(step.observation_data), list(step.resulting_messages_history)
            if observed != messages[: len(observed)] or resulting != messages[: len(resulting)]:
                yield f"{episode}: a step saw what is not in the conversation"
            if len(observed) < seen or len(resulting) <= len(observed) or messages[len(observed)].role != "assistant":
                yield f"{episode}: step {step.system_step_index} stands at the wrong place"
            if seen and len(observed) != seen:
                yield f"{episode}: something was said between two steps"
            seen = len(resulting)
        if len(rollout.steps) != sum(m.role == "assistant" for m in messages):
            yield f"{episode}: {len(rollout.steps)} steps for {sum(m.role == 'assistant' for m in messages)} replies"
        if [s.system_step_index for s in rollout.steps] != list(range(len(rollout.steps))):
            yield f"{episode}: steps out of order"
        if any(s.is_done for s in rollout.steps[:-1]):
            yield f"{episode}: went on after it was done"


def tokens_extend(run: Play) -> Words:
    for episode, rollout in run.rollouts.items():
        held: list[int] = []
        sampled = 0
        for step in rollout.steps:
            if step.policy_logprobs is None:
                continue
            prompt, ids = list(step.tokens.prompt_ids), list(step.tokens.token_ids)
            if len(ids) != len(step.tokens.logprobs):
                yield f"{episode}: {len(ids)} tokens and {len(step.tokens.logprobs)} log-probs"
                return
            if prompt[: len(held)] != held:
                yield f"{episode}: step {step.system_step_index} does not extend the one before it"
            held = prompt + ids
            sampled += len(ids)
        if rollout.usage.sampled_tokens != sampled:
            yield f"{episode}: {sampled} tokens sampled, {rollout.usage.sampled_tokens} counted"
        yield from _rows(episode, rollout, sampled)


def _rows(episode: Episode, rollout: Rollout, sampled: int) -> Words:
    """As the learner gets them: ids and mask of one length, in one row, and a log-prob and advantage for each token
    of the mask."""
    advantages = tuple(np.ones(len(s.tokens.token_ids), dtype=np.float32) for s in rollout.steps)
    annotated = AnnotatedRollout(ScoredRollout(rollout, EvaluateResult(), rollout.steps))
    batch = build_batch([CreditedRollout(annotated, rollout.steps, advantages)])
    rows, marked = batch.rows, sum(int(row.sampled.sum()) for row in batch.rows)
    for row in rows:
        if len(row.ids) != len(row.sampled):
            yield f"{episode}: a row of {len(row.ids)} ids, {len(row.sampled)} marks"
    if not len(batch.rollout_logprobs) == len(batch.advantages) == marked:
        columns = f"{len(batch.rollout_logprobs)} log-probs and {len(batch.advantages)} advantages"
        yield f"{episode}: {columns} for {marked} marked tokens"
    if marked != sampled or len(rows) > 1:
        yield f"{episode}: {len(rows)} rows with {marked} of {sampled} sampled tokens"


def usage_is_what_the_tools_saw(run: Play) -> Words:
    for episode, rollout in run.rollouts.items():
        if not isinstance(run.worlds.get(episode), WatchedToolEnv):
            continue
        whole = [s for s in rollout.steps if "calls" in s.step_info]
        cut = [s for s in rollout.steps if "calls" not in s.step_info]
        answered = Counter(m.name or "unreadable" for m in rollout.messages if m.role == "tool")
        # A call that nobody can read is one too where its own turn ended the episode, and nobody answered it.
        ended = rollout.stop_reason in (StopReason.TERMINATED, StopReason.REGEX, StopReason.MAX_TOKENS)
        ended = ended or (rollout.fault or "").startswith("calc_reward: ")  # which is told in the place of the ending
        last = [c for s in cut[-1:] if ended for c in s.action_taken.get("tool_calls", ())]
        unread = [c for c in last if isinstance(c.arguments, str)]
        counted = answered + Counter(c.name or "unreadable" for c in unread)
        if dict(counted) != dict(rollout.usage.calls):
            yield f"{episode}: {dict(counted)} written or answered, {dict(rollout.usage.calls)} counted"
        meant = [c for s in whole for c in s.action_taken["tool_calls"] if is_good(c, run.plan.tools)]
        perhaps = [c for s in cut[-1:] for c in s.action_taken.get("tool_calls", ()) if is_good(c, run.plan.tools)]
        made = [v for v in _of(run, episode) if v.what == "execute"]
        if not len(meant) <= len(made) <= len(meant) + len(perhaps):
            yield f"{episode}: {len(made)} calls made, {len(meant)} told of and {len(perhaps)} cut short"
        cost = 0.5 * (sum(len(s.action_taken["tool_calls"]) for s in whole) + len(unread))  # malformed ones too
        if rollout.usage.cost != cost:
            yield f"{episode}: cost {rollout.usage.cost}, not {cost}"


def outcomes_make_sense(run: Play) -> Words:
    for episode, rollout in run.rollouts.items():
        reason, visits = rollout.stop_reason, _of(run, episode)
        failed = reason in (StopReason.POLICY_FAULT, StopReason.ENV_FAULT)
        if failed != (run.states[episode][-1][1] == "failed") and rollout.fault is not None:
            yield f"{episode}: {reason}, and {run.states[episode][-1][1]}"
        if not rollout.trainable and rollout.fault is None:
            yield f"{episode}: {reason} and nothing said of why"
        given = {v.who.split(" of ")[0]: v.gave for v in visits if v.what == "calc_reward" and v.raised is None}
        if isinstance(run.worlds.get(episode), WatchedToolEnv):
            wrong = {name: reward for name, reward in rollout.tool_rewards.items() if given.get(name) != reward}
            if wrong:
                yield f"{episode}: rewards {wrong}, and the tools gave {given}"
            asked = [v for v in visits if v.what == "calc_reward"]
            given_all = all(v.raised is None and v.mood in GOOD for v in asked) and not run.stage.loop.stalled_s
            if given_all and set(rollout.tool_rewards) != set(given):
                yield f"{episode}: rewards of {set(rollout.tool_rewards)}, given by {set(given)}"
        down = any(v.what == "execute" and v.mood is Mood.DOWN and v.raised == "ToolCallError" for v in visits)
        if rollout.infrastructure_fault and not down and run.plan.kind != "shared tools":
            yield f"{episode}: an infrastructure fault that nobody had"
        attributed = run.plan.sessions and run.plan.kind != "shared tools"
        well = all(v.mood in GOOD and v.asked_to_end is None for v in visits) and episode not in run.stage.odd
        if attributed and failed and well and not run.stage.loop.stalled_s:
            yield f"{episode}: {reason} ({rollout.fault}) though nobody misbehaved"


def _of(run: Play, episode: Episode) -> list[Visit]:
    return [v for v in run.stage.visits if v.episode == episode]


CHECKS: list[Callable[[Play], Words]] = [
    every_request_ends_once,
    every_tool_is_released_once,
    all_results_are_there_in_order,
    deadlines_hold,
    nothing_is_left_behind_uncounted,
    what_is_handed_over_stays,
    histories_grow,
    tokens_extend,
    usage_is_what_the_tools_saw,
    outcomes_make_sense,
]
