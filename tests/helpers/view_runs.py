"""A run folder with everything that the pages show, written by the code that writes real ones: routes and their odds,
states, thinking levels, tokens with parts, and texts that try to break a page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from toolwise.advantages import Gigpo, Rlvcr
from toolwise.messages import Message, ToolCall
from toolwise.training.rollout_files import write_records
from toolwise.types import (
    Alternative,
    AnnotatedRollout,
    EvaluateResult,
    LevelScore,
    MetricResult,
    Rollout,
    RolloutThinking,
    RouterCredit,
    ScoredRollout,
    StepData,
    StopReason,
    Task,
    ThinkingGroup,
    ThinkingStep,
    UpdatedTokens,
    Usage,
)

ROUTES = ("ANSWER", "SEARCH-FAMILY", "CALCULATE-FAMILY")
THOUGHTS = {
    2: "The number of wells in Osprey is not known to me.",
    3: "I need the number of wells in Osprey. I do not know it, so a search is needed before any sum.",
    4: "I could guess, calculate, or search. A guess is likely wrong; there is nothing to calculate yet; a search "
    "costs one call and gives the number for certain. I search.",
}
HOSTILE = (
    "<script>window.hacked = 1</script></script><img src=x onerror=window.hacked=1> "
    "[click](javascript:window.hacked=1) javascript:window.hacked=1 \u202eevil\u202c zero\u200bwidth \x1b[31m {{7*7}}"
)
MEGABYTE = "All work and no play makes a dull page. " * 26_215
"""1 MB."""
PIECES = [
    "<tool_call>",
    '{"',
    "name",
    '": "',
    "search",
    '", ',
    "arguments",
    '": ',
    "Osprey",
    " wells",
    '"}',
    "</tool_call>",
]
WORDS = [*PIECES, "Answer", ":", " 8", "4", "5", "<|end|>", "<script>", "\u202e", "水".encode()[:1], "水".encode()[1:]]


def sample_run(folder: Path, *, steps: int = 3) -> Path:
    """Write the run; `step-000002` has a group of hostile texts."""
    rng = np.random.default_rng(0)
    rollouts_folder = folder / "rollouts"
    for step in range(1, steps + 1):
        annotated = [
            rollout
            for task in range(6)
            for rollout in _group(rng, step, task, hostile=step == 2 and task == 0, routed=task < 4)
        ]
        estimator = Rlvcr(trajectory=Gigpo(), gate="signed", mode="mean_std_norm")
        credited = estimator(annotated).rollouts
        updated = {}
        for c in credited:
            count = sum(map(len, c.advantages))
            noise = rng.normal(0, 1e-3, count).astype(np.float32)
            entropies = rng.exponential(0.4, count).astype(np.float32)
            updated[c.rollout.rollout_id] = UpdatedTokens(noise, entropies, rng.random(count) < 0.08)
        scored = [a.scored for a in annotated]
        write_records(rollouts_folder, f"step-{step:06d}", scored, list(credited), updated)
    for step in (0, steps):
        held_out = [r.scored for task in range(8) for r in _group(rng, step, task, evaluation=True, size=1)]
        write_records(rollouts_folder, f"eval-{step:06d}", held_out, [])
    lines = [
        {"id": number, "text": word} if isinstance(word, str) else {"id": number, "hex": word.hex()}
        for number, word in enumerate(WORDS)
    ]
    (rollouts_folder / "vocabulary.ndjson").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _write_metrics(folder, steps)
    return folder


def _write_metrics(folder: Path, steps: int) -> None:
    lines: list[dict[str, float]] = []
    for step in range(1, steps + 1):
        progress = step / steps
        lines.append(
            {
                "step": step,
                "score/mean": 0.3 + 0.5 * progress,
                "reward/correct/mean": 0.35 + 0.5 * progress,
                "cost/mean": 1.2 - 0.6 * progress,
                "router/cost/mean": 1.2 - 0.6 * progress,
                "router/cost/lambda": 0.4 * math.sqrt(progress),
                "router/cost/budget": 0.5,
                "time/tokens_per_s": 900.0 + 50 * step,
                "time/rollout_s": 2.0,
                "time/update_s": 1.1,
                "actor/entropy": 0.9 - 0.4 * progress,
                "actor/kl": 0.001 * step,
                "canary/logprob_gap_max": 1e-5,
                "frac_zero_std": 0.2,
                "actor/clip_frac": 0.01,
            }
        )
    for step, correct in ((0, 0.4), (steps, 0.85)):
        lines.append(
            {"step": step, "eval/score": correct - 0.05, "eval/correct": correct, "eval/cost": 0.6, "eval/n": 8}
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    budget = '[[router.budgets]]\nlimit = 0.5\nunit = "cost"\n'
    (folder / "config.toml").write_text(
        f'tools = ["calculator", "search"]\n[router]\nenable = true\ncost = "calls"\n{budget}'
    )
    finding = {
        "kind": "constant_reward",
        "cause": f"every rollout scored 1 {HOSTILE}",
        "cure": "Look at one.",
        "step": 2,
        "evidence": {"steps": [1, 2], "rollouts": ["step-2/1/0"], "figures": {"score": 1.0}},
    }
    (folder / "diagnosis.json").write_text(json.dumps([finding]))


def _group(
    rng: Any,
    step: int,
    number: int,
    *,
    hostile: bool = False,
    evaluation: bool = False,
    size: int = 6,
    routed: bool = True,
) -> list[AnnotatedRollout]:
    prefix = f"{'eval' if evaluation else 'step'}-{step}/{number}"
    question = HOSTILE if hostile else f"How many wells does Osprey {number + 1} have?"
    task = Task(
        task_id=f"task-{number}",
        prompt=[Message(role="user", content=question)],
        ground_truth="845",
        extra_info={"kind": HOSTILE if hostile else ("lookup", "known", "arithmetic")[number % 3]},
    )
    return [_rollout(rng, f"{prefix}/{offset}", prefix, offset, task, hostile, routed) for offset in range(size)]


def _rollout(rng: Any, name: str, group: str, offset: int, task: Task, hostile: bool, routed: bool) -> AnnotatedRollout:
    right, searches = bool(offset % 2), offset % 3 > 0
    route = ROUTES[1 if searches else 0]
    answer = Message(
        role="assistant",
        content=(HOSTILE + MEGABYTE) if hostile and offset == 1 else f"Answer: {845 if right else 100 + offset}",
        reasoning_content="The search says it." if searches else None,
    )
    messages = [*task.prompt]
    steps: list[StepData] = []
    tool = "sea<b>rch\u202e" if hostile else "search"
    if searches:
        call = ToolCall(id="c0", name=tool, arguments={"query": HOSTILE if hostile else "Osprey wells"})
        messages.append(Message(role="assistant", content=None, tool_calls=[call]))
        messages.append(Message(role="tool", content=HOSTILE if hostile else "845 wells", tool_call_id="c0", name=tool))
        steps.append(_step(rng, 0, list(range(12)), "start"))
    messages.append(answer)
    ids = [12, 13, 14, 15, 16, 17] + ([18, 19, 20, 21] if hostile else [])
    steps.append(_step(rng, len(steps), ids, "845 wells" if searches else f"guess {offset}"))
    usage = Usage(calls={tool: 1} if searches else {}, cost=float(searches), sampled_tokens=18)
    logits = tuple(float(x) for x in np.round(rng.normal(size=3), 3))
    rollout = Rollout(
        name,
        group,
        0,
        offset,
        task,
        route if routed else None,
        tuple(steps),
        tuple(messages),
        StopReason.MAX_TOKENS if offset == 5 else StopReason.ANSWERED,
        usage,
        router_log_prob=math.log(_softmax(logits)[ROUTES.index(route)]) if routed else None,
        router_logits=logits if routed else None,
    )
    result = EvaluateResult(
        score=float(right),
        reason=HOSTILE if hostile else "845 is right",
        metrics={"correct": MetricResult(score=right)},
    )
    credit = RouterCredit(searches, searches, False, reward=float(right) - 0.2, advantage=0.3 if right else -0.3)
    scored = ScoredRollout(rollout, result, tuple(steps), router=credit if routed else None)
    thinking = RolloutThinking(tuple(_thinking(rng, len(step.tokens.token_ids), offset) for step in steps), price=0.01)
    return AnnotatedRollout(scored, thinking=thinking)


def _softmax(logits: tuple[float, ...]) -> list[float]:
    total = sum(math.exp(x) for x in logits)
    return [math.exp(x) / total for x in logits]


def _step(rng: Any, index: int, ids: list[int], state: str) -> StepData:
    return StepData(
        system_step_index=index,
        observation_data=None,
        action_taken={"type": "text"},
        resulting_messages_history=[],
        policy_logprobs={
            "prompt_ids": list(range(5 + 10 * index)),
            "token_ids": ids,
            "logprobs": (-rng.exponential(0.5, len(ids))).tolist(),
            "policy_version": 3,
            "token_versions": [3] * (len(ids) - 2) + [4, 4],
        },
        step_info={"state_key": state},
    )


def _thinking(rng: Any, tokens: int, offset: int) -> ThinkingStep:
    used = 1 + offset % 4
    scores = tuple(
        LevelScore(
            level,
            0 if level == 1 else 6 * level,
            (-rng.exponential(0.6, 2)).astype(np.float32),
            rng.exponential(0.5, 2).astype(np.float32),
            None
            if level == used
            else Alternative(level, thought=THOUGHTS.get(level), text=THOUGHTS.get(level, f"<level>{level}</level>")),
        )
        for level in (1, 2, 3, 4)
    )
    return ThinkingStep(used, 6 * used if used > 1 else 0, tokens - 2, ThinkingGroup(used, scores, [1, 2]))
