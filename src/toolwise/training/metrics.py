"""Metrics of scored rollouts, for training steps and validations; fault rates by cause, counted over the whole run and
limited over its latest rollouts."""

from __future__ import annotations

import math
import re
import resource
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from toolwise.config.schema import FaultsConfig
from toolwise.messages import Message
from toolwise.protocols import Metrics
from toolwise.types import ScoredRollout, StopReason
from toolwise.types.rollouts import OVER_BUDGET
from toolwise.untrusted.bounds import MAX_DISTINCT_NAMES, MAX_METRICS, MAX_NAME_CHARS, truncate_text

_FAULT_OF_STOP_REASON = {
    StopReason.POLICY_FAULT: "policy",
    StopReason.ENV_FAULT: "env",
    StopReason.DEADLINE: "deadline",
}
_MODEL_ERROR_KINDS = {"bad_json", "unknown_tool", "forbidden_tool", "bad_arguments", "tool_error", OVER_BUDGET}
"""Failed calls caused by the model or refused by a tool; all other kinds are tool faults."""
CALL_FAULTS = ("tool", "parse")
_FAULT_DESCRIPTIONS = {
    "policy": "the policy failed",
    "env": "the environment failed",
    "deadline": "the episode passed rollout.deadline_s",
    "infrastructure": "the backend of a tool was down",
    "tool": "the tool raised or timed out",
    "parse": "the call could not be parsed",
}


_VALIDATION_FIGURES = frozenset(
    {"n", "score", "cost", "tokens", "errors", "invalid", "prompt_too_long", "loss", "by_kind"}
)
_VALIDATION_PARTS = ("route/", "budget/", "thinking/", "reward/")
"""A validation's own figures, and the beginnings of the names of others: no metric of a reward takes their place."""


def summarize(scored: Sequence[ScoredRollout]) -> Metrics:
    """Metrics of one training step's rollouts."""
    if not scored:
        return {}
    counted = [s for s in scored if s.result.has_valid_score]
    metrics: Metrics = {
        "rollouts": float(len(scored)),
        "cost/mean": mean([s.cost for s in scored]),
        "calls/mean": mean([float(sum(s.rollout.usage.calls.values())) for s in scored]),
        "calls/failed": mean([float(sum(s.rollout.usage.failed_calls.values())) for s in scored]),
        "tools/queue_s": sum(s.rollout.usage.queue_s for s in scored)
        / max(1, sum(sum(s.rollout.usage.calls.values()) for s in scored)),
        "tools/queue_s_max": max(s.rollout.usage.longest_queue_s for s in scored),
        "turns/mean": mean([float(len(s.steps)) for s in scored]),
        "tokens/sampled": float(sum(s.rollout.usage.sampled_tokens for s in scored)),
        "reward/error_rate": mean([float(s.result.error is not None) for s in scored]),
        "reward/invalid_rate": mean([float(s.result.error is None and not s.result.has_valid_score) for s in scored]),
        "reward/misaligned": float(sum(bool(s.warnings) for s in scored)),
    }
    if counted:
        scores = [s.score for s in counted]
        metrics |= {"score/mean": mean(scores), "score/std": std(scores), "score/max": max(scores)}
        by_name = reported_metrics(counted)
        for name in _most_common(by_name):
            metrics |= {f"reward/{name}/mean": mean(by_name[name]), f"reward/{name}/std": std(by_name[name])}
        if len(by_name) > MAX_METRICS:
            metrics["reward/metrics_left_out"] = float(len(by_name) - MAX_METRICS)
    for reason, count in Counter(s.rollout.stop_reason.value for s in scored).items():
        metrics[f"stop/{reason}"] = count / len(scored)
    turns = Counter(step.tokens.alignment for s in scored for step in s.steps)
    metrics |= {f"tokens/{alignment}": float(turns[alignment]) for alignment in ("clean", "realigned", "forked")}
    for kind, count in Counter(s.result.error.kind for s in scored if s.result.error).items():
        metrics[f"reward/errors/{kind}"] = float(count)
    return metrics | output_metrics(scored) | fault_metrics(scored) | route_metrics(scored)


def output_metrics(scored: Sequence[ScoredRollout]) -> Metrics:
    """Shares of rollouts that ended in a reply cut off by rollout.max_new_tokens, and that have the step's most common
    output, word for word; and the share of turns that one of rollout.stop ended, if any."""
    ends = [s.rollout.steps[-1].tokens.finish_reason for s in scored if s.rollout.steps]
    turns = [step.tokens.finish_reason for s in scored for step in s.rollout.steps]
    stopped = turns.count("stop_string") / max(1, len(turns))
    return {
        "outputs/cut": ends.count("length") / max(1, len(ends)),
        "outputs/most_common": most_common_share([written_text(s.rollout.messages) for s in scored]),
        **({"outputs/stop_string": stopped} if stopped else {}),
    }


def most_common_share(texts: Sequence[str]) -> float:
    return Counter(texts).most_common(1)[0][1] / len(texts) if texts else 0.0


def written_text(messages: Sequence[Message]) -> str:
    """All that the assistant wrote, calls included."""
    parts: list[str] = []
    for message in messages:
        if message.role == "assistant":
            parts += [message.content or "", *(f"{call.name}{call.arguments}" for call in message.tool_calls or ())]
    return "\n".join(parts)


def route_metrics(scored: Sequence[ScoredRollout]) -> Metrics:
    """For each route: the share of rollouts that took it, their mean score and cost."""
    routes: dict[str, list[ScoredRollout]] = defaultdict(list)
    for s in scored:
        if s.rollout.route is not None:
            routes[s.rollout.route].append(s)
    metrics: Metrics = {}
    for route, members in sorted(routes.items()):
        counted = [s.score for s in members if s.result.has_valid_score]
        metrics |= {
            f"route/{route}/share": len(members) / len(scored),
            f"route/{route}/cost": mean([s.cost for s in members]),
        }
        metrics |= {f"route/{route}/score": mean(counted)} if counted else {}
    return metrics


def summarize_validation(scored: Sequence[ScoredRollout], held_out_tools: Collection[str] = ()) -> dict[str, Any]:
    """Metrics of a validation: overall, and per kind of task if tasks have a kind.

    With `held_out_tools`, there are two more kinds: tasks that name one of them ("unseen tools"), and the others.
    """
    kinds: dict[str, list[ScoredRollout]] = defaultdict(list)
    for s in scored:
        if held_out_tools:
            unseen = not set(held_out_tools).isdisjoint(s.rollout.task.tools or ())
            kinds["unseen tools" if unseen else "seen tools"].append(s)
        kind = s.rollout.task.extra_info.get("kind")
        if kind is not None:
            kinds[truncate_text(str(kind), MAX_NAME_CHARS)].append(s)
    by_kind = {kind: _group_metrics(kinds[kind]) for kind in _most_common(kinds, MAX_DISTINCT_NAMES)}
    return _group_metrics(scored) | route_metrics(scored) | {"by_kind": by_kind}


def validation_metrics(summary: Mapping[str, Any]) -> Metrics:
    """The result of `summarize_validation` as flat metrics: eval/correct, eval/lookup/correct, …"""
    metrics = {f"eval/{name}": float(v) for name, v in summary.items() if isinstance(v, int | float)}
    for kind, part in summary["by_kind"].items():
        metrics |= {f"eval/{kind}/{name}": float(v) for name, v in part.items()}
    return metrics


def _group_metrics(scored: Sequence[ScoredRollout]) -> dict[str, Any]:
    """Has no score if nothing could be scored: a 0 would suggest a bad model. `invalid` counts the rollouts of which
    the reward said that it cannot tell, if any; they are no errors."""
    counted = [s for s in scored if s.result.has_valid_score]
    totals = {
        "cost": mean([s.cost for s in scored]),
        "tokens": mean([float(s.rollout.usage.sampled_tokens) for s in scored]),
        "errors": sum(is_faulty(s) or (s.rollout.unanswered and not s.result.has_valid_score) for s in scored),
    }
    invalid = sum(not s.result.has_valid_score and not s.rollout.unanswered and not is_faulty(s) for s in scored)
    totals |= {"invalid": invalid} if invalid else {}
    too_long = sum(s.rollout.stop_reason is StopReason.PROMPT_TOO_LONG for s in scored)
    totals |= {StopReason.PROMPT_TOO_LONG.value: too_long} if too_long else {}
    by_name = reported_metrics(counted)
    reported = {_name_in_validation(name): mean(by_name[name]) for name in _most_common(by_name)}
    score = {"score": mean([s.score for s in counted])} if counted else {}
    return {"n": len(scored)} | score | reported | totals


def _name_in_validation(metric: str) -> str:
    """The name of a reward's metric in a validation: `reward/cost` if the validation itself has a `cost`."""
    is_own = metric in _VALIDATION_FIGURES or metric.startswith(_VALIDATION_PARTS)
    return f"reward/{metric}" if is_own else metric


def reported_metrics(counted: Sequence[ScoredRollout]) -> dict[str, list[float]]:
    """The values of each metric that the reward reported."""
    values: dict[str, list[float]] = defaultdict(list)
    for s in counted:
        for name, metric in s.result.metrics.items():
            if metric.is_score_valid:
                values[name].append(metric.score)
    return dict(sorted(values.items()))


def budget_unit(names: Iterable[str]) -> str | None:
    """The unit of a router's first budget, from the names of its metrics; None if it has none."""
    found = (re.fullmatch(r"router/([^/@]+)/budget", name) for name in names)
    return next((match[1] for match in found if match), None)


def _most_common(by_name: Mapping[str, Sequence[object]], limit: int = MAX_METRICS) -> list[str]:
    """The names with the most values, sorted. Limited because a reward may report different metrics per rollout."""
    return sorted(sorted(by_name, key=lambda name: (-len(by_name[name]), name))[:limit])


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def std(values: Sequence[float]) -> float:
    center = mean(values)
    return math.sqrt(mean([(x - center) ** 2 for x in values]))


def count_faults(scored: Sequence[ScoredRollout]) -> dict[str, int]:
    """Faults by class, with the totals `rollouts` and `calls`."""
    counts: Counter[str] = Counter(
        {"rollouts": len(scored), "calls": 0, **dict.fromkeys(_FAULT_DESCRIPTIONS, 0), "reward": 0}
    )
    for s in scored:
        rollout = s.rollout
        if rollout.stop_reason in _FAULT_OF_STOP_REASON:
            counts[_FAULT_OF_STOP_REASON[rollout.stop_reason]] += 1
        counts["infrastructure"] += rollout.infrastructure_fault
        counts["reward"] += s.result.error is not None
        # Calls beyond a cap on the cost are failed ones that do not count as calls.
        counts["calls"] += max(sum(rollout.usage.calls.values()), sum(rollout.usage.failed_calls.values()))
        for kind, times in rollout.usage.failed_calls.items():
            counts["parse"] += times if kind == "bad_json" else 0
            counts["tool"] += times if kind not in _MODEL_ERROR_KINDS else 0
    return dict(counts)


def tool_faults(scored: Sequence[ScoredRollout]) -> dict[str, tuple[int, Counter[str]]]:
    """For each tool: how many of its calls were executed, and the kinds of fault in them. Turns that called several
    tools, of which some failed, are left out: steps have the kinds of failure, not whose they are."""
    found: dict[str, tuple[int, Counter[str]]] = {}
    for info in (step.step_info for s in scored for step in s.rollout.steps):
        calls, failed = info.get("calls") or {}, Counter(info.get("failed_calls") or {})
        failed.pop(OVER_BUDGET, None)  # not among `calls`
        refused = sum(failed.pop(kind, 0) for kind in _MODEL_ERROR_KINDS)
        if len(calls) > 1 and (refused or failed.total() not in (0, sum(calls.values()))):
            continue
        for tool, times in calls.items():
            executed, kinds = found.get(tool, (0, Counter()))
            found[tool] = executed + times - refused, kinds + failed
    return found


def fault_metrics(scored: Sequence[ScoredRollout]) -> Metrics:
    """`faults/policy`, …: number of the step's rollouts, or calls, with that fault; `faults/rollouts`: with any;
    `faults/tool/NAME`: share of the tool's calls that raised or timed out, if any did."""
    counts = count_faults(scored)
    by_class = {f"faults/{name}": float(counts[name]) for name in (*_FAULT_DESCRIPTIONS, "reward")}
    by_name = tool_faults(scored).items()
    shares = {name: kinds.total() / calls for name, (calls, kinds) in by_name if kinds and calls}
    by_tool = {f"faults/tool/{name}": shares[name] for name in sorted(shares)[:MAX_METRICS]}
    return {"faults/rollouts": float(sum(map(is_faulty, scored))), **by_class, **by_tool}


def is_faulty(scored: ScoredRollout) -> bool:
    """Whether a fault ended the rollout or kept it from being scored."""
    rollout = scored.rollout
    return (
        rollout.stop_reason in _FAULT_OF_STOP_REASON or rollout.infrastructure_fault or scored.result.error is not None
    )


PARSER_FAULT = "rollout.tool_parser:"
"""How the message of a fault in a user's parser begins: a policy fault, but not of the policy's own code."""


@dataclass(slots=True)
class FaultRates:
    """The faults of a run so far; saved in checkpoints."""

    totals: dict[str, int] = field(default_factory=dict)
    recent: list[dict[str, int]] = field(default_factory=list)
    """Counts of the latest steps, enough to fill the window."""
    examples: dict[str, str] = field(default_factory=dict)
    """The latest fault of each class."""

    def add(self, scored: Sequence[ScoredRollout], window: int) -> None:
        counts = count_faults(scored)
        self.totals = {name: self.totals.get(name, 0) + count for name, count in counts.items()}
        self.recent.append(counts)
        while len(self.recent) > 1 and all(
            sum(step[unit] for step in self.recent[1:]) >= window for unit in ("rollouts", "calls")
        ):
            self.recent.pop(0)
        for rollout in (s.rollout for s in scored):
            kind = _FAULT_OF_STOP_REASON.get(rollout.stop_reason, "infrastructure")
            if kind != "infrastructure" or rollout.infrastructure_fault:
                message = " ".join((rollout.fault or rollout.stop_reason.value).split())
                self.examples[kind] = f"{rollout.rollout_id}: {message[:300]}"
        for tool, (_, kinds) in tool_faults(scored).items():
            if kinds:
                self.examples["tool"] = f"of {tool}: {kinds.most_common(1)[0][0]}"

    def describe_exceeded(self, bounds: FaultsConfig, *, ended: bool = False) -> str | None:
        """One line about the first fault class above its limit. With fewer than `window` rollouts (or calls) a class
        is judged only at the end of the run."""
        for name, description in _FAULT_DESCRIPTIONS.items():
            unit, bound = "calls" if name in CALL_FAULTS else "rollouts", getattr(bounds, name)
            faults, total = self._recent_counts(name, unit, bounds.window)
            if total and faults > bound * total and (total >= bounds.window or ended):
                last = f"; the last one, {self.examples[name]}" if name in self.examples else ""
                if PARSER_FAULT in last:
                    description = "the parser given as rollout.tool_parser failed"
                return (
                    f"{description} in {faults} of the latest {total} {unit}, more than faults.{name} = {bound:g} "
                    f"allows{last}"
                )
        return None

    def _recent_counts(self, name: str, unit: str, window: int) -> tuple[int, int]:
        faults = total = 0
        for step in reversed(self.recent):
            faults, total = faults + step[name], total + step[unit]
            if total >= window:
                break
        return faults, total

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.totals, self.recent = dict(state.get("totals", {})), list(state.get("recent", []))
        self.examples = dict(state.get("examples", {}))


def describe_totals(totals: Mapping[str, int]) -> str:
    """Such as `policy 16 of 128, tool 3 of 40`; empty if nothing failed."""
    return ", ".join(
        f"{name} {totals[name]} of {totals['calls' if name in CALL_FAULTS else 'rollouts']}"
        for name in (*_FAULT_DESCRIPTIONS, "reward")
        if totals.get(name)
    )


def peak_rss_mb() -> float:
    """The most memory that this process has used."""
    unit = 1024 if sys.platform != "darwin" else 1024 * 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit, 1)
