"""Benchmark shared prefixes: forward and backward of one update, against packed rows computed in full.

`python benchmarks/update.py` runs the model that ships on the CPU; on a GPU use `--device cuda --dtype bfloat16 --shape
135m --groups 64 --prompt 1024 --response 256`. Needs torch, transformers and numpy, and `src` on the path.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shapes import SHAPES

import toolwise
from toolwise.learner import forward
from toolwise.learner.forward import hidden_states, prefers_node_layout, token_logprobs
from toolwise.learner.fused_modules import fuse
from toolwise.learner.packing import Packed, micro_batches

MODELS = {name: SHAPES[name] for name in ("135m", "1.6b")}
FORMS = {"stock": False, "flat": False, "shared": True}
"""Form -> whether prompts are shared. "stock" is flat with transformers' own norms and activations, also on a GPU."""

COMPARED = ("flat", "shared")
"""Forms whose gradients are compared."""


@dataclass(frozen=True)
class Row:
    ids: list[int]
    sampled: list[bool]
    old: list[float]
    advantage: float


def build_model(shape: str, device: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    if shape == "small":
        folder = Path(toolwise.__file__).parent / "models" / "small"
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False).to(device).eval()
    torch.manual_seed(0)
    config = LlamaConfig(**MODELS[shape], max_position_embeddings=8192)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def make_rows(options: argparse.Namespace, vocabulary: int) -> list[Row]:
    rng = random.Random(options.seed)
    rows = []
    system = [rng.randrange(vocabulary) for _ in range(options.system)]
    for _ in range(options.groups):
        prompt = system + [rng.randrange(vocabulary) for _ in range(options.prompt - options.system)]
        for _ in range(options.group_size):
            count = rng.randint(options.response // 2, options.response) if options.vary else options.response
            response = [rng.randrange(2 if at < options.alike else vocabulary) for at in range(count)]
            sampled = [False] * len(prompt) + [True] * count
            old = [-rng.random() * 8 for _ in sampled]
            rows.append(Row(prompt + response, sampled, old, rng.uniform(-1, 1)))
    return rows


@dataclass(frozen=True)
class Known:
    """What the loss needs of each row, as in a learner's batch."""

    old: torch.Tensor
    """[rows, longest]"""
    advantages: torch.Tensor

    @classmethod
    def of(cls, rows: list[Row], device: str) -> Known:
        old = torch.zeros(len(rows), max(len(row.ids) for row in rows))
        for place, row in enumerate(rows):
            old[place, : len(row.old)] = torch.tensor(row.old)
        return cls(old.to(device), torch.tensor([row.advantage for row in rows], device=device))


def clipped_loss(known: Known, packed: Packed, logprobs: torch.Tensor, count: int) -> torch.Tensor:
    old, advantages = known.old[packed.row, packed.at], known.advantages[packed.row]
    ratio = torch.exp((logprobs - old).clamp(max=20.0))
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum() / count


@dataclass
class Measured:
    """One pass over all rows, or the part that the time limit allowed."""

    seconds: float = 0.0
    computed: int = 0
    sampled: int = 0
    predicting: int = 0
    """Tokens whose logits were computed; a token followed by several sampled tokens counts once."""
    micro_batches: int = 0
    loss: float = 0.0
    timed_out: bool = False


def run_once(
    model: Any, rows: list[Row], known: Known, options: argparse.Namespace, share: bool, deadline: float
) -> Measured:
    model.zero_grad(set_to_none=True)
    found, losses = Measured(), []
    began = now(options.device)
    count = sum(sum(row.sampled) for row in rows)
    how = {"share_prefixes": share, "device": options.device, "nodes": prefers_node_layout(model)}
    for packed in micro_batches(rows, options.max_tokens, **how):
        if time.perf_counter() > deadline:
            found.timed_out = True
            break
        hidden = hidden_states(model, packed)
        logprobs, _ = token_logprobs(model, hidden, packed, 1.0, chunk_tokens=options.chunk_tokens)
        loss = clipped_loss(known, packed, logprobs, count)
        loss.backward()
        losses.append(loss.detach())
        found.computed += packed.T
        found.sampled += packed.S
        found.predicting += len(packed.predicted)
        found.micro_batches += 1
    found.loss = sum(loss.item() for loss in losses)
    found.seconds = now(options.device) - began
    return found


def now(device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def forget_peak(device: str) -> None:
    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    elif os.access("/proc/self/clear_refs", os.W_OK):
        Path("/proc/self/clear_refs").write_text("5")


def peak_mib(device: str) -> float:
    if device != "cpu":
        return torch.cuda.max_memory_allocated() / 2**20
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def matmul_peak(device: str, dtype: torch.dtype, limit_s: float = 5.0) -> float:
    """FLOP/s of a large matrix product, the best within the time limit."""
    size = 8192 if device != "cpu" else 1536
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best, stop = float("inf"), now(device) + limit_s
    for _ in range(20):
        began = now(device)
        _ = a @ b
        best = min(best, now(device) - began)
        if now(device) > stop:
            break
    return 2 * size**3 / best


def measure(model: Any, rows: list[Row], form: str, options: argparse.Namespace, gradients: Path) -> dict[str, Any]:
    """The best of several passes after a warm-up pass, within the time limit of one part.

    The gradient goes to a file, so that it does not count as memory of the next part.
    """
    deadline = now(options.device) + options.limit_s
    known = Known.of(rows, options.device)
    forward.fuse = (lambda own, original: None) if form == "stock" else fuse  # type: ignore[attr-defined]
    runs = [run_once(model, rows, known, options, FORMS[form], deadline)]
    if not runs[0].timed_out and form in COMPARED:
        with (gradients / form).open("wb") as file:
            for weight in model.parameters():
                weight.grad.detach().float().cpu().numpy().tofile(file)
    forget_peak(options.device)
    for _ in range(options.repeats):
        if now(options.device) + runs[-1].seconds > deadline:
            break
        runs.append(run_once(model, rows, known, options, FORMS[form], deadline))
    best = min(runs[1:] or runs, key=lambda run: run.seconds / max(1, run.computed))
    return vars(best) | {"peak_mib": round(peak_mib(options.device)), "passes": len(runs) - 1}


def agreement(model: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Compare a few short rows with the model as transformers runs it, padded, in the same precision."""
    sizes = {"groups": 2, "group_size": 3, "prompt": 40, "system": 8, "response": 12, "alike": 4}
    few = argparse.Namespace(**vars(options) | sizes | {"vary": True})
    rows = make_rows(few, min(2000, model.config.vocab_size))
    width = max(len(row.ids) for row in rows)
    ids = torch.tensor([row.ids + [0] * (width - len(row.ids)) for row in rows], device=options.device)
    mask = torch.tensor([[1] * len(row.ids) + [0] * (width - len(row.ids)) for row in rows], device=options.device)
    found: dict[str, Any] = {"part": "agreement"}
    with torch.no_grad():
        theirs = torch.log_softmax(model(input_ids=ids, attention_mask=mask).logits.float(), -1)
        for form in options.forms:
            share, gaps = FORMS[form], []
            for packed in micro_batches(
                rows, 150, share_prefixes=share, device=options.device, nodes=prefers_node_layout(model)
            ):
                ours, _ = token_logprobs(model, hidden_states(model, packed), packed, 1.0, chunk_tokens=16)
                gaps.append((ours - theirs[packed.row, packed.at - 1, packed.target]).abs())
            found[f"logprob_gap_mean_{form}"] = float(f"{torch.cat(gaps).mean().item():.2g}")
    return found


def flops(model: Any, computed: int, predicting: int) -> tuple[float, float]:
    """6 N FLOP per computed token (N: all weights), and the FLOP of the products with weights that were really done."""
    every = sum(p.numel() for p in model.parameters())
    embedding = model.get_input_embeddings().weight.numel()
    head = model.get_output_embeddings().weight.numel()
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    trunk = every - embedding - (0 if tied else head)
    return 6.0 * every * computed, 6.0 * (trunk * computed + head * predicting)


def parts(model: Any, rows: list[Row], options: argparse.Namespace, gradients: Path) -> Iterator[dict[str, Any]]:
    dtype = next(model.parameters()).dtype
    peak = matmul_peak(options.device, dtype)
    yield {"part": "machine", "torch": torch.__version__, "device": device_name(options.device), "dtype": str(dtype),
           "threads": torch.get_num_threads(), "matmul_tflops": round(peak / 1e12, 3),
           "weights": sum(p.numel() for p in model.parameters())}  # fmt: skip
    yield agreement(model, options)
    figures: dict[str, dict[str, Any]] = {}
    for form in options.forms:
        try:
            found = measure(model, rows, form, options, gradients)
        except torch.OutOfMemoryError as fault:
            yield {"part": form, "error": str(fault).splitlines()[0]}
            continue
        by_weights, done = flops(model, found["computed"], found["predicting"])
        figures[form] = found
        yield {"part": form, **{k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()},
               "tokens_per_s": round(found["computed"] / found["seconds"]),
               "mfu_6n": round(by_weights / found["seconds"] / peak, 4),
               "mfu_done": round(done / found["seconds"] / peak, 4)}  # fmt: skip
    if {"flat", "shared"} <= figures.keys():
        model.zero_grad(set_to_none=True)
        yield compared(figures["flat"], figures["shared"]) | gradient_gap(model, gradients)
    if {"stock", "shared"} <= figures.keys():
        yield compared(figures["stock"], figures["shared"]) | {"part": "ratio to stock"}


def compared(flat: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    # A part that ran out of time is compared by the share it completed.
    speed = [form["seconds"] / max(1, form["sampled"]) for form in (flat, shared)]
    return {
        "part": "ratio",
        "computed_flat_over_shared": round(flat["computed"] / max(1, shared["computed"]), 3),
        "time_shared_over_flat": round(speed[1] / speed[0], 4),
        "speedup": round(speed[0] / speed[1], 3),
        "peak_shared_over_flat": round(shared["peak_mib"] / flat["peak_mib"], 3),
    }


def gradient_gap(model: Any, gradients: Path) -> dict[str, Any]:
    """Relative distance of the two gradients, overall and for the worst parameter."""
    if not all((gradients / form).exists() for form in COMPARED):
        return {}
    flat, shared = (np.memmap(gradients / form, dtype=np.float32, mode="r") for form in COMPARED)
    at, gaps, sizes = 0, [], []
    for weight in model.parameters():
        here = slice(at, at := at + weight.numel())
        gaps.append(float(np.linalg.norm(flat[here] - shared[here])))
        sizes.append(float(np.linalg.norm(flat[here])))
    worst = max(gap / max(size, 1e-30) for gap, size in zip(gaps, sizes, strict=True))
    whole = math.hypot(*gaps) / max(math.hypot(*sizes), 1e-30)
    return {"gradient_gap": float(f"{whole:.2g}"), "gradient_gap_worst": float(f"{worst:.2g}")}


def device_name(device: str) -> str:
    return "cpu" if device == "cpu" else torch.cuda.get_device_name()


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--device", default="cpu", help="torch device")
    parser.add_argument("--dtype", default="float32", help="torch dtype")
    parser.add_argument("--shape", default="small", choices=["small", *MODELS], help="model shape")
    parser.add_argument("--groups", type=int, default=16, help="number of groups")
    parser.add_argument("--group-size", type=int, default=8, help="rollouts per group")
    parser.add_argument("--prompt", type=int, default=512, help="prompt tokens")
    parser.add_argument("--response", type=int, default=64, help="response tokens")
    parser.add_argument("--system", type=int, default=0, help="tokens that all prompts share at the start")
    parser.add_argument("--alike", type=int, default=0, help="leading response tokens sampled from a vocabulary of two")
    parser.add_argument("--vary", action="store_true", help="vary response lengths between half and all of --response")
    parser.add_argument("--max-tokens", type=int, default=16_384, help="computed tokens per micro-batch")
    parser.add_argument("--chunk-tokens", type=int, help="tokens per chunk of logits; by default as in a run")
    parser.add_argument("--repeats", type=int, default=3, help="timed passes; the best counts")
    parser.add_argument("--limit-s", type=float, default=120.0, help="seconds per form")
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=["flat", "shared"], help="forms to compare")
    parser.add_argument("--checkpointing", action="store_true", help="use activation checkpointing")
    parser.add_argument("--seed", type=int, default=0, help="random seed")
    parser.add_argument("--out", type=Path, help="append each part as a line of JSON")
    return parser.parse_args(arguments)


def main(options: argparse.Namespace) -> int:
    model = build_model(options.shape, options.device, getattr(torch, options.dtype))
    if options.checkpointing:
        model.gradient_checkpointing_enable()
    rows = make_rows(options, min(2000, model.config.vocab_size))
    given = {k: v for k, v in vars(options).items() if k not in ("out", "forms")}
    print(json.dumps(given))
    with tempfile.TemporaryDirectory() as folder:
        for part in parts(model, rows, options, Path(folder)):
            part["load_average"] = round(os.getloadavg()[0], 1)
            print(json.dumps(part), flush=True)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(json.dumps({"options": given, **part}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(read_options()))
