"""Five routes with real tools, on a CPU: `python examples/five_routes/run.py --out runs/five`.

1. Supervised fine-tuning teaches the model that ships `python` and a clock behind MCP, and a second copy of it a few
   dozen facts: that one is the expensive model.
2. The expensive model is served on a free loopback port, and `toolwise train` learns when to use which route.
3. `toolwise eval` scores held-out questions within the budget, then over budgets, beside the baselines and the oracle.

Everything that runs is an ordinary `toolwise` command, and printed. `results.json` gets the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tasks import TOOLS, conversations, expert_conversations, make_rows

HERE = Path(__file__).parent
BUDGETS = "0,0.25,0.5,0.75,1,1.25,1.5,2"


def toolwise(*words: object, log: Path) -> None:
    """Run a command; its output goes to `log`."""
    print("toolwise", *words, flush=True)
    # The MCP server is installed beside the interpreter.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    with log.open("w", encoding="utf-8") as file:
        command = [sys.executable, "-m", "toolwise", *map(str, words)]
        done = subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | {"PATH": path}, check=False
        )
    if done.returncode:
        sys.exit(
            f"{log.read_text(encoding='utf-8')[-3000:]}\nthis command ended with status {done.returncode}: see {log}"
        )


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def demonstrations(count: int, seed: int) -> list[dict[str, Any]]:
    """Conversations in which real tools answer; only programs are not run, as their output is known."""
    from toolwise.tools.catalog import build_tools

    server = Path(sys.executable).with_name("mcp-server-time")
    command = [str(server) if server.exists() else server.name]
    tools = build_tools(["calculator", "search", "python", {"name": "mcp", "command": command}])
    if missing := set(TOOLS) - set(tools):
        sys.exit(f"the MCP server {command[0]} does not offer {', '.join(sorted(missing))}: install mcp-server-time")
    loop = asyncio.new_event_loop()

    async def execute(tool: str, arguments: dict[str, str], documents: Sequence[str]) -> str:
        instance = await tools[tool].create(**({"documents": list(documents)} if tool == "search" else {}))
        result, _, _ = await tools[tool].execute(instance, arguments)
        await tools[tool].release(instance)
        return str(result)

    def call(tool: str, arguments: dict[str, str], documents: Sequence[str]) -> str:
        if tool == "python":
            code = arguments["code"].removeprefix("print(").removesuffix(")")
            return str(eval(code))  # written by tasks.py, not by a model
        return loop.run_until_complete(execute(tool, arguments, documents))

    schemas = {name: tools[name].get_openai_tool_schema().model_dump() for name in TOOLS}
    return conversations(count, seed=seed, call=call, schemas=schemas)


@contextmanager
def expensive_model(folder: Path) -> Iterator[str]:
    """Serve the model in `folder` as "expert" on a free loopback port; its base URL."""
    from toolwise.config.schema import RunConfig
    from toolwise.serve import ServedModel, Server, build_app
    from toolwise.training.rollout_setup import local_policy

    policy = local_policy(RunConfig.model_validate({"model": {"path": str(folder)}}), str(folder))
    with Server(build_app(ServedModel.of(policy, "expert"))) as server:
        yield server.url


def results(run: Path, seconds: dict[str, float]) -> dict[str, Any]:
    """Held-out score and delivered cost, in all and by kind; the frontier of the router and of the others."""
    after = json.loads((run / "summary.json").read_text(encoding="utf-8"))["after"]
    frontier = json.loads((run / "frontier.json").read_text(encoding="utf-8"))
    curves = {name: [(p["budget"], *_values(p)) for p in points] for name, points in frontier["curves"].items()}
    fixed = {name: _values(point) for name, point in frontier["fixed"].items()}
    return {"seconds": seconds, "heldout": after, "curves": curves, "fixed": fixed, "routes": frontier["shares"]}


def _values(point: dict[str, Any]) -> tuple[float, float]:
    return point["cost"]["value"], point["score"]["value"]


def print_results(found: dict[str, Any]) -> None:
    heldout, curves = found["heldout"], found["curves"]
    limit = heldout.get("budget/cost/limit", float("nan"))
    print(f"held-out score {heldout['score']:.3f} at cost {heldout['cost']:.3f}, budget {limit:g}")
    print("| budget | " + " | ".join(curves) + " |\n|" + "---|" * (1 + len(curves)))
    for points in zip(*curves.values(), strict=True):
        cells = " | ".join(f"{score:.3f} at {cost:.2f}" for _, cost, score in points)
        print(f"| {points[0][0]:g} | {cells} |")
    for name, (cost, score) in found["fixed"].items():
        print(f"{name}: {score:.3f} at {cost:.2f}")
    print("seconds:", found["seconds"])


def main(words: Sequence[str] | None = None) -> None:
    options = read_options(words)
    out: Path = options.out.resolve()
    if out.exists() and any(out.iterdir()):
        sys.exit(f"{out} is not empty: give a new folder")
    out.mkdir(parents=True, exist_ok=True)
    seconds: dict[str, float] = {}
    started = time.monotonic()

    def lap(name: str) -> None:
        seconds[name] = round(time.monotonic() - started - sum(seconds.values()), 1)

    write_data(out, options)
    lap("data")
    small, expert = fine_tune(out, options)
    lap("two models")
    with expensive_model(expert) as url:
        settings = {
            "seed": options.seed, "model.path": small, "data.train": out / "train.jsonl",
            "data.val": out / "heldout.jsonl", "router.policies.expert.base_url": url,
        }  # fmt: skip
        overrides = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        overrides += [word for setting in options.set for word in ("--set", setting)]
        toolwise("train", HERE / "run.toml", "--out", out / "run", *overrides, log=out / "train.log")
        lap("router")
        toolwise(
            "eval", out / "run", "--budgets", BUDGETS, "--draws", options.draws, "--tuning-rows", 0,
            "--out", out / "run", log=out / "frontier.log",
        )  # fmt: skip
        lap("frontier")
    seconds["all"] = round(time.monotonic() - started, 1)
    found = results(out / "run", seconds)
    (out / "results.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print_results(found)


def read_options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--conversations", type=int, default=5000, help="of the small model's fine-tuning")
    parser.add_argument("--repeats", type=int, default=120, help="of each fact that the expensive model learns")
    parser.add_argument("--train", type=int, default=1800, help="training questions")
    parser.add_argument("--heldout", type=int, default=180, help="held-out questions")
    parser.add_argument("--draws", type=int, default=2, help="rollouts per held-out question and route")
    parser.add_argument("--small", default="", help="the small model, if it has been fine-tuned before")
    parser.add_argument("--expert", default="", help="the expensive model, if it has been")
    parser.add_argument("--set", action="append", default=[], help="a setting of run.toml, as for toolwise train")
    return parser.parse_args(words)


def write_data(out: Path, options: argparse.Namespace) -> None:
    for split, count in (("train", options.train), ("heldout", options.heldout)):
        write_lines(out / f"{split}.jsonl", list(make_rows(count, seed=options.seed, split=split)))
    write_lines(out / "sft.jsonl", demonstrations(options.conversations, options.seed))
    write_lines(out / "expert.jsonl", expert_conversations(options.repeats, seed=options.seed))


def fine_tune(out: Path, options: argparse.Namespace) -> tuple[str, str]:
    """The small and the expensive model, unless they are given."""
    models = []
    for name, given, data, lr, batch in (
        ("small", options.small, "sft.jsonl", 2e-3, 2048),
        ("expert", options.expert, "expert.jsonl", 2e-3, 1024),
    ):
        if not given:
            toolwise(
                "sft", "builtin:small", out / data, "--out", out / name, "--epochs", 1, "--lr", lr,
                "--seed", options.seed, "--set", f"batch_tokens={batch}", log=out / f"{name}.log",
            )  # fmt: skip
        models.append(given or str(out / name))
    return models[0], models[1]


if __name__ == "__main__":
    main()
