"""Report of `scripts/thinking_compare.py`: tables for docs/results.md (on stdout), the numbers as JSON, and the curves.

python scripts/thinking_report.py --records runs/thinking.jsonl --picture docs/images/thinking.png --json figures.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from thinking_compare import Evaluation, Record, best_rates, mean_worth, read_records
from thinking_plan import (
    ARMS,
    COMPARISONS,
    EVALUATED,
    FIRST,
    HOUSES,
    LIMIT,
    RATES,
    ROLLOUTS,
    TASKS,
    TUNING_SEEDS,
    Comparison,
)

from toolwise.frontier.reference_curves import Estimate, estimate

KEEPS, FEWER = 0.02, 0.4
"""How much of GRPO's success the best form may lose, and the share of its thinking tokens that it must save."""
REPLICATES = 4000
SMOOTHED = 5
"""Window of the moving average of curves, in steps."""


class Arm:
    """The paired runs of one arm: [seeds, houses]."""

    def __init__(self, found: Sequence[Evaluation]) -> None:
        self.success = np.array([[float(c) for c in e.success] for e in found])
        self.tokens = np.array([e.thinking_tokens for e in found], dtype=float)
        self.steps = np.array([e.steps for e in found], dtype=float)
        self.levels = {kind: np.array([e.levels[kind] for e in found], dtype=float) for kind in ("easy", "hard")}
        self.right = {kind: np.array([e.right[kind] for e in found], dtype=float) for kind in ("easy", "hard")}
        self.valid = mean(e.format_valid for e in found)

    def shares(self, kind: str) -> list[float]:
        """Share of each level on steps of this kind, averaged over seeds."""
        counts = self.levels[kind]
        return [float(x) for x in (counts / counts.sum(1, keepdims=True).clip(1)).mean(0)]


class Draws:
    """Bootstrap resamples of seeds and, within them, houses: the same for all arms, so that differences are paired."""

    def __init__(self, seeds: int, houses: int, replicates: int = REPLICATES) -> None:
        random = np.random.default_rng(0)
        self.seeds = np.concatenate([np.arange(seeds)[None], random.integers(0, seeds, (replicates, seeds))])
        drawn = random.multinomial(houses, np.full(houses, 1 / houses), size=replicates)
        self.houses = np.concatenate([np.ones((1, houses)), drawn])

    def means(self, values: Any, per: Any = None) -> Any:
        """[1 + replicates]: the mean over seeds of Σ values ÷ Σ per; the first is the sample itself."""
        top = self.houses @ values.T
        below = self.houses @ (np.ones_like(values) if per is None else per).T
        return np.take_along_axis(top / np.maximum(below, 1.0), self.seeds, axis=1).mean(1)

    def over_seeds(self, values: Any) -> Any:
        return values[self.seeds].mean(1)


def whole(records: dict[str, Record], comparison: Comparison) -> list[str]:
    """Arms with a run of every seed. The others are not compared; `section` names them."""
    arms = [arm for arm in comparison.arms if all(f"paired-{arm}-{seed}" in records for seed in comparison.seeds)]
    if missing := {"grpo", "price", comparison.control} - set(arms):
        raise SystemExit(f"paired runs of {', '.join(sorted(missing))} are missing; all arms are compared with them")
    return arms


def figures(records: dict[str, Record], comparison: Comparison = FIRST) -> dict[str, Any]:
    rates = best_rates(records)  # None if one rate was given for all arms
    arms = whole(records, comparison)
    paired = {arm: _paired(records, arm, comparison) for arm in arms}
    return {
        "seeds": comparison.seeds,
        "rates": {arm: runs[0].job.lr for arm, runs in paired.items()},
        "left_out": [arm for arm in comparison.arms if arm not in arms],
        "sweep": {arm: {f"{lr:g}": mean_worth(records, arm, lr) for lr in RATES} for arm in rates or ()},
        "learned": {arm: [learned(run) for run in runs] for arm, runs in paired.items()},
        "after": {str(after): figures_at(paired, comparison, after) for after in EVALUATED},
    }


def learned(run: Record) -> dict[str, float | None]:
    """The step at which nine of ten training rollouts first succeed (mean of five steps), and the tokens sampled until
    then, alternatives included."""
    lines = run.lines
    success = _smooth(np.array([line["success"] for line in lines]))
    step = next((i for i, share in enumerate(success) if i >= SMOOTHED - 1 and share >= 0.9), None)
    if step is None:
        return {"step": None, "tokens": None}
    until = lines[: step + 1]
    tokens = sum(line["tokens/sampled"] * (1.0 + line.get("thinking/added_tokens_ratio", 0.0)) for line in until)
    return {"step": step + 1, "tokens": tokens}


def figures_at(paired: dict[str, list[Record]], comparison: Comparison, after: int) -> dict[str, Any]:
    """The numbers of the evaluation after `after` steps."""
    arms = {name: Arm([r.at(after) for r in runs]) for name, runs in paired.items()}
    draws = Draws(*arms["grpo"].success.shape)
    success = {name: draws.means(arm.success) for name, arm in arms.items()}
    tokens = {name: draws.means(arm.tokens, arm.steps) for name, arm in arms.items()}
    forms = {name: (success[name][0], tokens[name][0]) for name in comparison.forms if name in arms}
    found: dict[str, Any] = {"arms": {}, "best": best_form(forms, tokens["grpo"][0]), "differences": {}}
    for name, arm in arms.items():
        deep = {kind: arm.levels[kind][:, 3] / arm.levels[kind].sum(1).clip(1) for kind in ("easy", "hard")}
        own = paired[name]
        found["arms"][name] = {
            "lr": own[0].job.lr,
            "success": _told(estimate(success[name])),
            "by_seed": [r.at(after).share for r in own],
            "tokens": _told(estimate(tokens[name])),
            "tokens_by_seed": [r.at(after).tokens for r in own],
            "easy": arm.shares("easy"),
            "hard": arm.shares("hard"),
            "deep_on_hard_less_easy": _told(estimate(draws.over_seeds(deep["hard"] - deep["easy"]))),
            "right_on_hard": float((arm.right["hard"].sum(1) / arm.levels["hard"].sum(1).clip(1)).mean()),
            "format_valid": arm.valid,
            "lambda": mean(r.lines[after - 1].get("thinking/lambda", 0.0) for r in own),
        }
    for name in arms:
        for other in ("grpo", "price", comparison.control):
            if name != other:
                found["differences"][f"{name} - {other}"] = {
                    "success": _told(estimate(success[name] - success[other])),
                    "tokens_saved": _told(estimate(1.0 - tokens[name] / np.maximum(tokens[other], 1e-9))),
                }
    return found | {"verdict": verdict(found, comparison.control)}


def _paired(records: dict[str, Record], arm: str, comparison: Comparison) -> list[Record]:
    return [records[f"paired-{arm}-{seed}"] for seed in comparison.seeds]


def best_form(forms: dict[str, tuple[float, float]], grpo_tokens: float) -> str:
    """The most successful RLVCR form among those that save enough tokens; if none does, among all."""
    saving = {name: s for name, (s, tokens) in forms.items() if tokens <= (1 - FEWER) * grpo_tokens}
    return max(saving or forms, key=lambda name: forms[name][0])


def verdict(found: dict[str, Any], control: str) -> dict[str, bool]:
    best, between = found["best"], found["differences"]
    grpo, price, shuffled = (between[f"{best} - {other}"] for other in ("grpo", "price", control))
    return {
        "keeps GRPO's success within 2 points": grpo["success"]["value"] >= -KEEPS,
        "with 40 % fewer thinking tokens": grpo["tokens_saved"]["value"] >= FEWER,
        "beats GRPO + price": _beats(price),
        "beats the shuffled control": _beats(shuffled),
        "thinks deeper on hard steps": found["arms"][best]["deep_on_hard_less_easy"]["low"] > 0,
    }


def _beats(pair: dict[str, dict[str, float]]) -> bool:
    """Whether it is better in success or in tokens, beyond the interval, and not worse in the other."""
    success, saved = pair["success"], pair["tokens_saved"]
    more = success["low"] > 0 and saved["value"] >= -KEEPS
    return bool(more or (saved["low"] > 0 and success["value"] >= -KEEPS))


def _told(found: Estimate) -> dict[str, float]:
    return {"value": found.value, "low": found.low, "high": found.high}


def section(found: dict[str, Any], comparison: Comparison = FIRST) -> str:
    """The tables as Markdown; every number is taken from `found`."""
    lines = [
        f"{len(comparison.seeds)} seeds × {HOUSES:,} held-out houses, temperature 1; 95 % intervals by bootstrap over "
        "seeds and, within them, houses."
    ]
    for after, at in found["after"].items():
        lines += [
            "",
            f"**After {after} steps** ({int(after) * TASKS * ROLLOUTS:,} rollouts):",
            "",
            *_tables(at, comparison),
        ]
    lines += ["", *_learned_table(found["learned"])]
    if found["left_out"]:
        lines += ["", f"Some seeds are missing for: {', '.join(ARMS[name].title for name in found['left_out'])}."]
    if not found["sweep"]:
        return "\n".join(lines)
    lines += [
        "",
        f"Learning rates, mean worth on seeds {', '.join(map(str, TUNING_SEEDS))}:",
        "",
        "| arm | " + " | ".join(f"{lr:g}" for lr in RATES) + " |",
        "|---|" + "---|" * len(RATES),
    ]
    for name, worth in found["sweep"].items():
        lines.append(f"| {ARMS[name].title} | " + " | ".join(f"{worth[f'{lr:g}']:.3f}" for lr in RATES) + " |")
    return "\n".join(lines)


def _learned_table(found: dict[str, list[dict[str, float | None]]]) -> list[str]:
    lines = [
        "| nine of ten training rollouts succeed | from step, by seed | tokens sampled until then, by seed |",
        "|---|---|---|",
    ]
    for name, runs in found.items():
        steps = " ".join("never" if run["step"] is None else f"{run['step']:.0f}" for run in runs)
        tokens = " ".join("-" if run["tokens"] is None else f"{run['tokens'] / 1000:.0f}k" for run in runs)
        lines.append(f"| {ARMS[name].title} | {steps} | {tokens} |")
    return lines


def _tables(found: dict[str, Any], comparison: Comparison) -> list[str]:
    """Tables of one evaluation: the arms, paired differences, and the verdict."""
    lines = [
        "| arm | learning rate | success | by seed | thinking tokens per step | level 4: easy / hard "
        "| level 1: easy / hard | right on hard | λ |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, arm in found["arms"].items():
        by_seed = " ".join(f"{100 * x:.0f}" for x in arm["by_seed"])
        lines.append(
            f"| {ARMS[name].title} | {arm['lr']:g} | {_percent(arm['success'])} | {by_seed} "
            f"| {_number(arm['tokens'])} | {arm['easy'][3]:.0%} / {arm['hard'][3]:.0%} "
            f"| {arm['easy'][0]:.0%} / {arm['hard'][0]:.0%} | {arm['right_on_hard']:.0%} | {arm['lambda']:.3f} |"
        )
    lines += ["", "| paired differences | success | thinking tokens saved |", "|---|---|---|"]
    for name in sorted(found["arms"], key=lambda name: name not in comparison.forms):
        for other in ("grpo", "price", comparison.control) if name in comparison.forms else ("grpo",):
            if name == other:
                continue
            pair = found["differences"][f"{name} - {other}"]
            lines.append(
                f"| {ARMS[name].title} − {ARMS[other].title} | {_percent(pair['success'], sign='+')} "
                f"| {_percent(pair['tokens_saved'], sign='+')} |"
            )
    lines += ["", f"Best form: **{ARMS[found['best']].title}**."]
    return lines + [f"- {what}: **{'yes' if true else 'no'}**" for what, true in found["verdict"].items()]


def _percent(figure: dict[str, float], sign: str = "") -> str:
    value, low, high = (100 * figure[name] for name in ("value", "low", "high"))
    return f"{value:{sign}.1f} % [{low:{sign}.1f}, {high:{sign}.1f}]"


def _number(figure: dict[str, float]) -> str:
    return f"{figure['value']:.1f} [{figure['low']:.1f}, {figure['high']:.1f}]"


COLOURS = {
    "grpo": "#1f2933",
    "gigpo": "#7b8794",
    "price": "#b8622b",
    "document": "#8e5ea2",
    "signed": "#1f6f8b",
    "success": "#c0392b",
    "reweight": "#3f9d57",
    "w0": "#c9a227",
    "shuffled": "#d16a8a",
    "on": "#c0392b",
    "on_shuffled": "#d16a8a",
}


def draw(records: dict[str, Record], found: dict[str, Any], path: Path, comparison: Comparison = FIRST) -> None:
    """Success and thinking tokens of the training rollouts over steps, averaged over seeds; success against tokens."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    success, tokens, ends = figure.subplots(1, 3)
    for name in whole(records, comparison):
        arm = ARMS[name]
        runs = [run.lines for run in _paired(records, name, comparison)]
        for axis, key in ((success, "success"), (tokens, "thinking/tokens_per_step")):
            values = _smooth(np.mean([[line[key] for line in run] for run in runs], axis=0))
            axis.plot(np.arange(1, len(values) + 1), values, color=COLOURS[name], linewidth=1.7, label=arm.title)
        end = found["after"][str(EVALUATED[-1])]["arms"][name]
        ends.scatter(end["tokens_by_seed"], end["by_seed"], color=COLOURS[name], s=12, alpha=0.45)
        ends.scatter(end["tokens"]["value"], end["success"]["value"], color=COLOURS[name], s=70, label=arm.title)
    for axis in (tokens, ends):
        (axis.axhline if axis is tokens else axis.axvline)(LIMIT, color="#1f2933", linewidth=0.8, linestyle=":")
    success.set(xlabel="step", ylabel="success of the training rollouts", ylim=(0, 1.02), title="Success")
    tokens.set(xlabel="step", ylabel="thinking tokens per step", title="Thinking tokens; dotted: the budget")
    ends.set(xlabel="thinking tokens per step", ylabel="success", title="Held-out houses; small dots: seeds")
    lowest = min(share for arm in found["after"][str(EVALUATED[-1])]["arms"].values() for share in arm["by_seed"])
    ends.set_ylim(lowest - 0.1 * (1.01 - lowest), 1 + 0.1 * (1.01 - lowest))
    success.legend(frameon=False, fontsize=8, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _smooth(values: Any, width: int = SMOOTHED) -> Any:
    """Moving average over the last `width` steps: single steps are noisy."""
    return np.array([values[max(0, i - width + 1) : i + 1].mean() for i in range(len(values))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, required=True, help="records file of thinking_compare.py")
    parser.add_argument("--comparison", choices=list(COMPARISONS), default="first", help="arms and seeds")
    parser.add_argument("--picture", type=Path, help="file for the curves")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    args = parser.parse_args()
    records = read_records(args.records)
    comparison = COMPARISONS[args.comparison]
    found = figures(records, comparison)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2), encoding="utf-8")
    if args.picture is not None:
        draw(records, found, args.picture, comparison)
    print(section(found, comparison))


if __name__ == "__main__":
    main()
