"""What becomes of replies under way when the weights change: computed again, or kept (`trainer.keep_cache`).

    python benchmarks/weight_swap.py                     the model that ships, about half a minute on two cores

Requests write to their full length while new weights come at equal distances, each a step of ±`--step` in every weight,
as an optimizer like Adam makes it. Both modes take turns. The gap is between the log-prob that a token was sampled with
and the one that the weights of that moment give it after the same tokens, all computed by them: for kept replies those
after a change. The effective sample size is that of the weights π / μ, where π is the last version's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from typing import Any

import torch

from toolwise.engine import Engine
from toolwise.engine.weight_swap import replace_weights
from toolwise.models import load_model
from toolwise.protocols import Generation, Sampling

PROMPT = 64


@torch.inference_mode()
def versions_of(model: Any, count: int, step: float) -> list[list[torch.Tensor]]:
    """The parameters of each version, each a step in a random direction from the one before."""
    torch.manual_seed(0)
    found = [[parameter.clone() for parameter in model.parameters()]]
    for _ in range(count):
        found.append([p + step * torch.randn_like(p).sign() for p in found[-1]])
    return found


@torch.inference_mode()
def write(model: Any, values: list[torch.Tensor]) -> None:
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.copy_(value)


async def replies(
    engine: Engine, versions: list[list[torch.Tensor]], args: argparse.Namespace, *, keep: bool
) -> tuple[list[Generation], list[dict[int, int]]]:
    """All replies, and at each change how many tokens each of them had, by its number."""
    had: list[dict[int, int]] = []
    prompts = [[10 + (7 * i + j) % 200 for j in range(PROMPT)] for i in range(args.requests)]
    tasks = [
        asyncio.ensure_future(engine.generate(prompt, Sampling(max_new_tokens=args.tokens, seed=i)))
        for i, prompt in enumerate(prompts)
    ]

    def change(version: int) -> None:
        write(engine.model, versions[version])
        had.append({request.number: request.sampled for request in engine.scheduler.requests})

    total = args.requests * args.tokens
    for version in range(1, len(versions)):
        while engine.results.decoded_tokens < total * version / len(versions):  # noqa: ASYNC110 - a thread decodes
            await asyncio.sleep(0.001)
        await replace_weights(engine, lambda version=version: change(version), version, keep_cache=keep)
    return list(await asyncio.gather(*tasks)), had


@torch.inference_mode()
def logprobs(model: Any, number: int, reply: Generation) -> torch.Tensor:
    prompt = [10 + (7 * number + j) % 200 for j in range(PROMPT)]
    ids = [*prompt, *reply.token_ids]
    logits = model(torch.tensor([ids])).logits[0, PROMPT - 1 : -1].float().log_softmax(-1)
    return logits.gather(-1, torch.tensor(list(reply.token_ids))[:, None])[:, 0]


def measure(
    model: Any, versions: list[list[torch.Tensor]], args: argparse.Namespace, *, keep: bool
) -> dict[str, float]:
    write(model, versions[0])
    engine = Engine(model)
    started = time.perf_counter()
    found, had = asyncio.run(replies(engine, versions, args, keep=keep))
    seconds = time.perf_counter() - started
    prefilled = engine.metrics()["engine/prefilled_tokens"]
    engine.close()
    gaps, ratios = [], []
    table = []
    for values in versions:
        write(model, values)
        table.append([logprobs(model, number, reply) for number, reply in enumerate(found)])
    for number, reply in enumerate(found):
        sampled = torch.tensor(list(reply.logprobs))
        starts = [change.get(number, len(sampled)) for change in had]
        version = sum((torch.arange(len(sampled)) >= start).long() for start in starts)
        own = torch.stack([row[number] for row in table]).gather(0, version[None])[0]
        gaps.append((sampled - own).abs()[version > 0])
        ratios.append((table[-1][number] - sampled).exp())
    gap, ratio = torch.cat(gaps), torch.cat(ratios)
    return {
        "seconds": seconds,
        "recomputed": prefilled - args.requests * PROMPT,
        "gap_mean": gap.mean().item(),
        "gap_max": gap.max().item(),
        "ess": (ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())).item(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:small")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--changes", type=int, default=4)
    parser.add_argument("--step", type=float, nargs="*", default=[1e-5, 1e-4, 1e-3])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model, _ = load_model(args.model, device="cpu")
    print(f"{args.requests} x {args.tokens} tokens, {args.changes} changes, load {os.getloadavg()[0]:.1f}")
    print("step      cache           seconds  recomputed  gap mean   gap max     ess")
    original = [parameter.detach().clone() for parameter in model.parameters()]
    for step in args.step:
        write(model, original)
        versions = versions_of(model, args.changes, step)
        rows: dict[bool, list[dict[str, float]]] = {False: [], True: []}
        for _ in range(args.rounds):
            for keep, found in rows.items():
                found.append(measure(model, versions, args, keep=keep))
        for keep, found in rows.items():
            last, fastest = found[-1], min(row["seconds"] for row in found)
            print(
                f"{step:<9g} {'kept' if keep else 'computed again':14} {fastest:8.2f} {last['recomputed']:11.0f}"
                f" {last['gap_mean']:9.6f} {last['gap_max']:9.5f} {last['ess']:7.4f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
