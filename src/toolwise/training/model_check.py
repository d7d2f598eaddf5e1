"""Checks that a model can be used as configured, without its weights. `train` runs them before it reads its data, and
`toolwise check model` prints them.

Sizes come from config.json, and the engine path from a small random copy of the model (`models/skeleton.py`).
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolwise.concurrency.threads import configure_threads
from toolwise.config.rollout import GrammarConfig
from toolwise.config.schema import RunConfig
from toolwise.config.sft import SftConfig
from toolwise.errors import ConfigError
from toolwise.rollout.call_format import CallFormat, ParserSpec
from toolwise.rollout.chat_tokenizer import ChatTokenizer
from toolwise.tools.base import BaseTool
from toolwise.training.chat_check import chat_findings, check_tool_prompt, open_chat
from toolwise.types.findings import Finding

if TYPE_CHECKING:
    from toolwise.policies.local import LocalPolicy

log = logging.getLogger("toolwise.training")

FP32 = 4
_PROBED: dict[tuple[Any, ...], tuple[str, str, str | None]] = {}
ABOUT_TOOLS = ("parser", "tools", "tool names", "round trip", "turns")
"""Findings that do not matter to a run without tools."""


def check_model(
    chat: ChatTokenizer, form: CallFormat, config: RunConfig, tools: Mapping[str, BaseTool]
) -> list[Finding]:
    """All findings about the model of a run; one with the verdict "wrong" prevents it. `chat_check.open_chat` gives the
    chat and the format of its calls."""
    found = chat_findings(chat, config, form, tools)
    configure_threads(config)  # before torch is imported
    from toolwise.models.loader import resolve_dtype
    from toolwise.models.skeleton import load_skeleton

    model, device = config.model, _device(config)
    skeleton = load_skeleton(
        model.path,
        dtype=resolve_dtype(model.dtype, device),
        trust_remote_code=model.trust_remote_code,
        revision=model.revision,
        base=model.base,
    )
    sizes = _sizes(skeleton, chat, device, config.rollout.max_new_tokens)
    own = [*_forward(skeleton, config, device), _memory(skeleton, config, device)]
    _check_lora(skeleton, config)  # last: it changes the skeleton
    return [sizes, *found, *own]


def require_model(config: RunConfig, tools: Mapping[str, BaseTool], parser: ParserSpec | None = None) -> None:
    """Raise if the model cannot be used with these settings and tools; log warnings."""
    chat, form = open_chat(config, parser)
    uses_tools = config.multi_turn.enable and bool(tools)
    if uses_tools:
        check_tool_prompt(config, chat)
    findings = check_model(chat, form, config, tools if uses_tools else {})
    report([finding for finding in findings if uses_tools or finding.name not in ABOUT_TOOLS])


def check_weights(policy: LocalPolicy) -> None:
    """Raise if the loaded weights do not fit the tokenizer."""
    report([_sizes(policy.model, policy.chat, str(policy.model.device))])


def report(findings: Sequence[Finding]) -> None:
    for finding in findings:
        if finding.verdict == "wrong":
            raise ConfigError(f"the model cannot be used: {finding.name}: {finding.says}: {finding.cure}")
        if finding.verdict == "warning":
            log.warning("%s: %s: %s", finding.name, finding.says, finding.cure)


def _device(config: RunConfig) -> str:
    import torch

    from toolwise.models.loader import resolve_device

    device = resolve_device(config.model.device)
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f'model.device is "{device}", but PyTorch finds no GPU: use "auto" or "cpu"')
    check_dtype(config, device)
    return device


def check_dtype(config: RunConfig | SftConfig, device: str) -> None:
    if device.startswith("cpu") and config.model.dtype == "bfloat16":
        raise ConfigError("model.dtype is bfloat16 on a CPU: many do not support it and some crash; use float32")


def _check_lora(skeleton: Any, config: RunConfig) -> None:
    """Raise what the run would when it inserts the adapters."""
    if not config.actor.lora.rank:
        return
    import torch

    from toolwise.learner.lora import Adapters

    with torch.device("meta"):
        Adapters(skeleton, config.actor.lora)


def _sizes(model: Any, chat: ChatTokenizer, device: str, new_tokens: int = 0) -> Finding:
    from toolwise.models.decoder_layers import max_context

    embedded = model.get_input_embeddings().weight.shape[0]
    count = sum(parameter.numel() for parameter in model.parameters())
    context = max_context(model.config.get_text_config())
    figures = {"parameters": count, "vocabulary": embedded, "context": context}
    if len(chat.tokenizer) > embedded:
        return Finding(
            "model",
            "wrong",
            f"the tokenizer has {len(chat.tokenizer):,} tokens, the model's embeddings only {embedded:,}",
            figures,
            cure="use the tokenizer the model was trained with, or resize its embeddings and save it",
        )
    if new_tokens >= context:
        says = f"rollout.max_new_tokens is {new_tokens:,}, the model's context {context:,} tokens: no prompt fits"
        cure = f"set rollout.max_new_tokens well below {context:,}, or use a model with a longer context"
        return Finding("model", "wrong", says, figures, cure=cure)
    says = (
        f"{type(model).__name__}, {count / 1e6:,.1f} million weights in {_dtype(model)} on {device}; context "
        f"{context:,} tokens, vocabulary {embedded:,}"
    )
    return Finding("model", "ok", says, figures)


def _forward(skeleton: Any, config: RunConfig, device: str) -> list[Finding]:
    """The engine path that a small copy of the model takes, and whether the learner computes its logits."""
    own = config.rollout.engine == "toolwise"
    try:
        path, reason, difference = _probe(skeleton, device)
    except Exception as fault:  # model code that expects other sizes
        line = (str(fault).splitlines() or [""])[0]
        says = f"not known before the weights are loaded: a small copy fails ({type(fault).__name__}: {line:.200})"
        return [Finding("engine" if own else "learner", "skipped", says)]
    if not own:
        path, reason = config.rollout.engine, ""
    return [_engine(config, path, reason), *_learner(skeleton, difference if config.router.train_actor else None)]


def _probe(skeleton: Any, device: str) -> tuple[str, str, str | None]:
    """The engine path of a small copy and why, and how its logits differ from those of its head. They depend on the
    class, its configuration and where it runs, so that another run in this process need not look again."""
    from toolwise.engine import engine_path
    from toolwise.models.attention_layers import head_problem
    from toolwise.models.skeleton import small_copy

    key = type(skeleton), skeleton.config.to_json_string(use_diff=False), skeleton.dtype, device
    if key not in _PROBED:
        small = small_copy(skeleton, device)
        path, reason = engine_path(small)
        exact = copy.deepcopy(small).float()  # a soft cap may be less than the rounding of bfloat16
        _PROBED[key] = path, reason, head_problem(exact)
    return _PROBED[key]


def _engine(config: RunConfig, path: str, reason: str) -> Finding:
    if config.rollout.engine != "toolwise":
        return Finding("engine", "ok", f'rollout.engine = "{path}"', {"path": path})
    says = f"{path}: {reason}" if reason else path
    if path == "transformers" and config.rollout.grammar != GrammarConfig():
        cure = "remove rollout.grammar, or use another model"
        return Finding("engine", "wrong", f"rollout.grammar needs our engine, but {says}", {"path": path}, cure=cure)
    return Finding("engine", "ok", says, {"path": path})


def _learner(skeleton: Any, difference: str | None) -> list[Finding]:
    if difference is None:
        return []
    says = f"the logits of {type(skeleton).__name__} are not those of its head as the learner computes it"
    return [Finding("learner", "wrong", f"{says} ({difference})", cure="train another model")]


def _memory(skeleton: Any, config: RunConfig, device: str) -> Finding:
    """Computed from sizes; `train --dry-run` also measures what activations need."""
    parts, available = memory_parts(skeleton, config, device), device_bytes(device)
    cache = config.rollout.cache_mb
    tokens = config.data.batch_size * config.rollout.n * config.rollout.max_new_tokens
    shown = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in parts.items())
    generation = f"{kv_bytes_per_token(skeleton) / 1e3:.1f} kB of cache per token"
    limit = f"rollout.cache_mb = {cache}" if cache else "rollout.cache_mb unset"
    says = (
        f"training {shown} and activations, of {available / 1e9:.2f} GB on {device}; generation {generation}, "
        f"{tokens:,} new tokens per step, {limit}"
    )
    needed = sum(parts.values()) + (cache or 0) * 1_000_000
    if needed > available:
        cure = (
            'use a smaller model, actor.lora.rank, actor.optimizer_state = "bf16", a larger device; on a GPU also '
            'model.dtype = "bfloat16" or actor.optimizer_state = "cpu"'
        )
        return Finding("memory", "wrong", f"{needed / 1e9:.2f} GB do not fit: {says}", parts, cure=cure)
    return Finding("memory", "ok", says, parts)


def device_bytes(device: Any) -> int:
    """Total memory of a GPU, or of this machine for a CPU."""
    import torch

    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory_parts(model: Any, config: RunConfig, device: str = "cpu") -> dict[str, int]:
    """Bytes of what training holds on the device besides activations: by the weights' sizes and what is trained."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    count = sum(p.numel() for p in model.parameters())
    lora, merged = config.actor.lora, {}
    if lora.rank:
        from toolwise.learner.lora import find_layers

        adapted = [layer.weight for layer in find_layers(model, lora.target_modules).values()]
        count = sum(lora.rank * sum(weight.shape) for weight in adapted)
        weights += FP32 * count
        merged = {"merged weights": sum(weight.numel() * weight.element_size() for weight in adapted)}
    state = config.actor.optimizer_state
    trained = {"gradients": FP32 * count, "optimizer states": (2 if state == "bf16" else FP32) * 2 * count}
    masters = {} if _dtype(model) == "float32" or lora.rank else {"fp32 master weights": FP32 * count}
    if state == "cpu" and device.startswith("cuda"):
        trained.pop("optimizer states")
        masters = {}
    return {"weights": weights} | merged | trained | masters


def kv_bytes_per_token(model: Any) -> int:
    """Of models with the usual keys and values; 0 for others."""
    config = model.config.get_text_config()
    heads = int(getattr(config, "num_attention_heads", 0) or 0)
    if not heads:
        return 0
    key_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    size = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return 2 * int(config.num_hidden_layers) * key_heads * size * int(model.dtype.itemsize)


def _dtype(model: Any) -> str:
    return str(model.dtype).removeprefix("torch.")
