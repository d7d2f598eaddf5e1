"""The model card: base model, data, training settings and results. Names files without their folders."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from toolwise import __version__
from toolwise.config.schema import RunConfig
from toolwise.rollout.tool_prompt import ToolPrompt
from toolwise.training.checkpoint import Checkpoint
from toolwise.training.trackers.jsonl import read_metrics

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")

TOOL_TEXT = "tool_prompt.txt"
"""In an export whose chat template ignores tools: the text that described them in training prompts."""

_USAGE_SNIPPET = """\
```python
{imports}from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # where this file is
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
{messages}
prompt = tokenizer.apply_chat_template(
    messages,{tools} add_generation_prompt=True, return_tensors="pt", return_dict=True
)
reply = model.generate(**prompt, max_new_tokens=256)
print(tokenizer.decode(reply[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
```"""
_IMPORTS = {"json": "import json\nfrom pathlib import Path\n\n", "text": "from pathlib import Path\n\n", "": ""}
_QUESTION = 'messages = [{"role": "user", "content": "What is 3 + 4?"}]'
_LOAD_SCHEMAS = 'tools = json.loads(Path(folder, "tools.json").read_text(encoding="utf-8"))["tools"]'
_LOAD_TEXT = f'tools = Path(folder, "{TOOL_TEXT}").read_text(encoding="utf-8")'
_MESSAGES_WITH_SYSTEM = """\
messages = [
    {"role": "system", "content": tools},  # append to your own system message after an empty line, if you have one
    {"role": "user", "content": "What is 3 + 4?"},
]"""
_MESSAGES_WITH_USER = 'messages = [{"role": "user", "content": tools + "\\n\\nWhat is 3 + 4?"}]  # the first one only'


def model_card(
    config: RunConfig,
    source: Checkpoint,
    run: Path,
    *,
    dtype: str,
    saved_in: str,
    tool_prompt: ToolPrompt | None = None,
) -> str:
    """README.md of an exported model; `tool_prompt` is how prompts describe its tools, None for a model without any."""
    version = source.facts.get("toolwise", __version__)
    table = {**_training(config, source), "weights": _weights(dtype, saved_in), "made with": f"toolwise {version}"}
    return "\n".join(
        [
            *_front_matter(config),
            f"# {_one_line(config.name)}",
            "",
            f"A language model, trained with Toolwise {version} by reinforcement learning to use tools.",
            "",
            "## How it was trained",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in table.items() if value),
            "",
            "## Results",
            "",
            *_metrics_table(run, source.step),
            "",
            "## How to use it",
            "",
            *_usage(tool_prompt),
            "",
            "## Licence",
            "",
            "Not stated yet. Before you publish the model, state its licence here and in the metadata at the top of "
            "this file, within what the licences of the base model and of the data allow.",
            "",
        ]
    )


def _front_matter(config: RunConfig) -> Iterator[str]:
    yield "---"
    yield "library_name: transformers"
    yield "pipeline_tag: text-generation"
    if _HUB_NAME.fullmatch(config.model.path):
        yield f"base_model: {json.dumps(config.model.path)}"
    yield from ("tags:", "- toolwise", "- reinforcement-learning", "- tool-use")
    yield "# license: to be set by the publisher of this model"
    yield "---"
    yield ""


def _training(config: RunConfig, source: Checkpoint) -> dict[str, str]:
    turns = f", up to {config.multi_turn.max_turns} turns" if config.multi_turn.enable else ", one turn"
    return {
        "base model": _base(config.model.path),
        "training data": _file(config.data.train),
        "held-out data": _file(config.data.val) if config.data.val else "",
        "tools": ", ".join(_tool(tool) for tool in config.tools),
        "environment": _code(config.env.name) if config.env.name != "tools" else "",
        "reward": _reward(config),
        "advantage estimator": _code(config.algorithm.adv_estimator),
        "steps": f"{source.step} of {config.data.batch_size} tasks × {config.rollout.n} rollouts{turns}",
        "learning rate": f"{config.actor.lr:g}",
        "LoRA": _lora(config),
        "seed": str(config.seed),
    }


def _lora(config: RunConfig) -> str:
    lora = config.actor.lora
    return f"adapters of rank {lora.rank} (alpha {lora.alpha:g}), merged into the weights" if lora.rank else ""


def _usage(tool_prompt: ToolPrompt | None) -> Iterator[str]:
    """A snippet that prompts the model as in training."""
    if tool_prompt is None or tool_prompt.where == "nowhere":
        yield _USAGE_SNIPPET.format(imports=_IMPORTS[""], messages=_QUESTION, tools="")
        return
    description = tool_prompt.describe()
    yield (
        "The model was trained with tools and answers badly without them: `tools.json` has their schemas. "
        f"{description[0].upper()}{description[1:]}. It writes calls as text; your program runs them and "
        "adds the results."
    )
    yield ""
    if tool_prompt.where == "template":
        yield _USAGE_SNIPPET.format(
            imports=_IMPORTS["json"], messages=f"{_LOAD_SCHEMAS}\n{_QUESTION}", tools=" tools=tools,"
        )
    else:
        messages = f"{_LOAD_TEXT}\n{_MESSAGES_WITH_SYSTEM if tool_prompt.where == 'system' else _MESSAGES_WITH_USER}"
        yield _USAGE_SNIPPET.format(imports=_IMPORTS["text"], messages=messages, tools="")


def _base(path: str) -> str:
    public = path.startswith("builtin:") or _HUB_NAME.fullmatch(path)
    return _code(path if public else Path(path).name)


def _file(path: Path | None) -> str:
    return _code(path.name) if path is not None else "given in Python"


def _reward(config: RunConfig) -> str:
    reward = config.reward
    if reward.parts:
        note = "" if reward.combine == "sum" else ", each normalised in its group"
        return " + ".join(f"{part.weight:g} × {_reference(part.function)}" for part in reward.parts) + note
    return _reference(reward.function) if reward.function else "given in Python"


def _tool(tool: str | dict[str, Any]) -> str:
    return _reference(tool if isinstance(tool, str) else str(tool.get("name", "a tool")))


def _reference(reference: str) -> str:
    """`/home/me/judge.py:judge` without its folder."""
    return _code(reference.rpartition("/")[2])


def _weights(dtype: str, saved_in: str) -> str:
    return dtype if dtype == saved_in else f"{dtype}, converted from {saved_in}"


def _metrics_table(run: Path, step: int) -> Iterator[str]:
    """The validation before training and the last one up to the checkpoint's step."""
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line.get("step", step + 1) <= step]
    validations = [line for line in lines if any(name.startswith("eval/") for name in line)]
    empty: dict[str, Any] = {}
    before = next((line for line in validations if line["step"] == 0), empty)
    after = next((line for line in reversed(validations) if line["step"] > 0), empty)
    names = _headline_metrics([name for name in dict.fromkeys([*before, *after]) if name.startswith("eval/")])
    if not names:
        yield "The run was not validated on held-out tasks."
        return
    after_step = f"after step {after['step']}" if after else "after"
    yield f"On held-out tasks, one rollout each{'' if before and after else ', as far as it was validated'}:"
    yield ""
    yield f"| | before | {after_step} |"
    yield "|---|---:|---:|"
    for name in names:
        values = f"{_format_metric(before.get(name))} | {_format_metric(after.get(name))}"
        yield f"| {_one_line(name.removeprefix('eval/'))} | {values} |"


def _headline_metrics(names: Sequence[str]) -> list[str]:
    """All overall metrics, and the main one for each kind of task."""
    overall = [name for name in names if name.count("/") == 1]
    suffix = "/correct" if "eval/correct" in overall else "/score"
    return [*overall, *(name for name in names if name not in overall and name.endswith(suffix))]


def _format_metric(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "–"


def _code(text: str) -> str:
    return f"`{_one_line(text).replace('`', '')}`"


def _one_line(text: str) -> str:
    """On one line, with nothing that starts a new table column."""
    return " ".join(text.split()).replace("|", "¦")
