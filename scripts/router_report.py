"""Report of scripts/router_experiment.py: trained policies on the held-out pool, against random and oracle routes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ALLOWED = {"ANSWER": (), "SEARCH-FAMILY": ("search",), "CALCULATE-FAMILY": ("calculator",)}
"""Tools that a route allows, and so pays for."""
REPLICATES = 2000


def outcomes_of(out: Path, prices: dict[str, float]) -> Any:
    """The held-out pool at these prices."""
    from router_experiment import read_pool

    from toolwise.frontier.rollout_pool import OutcomeTable

    pool = read_pool(out, "heldout")
    rows = list(dict.fromkeys(task_id for task_id, _ in pool))
    scores = np.array([[[draw["score"] for draw in pool[row, route]] for route in ALLOWED] for row in rows], float)
    costs = np.array(
        [
            [
                [sum(prices[t] * draw["calls"].get(t, 0) for t in allowed) for draw in pool[row, route]]
                for route, allowed in ALLOWED.items()
            ]
            for row in rows
        ],
        float,
    )
    return OutcomeTable(tuple(rows), tuple(ALLOWED), scores, costs)


def in_order(out: Path, outcomes: Any) -> list[int]:
    """Row of each held-out task in the outcomes."""
    from toolwise.data import load_tasks

    place = {row: i for i, row in enumerate(outcomes.row_ids)}
    return [place[task.task_id] for task in load_tasks(out / "tasks" / "heldout.jsonl")]


def judged(job: Any, lines: list[dict[str, Any]], out: Path, weights: Any) -> dict[str, Any]:
    """Evaluate one run: the trained policy with sampled routes."""
    from toolwise.frontier.reference_curves import estimate, oracle_curve, random_curve

    outcomes = outcomes_of(out, job.prices)
    probs = np.empty((len(outcomes.row_ids), len(ALLOWED)))
    probs[in_order(out, outcomes)] = lines[-1]["probs"]
    scores, costs = outcomes.mean_over_draws("scores"), outcomes.mean_over_draws("costs")
    cost, score = weights @ (probs * costs).sum(axis=1), weights @ (probs * scores).sum(axis=1)
    low = random_curve(scores, costs, weights, free=0).score_at(cost)
    oracle = oracle_curve(scores, costs, weights)
    high = oracle.score_at(cost)
    tied = scores.max(axis=1) - scores.min(axis=1) < 0.1
    steps = [line["router/cost/mean"] for line in lines[:-1]]
    last = steps[-max(1, len(steps) // 4) :]
    return {
        "name": job.name,
        "budget": job.budget,
        "cost": float(cost[0]),
        "oracle needs": float(oracle.costs[0, -1]),
        "tied cost": float((probs * costs).sum(axis=1)[tied].mean()) if tied.any() else 0.0,
        "step cost": float(np.mean(last)),
        "step std": float(np.std(last)),
        "score": float(score[0]),
        "random": float(low[0]),
        "oracle": float(high[0]),
        "closed": vars_of(estimate((score - low) / (high - low))),
        "lambda": lines[-1]["lambda"],
        "shares": dict(zip(ALLOWED, probs.mean(axis=0).tolist(), strict=True)),
        "seconds": lines[-1]["seconds"],
        "probs": probs,
    }


def vars_of(found: Any) -> dict[str, float]:
    return {"value": found.value, "low": found.low, "high": found.high}


def classified(out: Path, config: Any, outcomes: Any) -> dict[str, Any]:
    """Log-probs of the baseline classifiers on the features that the head sees: labels, and oracle labels."""
    import torch

    from toolwise.data import load_tasks
    from toolwise.frontier.baselines import (
        CLASSIFIER,
        ORACLE_LABELS,
        classifier_log_probs,
        targets_by_labels,
        targets_by_oracle,
    )
    from toolwise.models import load_model
    from toolwise.routing.conditioning import Conditioning
    from toolwise.routing.families import MIXED, RouteAction
    from toolwise.routing.head.predictor import prompt_features
    from toolwise.tools.catalog import build_tools

    model, chat = load_model(config.model.path, device="cpu")
    tools = build_tools(list(config.tools))
    conditioning = Conditioning(tools=tools)
    tasks = {split: load_tasks(out / "tasks" / f"{split}.jsonl") for split in ("train", "heldout")}
    found = {}
    for split, given in tasks.items():
        with torch.no_grad():
            features = prompt_features(model, [conditioning.original_prompt(chat, task) for task in given])
        found[split] = features.double().numpy()
    targets_by = {
        CLASSIFIER: targets_by_labels(tasks["train"], tools),
        ORACLE_LABELS: targets_by_oracle(tasks["train"]),
    }
    # Also labels MIXED questions, which no single route serves: the best that labels can do.
    targets_by["oracle labels, MIXED answered"] = [
        RouteAction.ANSWER if target == MIXED else target for target in targets_by[ORACLE_LABELS]
    ]
    words = {}
    for name, targets in targets_by.items():
        words[name] = np.empty((len(outcomes.row_ids), len(ALLOWED)))
        words[name][in_order(out, outcomes)] = classifier_log_probs(found["train"], targets, found["heldout"])
    return words


def ahead_of_classifier(run: dict[str, Any], values: Any, outcomes: Any, weights: Any) -> dict[str, float]:
    """The run's score minus the classifier's, which is thresholded to the cost of the run."""
    from toolwise.frontier.reference_curves import estimate
    from toolwise.routing.threshold import find_threshold

    scores, costs = outcomes.mean_over_draws("scores"), outcomes.mean_over_draws("costs")
    means = np.broadcast_to(costs.mean(axis=0), costs.shape)
    threshold = find_threshold(values, means, costs, run["cost"], scores)
    theirs = (threshold.probabilities(values, means) * scores).sum(axis=1)
    return vars_of(estimate(weights @ ((run["probs"] * scores).sum(axis=1) - theirs)))


def by_budget(runs: Sequence[dict[str, Any]], baseline_routers: Sequence[str]) -> list[list[str]]:
    """The runs with a budget, one line per budget, as in docs/results.md."""
    head = ["B", "held-out cost, by seed", "within 10 %", "std of the cost per step, last quarter", "score"]
    head += ["random", "oracle", "gap closed", *(f"minus *{name}*" for name in baseline_routers)]
    rows = [head, ["---"] * len(head)]
    kept = [run for run in runs if run["name"].startswith("budget-")]
    for budget in sorted({run["budget"] for run in kept}):
        some = [run for run in kept if run["budget"] == budget]
        near = sum(abs(run["cost"] - budget) <= 0.1 * budget for run in some)
        aheads = [[run["ahead"][name] for run in some] for name in baseline_routers]
        rows.append(
            [
                f"{budget:g}",
                " ".join(f"{run['cost']:.3f}" for run in some),
                f"{near} of {len(some)}",
                _span([run["step std"] for run in some]),
                *(f"{np.mean([run[what] for run in some]):.3f}" for what in ("score", "random", "oracle")),
                _span([run["closed"]["value"] for run in some], ".1%"),
                *(
                    f"{_span([a['value'] for a in each], '+.3f')}, "
                    f"{sum(a['low'] > 0 for a in each)} above 0, {sum(a['high'] < 0 for a in each)} below"
                    for each in aheads
                ),
            ]
        )
    return rows


def _span(values: Sequence[float], form: str = ".3f") -> str:
    return f"{min(values):{form}} to {max(values):{form}}"


def _ahead(found: dict[str, float] | None) -> str:
    return f"{found['value']:+.3f} ({found['low']:+.3f} to {found['high']:+.3f})" if found else ""


def report(out: Path, jobs: Sequence[Any], config: Any) -> None:
    """Write OUT/report.md and OUT/report.json."""
    from toolwise.frontier.reference_curves import row_weights

    plain = outcomes_of(out, {"calculator": 1.0, "search": 1.0})
    weights = row_weights(len(plain.row_ids), REPLICATES, 0)
    words = classified(out, config, plain)
    runs = []
    for job in jobs:
        path = out / "runs" / f"{job.name}.jsonl"
        if path.exists():
            lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            runs.append(judged(job, lines, out, weights))
            if job.prices["search"] == 1.0:
                runs[-1]["ahead"] = {
                    name: ahead_of_classifier(runs[-1], values, plain, weights) for name, values in words.items()
                }
    head = [
        "run",
        "B",
        "cost",
        "step std",
        "λ",
        "score",
        "random",
        "oracle",
        "gap closed",
        *(f"− {name}" for name in words),
        "cost where only cost differs",
        "A / S / C",
    ]
    rows = [head, ["---"] * len(head)]
    for run in runs:
        closed, ahead = run["closed"], run.get("ahead", {})
        rows.append(
            [
                run["name"],
                f"{run['budget']:g}",
                f"{run['cost']:.3f}",
                f"{run['step std']:.3f}",
                f"{run['lambda'][0]:.2f}",
                f"{run['score']:.3f}",
                f"{run['random']:.3f}",
                f"{run['oracle']:.3f}",
                f"{closed['value']:.0%} ({closed['low']:.0%} to {closed['high']:.0%})",
                *(_ahead(ahead.get(name)) for name in words),
                f"{run['tied cost']:.3f}",
                " / ".join(f"{share:.2f}" for share in run["shares"].values()),
            ]
        )
        del run["probs"]
    tables = (by_budget(runs, list(words)), rows)
    text = "\n\n".join("\n".join(f"| {' | '.join(row)} |" for row in table) for table in tables)
    told = {name: weights[0] @ plain.mean_over_draws("scores")[:, i] for i, name in enumerate(ALLOWED)}
    paid = {name: weights[0] @ plain.mean_over_draws("costs")[:, i] for i, name in enumerate(ALLOWED)}
    always = "; ".join(f"always {name}: {told[name]:.3f} at {paid[name]:.3f}" for name in ALLOWED)
    (out / "report.md").write_text(f"{len(plain.row_ids)} held-out tasks. {always}\n\n{text}\n", encoding="utf-8")
    (out / "report.json").write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    print(f"{always}\n{text}", flush=True)
