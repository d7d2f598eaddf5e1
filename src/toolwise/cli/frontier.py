"""`toolwise eval --budgets`: accuracy against cost, beside those who route otherwise."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolwise.errors import ConfigError
from toolwise.terminal import print_json, print_line

if TYPE_CHECKING:
    from toolwise.config.schema import RunConfig
    from toolwise.frontier.evaluation import FrontierEvaluation
    from toolwise.terminal.display import Status

_ELLIPSIS = re.compile(r"^(…|\.\.\.)$")


@dataclass(frozen=True, slots=True)
class FrontierOptions:
    """What was asked for on the command line."""

    budgets: str
    draws: int = 16
    metric: str = "auto"
    otc: Path | None = None
    out: Path | None = None
    store: bool = True
    jobs: int = 1


def show_frontier(
    source: Path, data: Path | None, overrides: Sequence[str], options: FrontierOptions, *, as_json: bool
) -> None:
    """Pool, compare, show, write; the thresholds go into the checkpoint."""
    from toolwise.agent.calibration import store_calibration
    from toolwise.agent.loader import find_router, load_router
    from toolwise.concurrency import deadlines
    from toolwise.data import load_tasks
    from toolwise.frontier.evaluation import ShardSettings, evaluate_frontier
    from toolwise.frontier.report import as_json as to_json
    from toolwise.terminal.display import Console, Status

    budgets = read_budgets(options.budgets)
    config, model = find_router(source, overrides)
    file = data or config.data.val
    if file is None:
        raise ConfigError(f"{source} names no data.val: add --data FILE")
    tasks = load_tasks(file, limit=config.data.val_limit if data is None else None)
    otc = None if options.otc is None else _resolve_run(options.otc)
    folder = options.out or _folder(model)
    routing = load_router(source, config=config)

    async def work(status: Status) -> FrontierEvaluation:
        return await evaluate_frontier(
            routing,
            tasks,
            budgets,
            folder,
            otc=otc,
            draws=options.draws,
            metric=options.metric,
            seed=config.seed,
            sharding=ShardSettings(source, options.jobs),
            on_done=lambda what, done, of: status.update(
                f"{what}: {done:,} of {of:,} groups of {options.draws} rollouts"
            ),
        )

    with Status(Console(stderr=True)) as status:
        found = deadlines.run(work(status))
    found.write(folder, str(source))
    if options.store:
        store_calibration(model, found.calibration)
    if as_json:
        print_json(to_json(found.frontier))
        return
    _show(found, str(source))
    print_line(f"written: {folder / 'frontier.json'}, {folder / 'frontier.png'}")
    if options.store:
        print_line(f"thresholds for these budgets are now in {model}: toolwise run {source} QUESTION --budget B")


def _show(found: FrontierEvaluation, title: str) -> None:
    from toolwise.frontier.report import tables
    from toolwise.terminal.display import Console

    for table in tables(found.frontier, title):
        Console().print(table)
    for note in found.notes:
        print_line(note)
    if found.time is not None:
        print_line(found.time.describe())


def _folder(model: Path) -> Path:
    """Beside a run's checkpoints, one for each of them; or beside an exported model."""
    step = model.resolve().parent
    sealed = (step / "manifest.json").is_file()
    return step.parent.parent / "frontier" / step.name if sealed else model.with_name(f"{model.name}-frontier")


def _resolve_run(source: Path) -> tuple[RunConfig, Path]:
    """Another run's actor: its latest checkpoint, or the one that is named."""
    from toolwise.cli.evaluate import resolve_model

    config, model = resolve_model(source, None, [])
    return config, Path(model)


def read_budgets(text: str) -> list[float]:
    """Numbers between commas; `0,0.1,…,1` goes on as it began, with `…` or `...`."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    found: list[float] = []
    for place, part in enumerate(parts):
        if _ELLIPSIS.match(part):
            found += _expand_ellipsis(found, parts[place + 1 :], text)
        else:
            found.append(_number(part, text))
    if not found:
        raise ConfigError(f"--budgets {text!r} names none: write numbers, such as 0,0.1,…,1")
    return sorted(set(found))


def _expand_ellipsis(before: Sequence[float], after: Sequence[str], text: str) -> list[float]:
    if len(before) < 2 or not after:
        raise ConfigError(f"--budgets {text!r}: … needs two numbers before it and one after, such as 0,0.1,…,1")
    step, last = before[-1] - before[-2], _number(after[0], text)
    if not step > 0 or last < before[-1] or (last - before[-1]) / step > 10_000:
        raise ConfigError(f"--budgets {text!r}: … must go upwards to the last number, in steps that lead there")
    count = round((last - before[-1]) / step)
    return [round(before[-1] + step * k, 12) for k in range(1, count)]


def _number(part: str, text: str) -> float:
    try:
        value = float(part)
    except ValueError:
        raise ConfigError(f"--budgets {text!r}: {part!r} is no number; write numbers, such as 0,0.1,…,1") from None
    if not 0 <= value < float("inf"):
        raise ConfigError(f"--budgets {text!r}: {part} is no budget; write numbers from 0 up")
    return value
