"""The model card: base model, data, training settings and results. Names files without their folders."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from toolwise import __version__
from toolwise.config.data import TaskSources, source_paths
from toolwise.config.schema import RunConfig
from toolwise.rollout.tool_prompt import ToolPrompt
from toolwise.training.checkpoint import Checkpoint
from toolwise.training.trackers.jsonl import read_metrics

TEMPLATE = Path(__file__).with_name("card.md.jinja")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")

TOOL_TEXT = "tool_prompt.txt"
"""In an export whose chat template ignores tools: the text that described them in training prompts."""


def model_card(
    config: RunConfig,
    source: Checkpoint,
    run: Path,
    *,
    dtype: str,
    saved_in: str,
    tool_prompt: ToolPrompt | None = None,
    adapters: bool = False,
    routed: bool = False,
    code: bool = False,
) -> str:
    """README.md of an exported model, or of its `adapters`; `tool_prompt` is how prompts describe its tools, None for a
    model without any. `routed`: it has a router; `code`: it brings code."""
    from jinja2 import Environment, StrictUndefined

    version = source.facts.get("toolwise", __version__)
    tools_in = "" if tool_prompt is None or tool_prompt.where == "nowhere" else tool_prompt.where
    template = Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    ).from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        name=_one_line(config.name),
        base_model=json.dumps(config.model.path) if _HUB_NAME.fullmatch(config.model.path) else "",
        version=version,
        training={
            **_training(config, source, adapters),
            "weights": dtype if dtype == saved_in else f"{dtype}, converted from {saved_in}",
            "made with": f"toolwise {version}",
        },
        tools_in=tools_in,
        description=tool_prompt.describe() if tools_in and tool_prompt is not None else "",
        tool_text=TOOL_TEXT,
        routed=routed,
        code=code,
        own_agent=config.agent.enabled,
        adapters_of=json.dumps(public_name(config.model.path)) if adapters else "",
        **_results(run, source.step),
    )


def public_name(path: str) -> str:
    """The name of the base model: of a folder without the folders that it is in."""
    return path if path.startswith("builtin:") or _HUB_NAME.fullmatch(path) else Path(path).name


def _training(config: RunConfig, source: Checkpoint, adapters: bool) -> dict[str, str]:
    lora = config.actor.lora
    where = "to be added to the base model" if adapters else "merged into the weights"
    turns = f", up to {config.multi_turn.max_turns} turns" if config.multi_turn.enable else ", one turn"
    return {
        "base model": _code(public_name(config.model.path)),
        "training data": _files(config.data.train),
        "held-out data": _files(config.data.val) if config.data.val else "",
        "agent": _agent(config),
        "tools": ", ".join(
            _reference(tool if isinstance(tool, str) else str(tool.get("name", "a tool"))) for tool in config.tools
        ),
        "environment": _code(config.env.name) if config.env.name != "tools" else "",
        "reward": _reward(config),
        "advantage estimator": _reference(config.algorithm.adv_estimator),
        "policy loss": _reference(config.actor.policy_loss) if config.actor.policy_loss != "ppo" else "",
        "steps": f"{source.step} of {config.data.batch_size} tasks × {config.rollout.n} rollouts{turns}",
        "learning rate": f"{config.actor.lr:g}",
        "LoRA": f"adapters of rank {lora.rank} (alpha {lora.alpha:g}), {where}" if lora.rank else "",
        "seed": str(config.seed),
    }


def _files(sources: TaskSources | None) -> str:
    return ", ".join(_code(path.name) for path in source_paths(sources)) or "given in Python"


def _agent(config: RunConfig) -> str:
    return _reference(config.agent.run) if config.agent.run else "a command" if config.agent.command else ""


def _reward(config: RunConfig) -> str:
    reward = config.reward
    if reward.parts:
        note = "" if reward.combine == "sum" else ", each normalised in its group"
        return " + ".join(f"{part.weight:g} × {_reference(part.function)}" for part in reward.parts) + note
    return _reference(reward.function) if reward.function else "given in Python"


def _reference(reference: str) -> str:
    """`/home/me/judge.py:judge` without its folder."""
    return _code(reference.rpartition("/")[2])


def _results(run: Path, step: int) -> dict[str, Any]:
    """The validation before training and the last one up to the checkpoint's step."""
    validations = [
        line
        for line in read_metrics(run / "metrics.jsonl")
        if line.get("step", step + 1) <= step and any(name.startswith("eval/") for name in line)
    ]
    empty: dict[str, Any] = {}
    before = next((line for line in validations if line["step"] == 0), empty)
    after = next((line for line in reversed(validations) if line["step"] > 0), empty)
    names = [name for name in dict.fromkeys([*before, *after]) if name.startswith("eval/")]
    # All overall metrics, and the main one for each kind of task.
    overall = [name for name in names if name.count("/") == 1]
    suffix = "/correct" if "eval/correct" in overall else "/score"
    rows = [
        (_one_line(name.removeprefix("eval/")), _format_metric(before.get(name)), _format_metric(after.get(name)))
        for name in [*overall, *(name for name in names if name not in overall and name.endswith(suffix))]
    ]
    return {"before": before, "after": after, "results": rows}


def _format_metric(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "–"


def _code(text: str) -> str:
    return f"`{_one_line(text).replace('`', '')}`"


def _one_line(text: str) -> str:
    """On one line, with nothing that starts a new table column."""
    return " ".join(text.split()).replace("|", "¦")
