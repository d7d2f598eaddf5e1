"""`toolwise eval --budgets`: a router's accuracy against cost, compared to baselines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from toolwise.errors import ConfigError
from toolwise.terminal import print_json, print_line

if TYPE_CHECKING:
    from toolwise.frontier.evaluation import FrontierEvaluation
    from toolwise.terminal.display import Status

_ELLIPSIS = re.compile(r"^(…|\.\.\.)$")


def show_frontier(
    source: Path,
    data: Path | None,
    overrides: list[str],
    *,
    budgets: str,
    draws: int,
    metric: str,
    otc: Path | None,
    out: Path | None,
    store: bool,
    jobs: int,
    as_json: bool,
) -> None:
    """Evaluate the frontier, write and show it, and store the thresholds in the checkpoint."""
    from toolwise.agent.calibration import store_calibration
    from toolwise.agent.loader import find_router, load_router
    from toolwise.cli.evaluate import resolve_model
    from toolwise.concurrency import deadlines
    from toolwise.data import load_tasks
    from toolwise.frontier.evaluation import evaluate_frontier
    from toolwise.frontier.report import as_json as to_json
    from toolwise.terminal.display import Console, Status

    levels = read_budgets(budgets)
    config, model = find_router(source, overrides)
    file = data or config.data.val
    if file is None:
        raise ConfigError(f"{source} does not set data.val: add --data FILE")
    tasks = load_tasks(file, limit=config.data.val_limit if data is None else None)
    otc_actor = None
    if otc is not None:
        otc_config, otc_model = resolve_model(otc, None, [])
        otc_actor = (otc_config, Path(otc_model))
    folder = out or _folder(model)
    routing = load_router(source, config=config)

    async def work(status: Status) -> FrontierEvaluation:
        return await evaluate_frontier(
            routing,
            tasks,
            levels,
            folder,
            otc=otc_actor,
            draws=draws,
            metric=metric,
            seed=config.seed,
            source=source,
            jobs=jobs,
            on_done=lambda what, done, of: status.update(f"{what}: {done:,} of {of:,} groups of {draws} rollouts"),
        )

    with Status(Console(stderr=True)) as status:
        evaluation = deadlines.run(work(status))
    evaluation.write(folder, str(source))
    if store:
        store_calibration(model, evaluation.calibration)
    if as_json:
        print_json(to_json(evaluation.frontier))
        return
    _show(evaluation, str(source))
    print_line(f"wrote {folder / 'frontier.json'}, {folder / 'frontier.png'}")
    if store:
        print_line(f"stored the thresholds for these budgets in {model}: toolwise run {source} QUESTION --budget B")


def _show(evaluation: FrontierEvaluation, title: str) -> None:
    from toolwise.frontier.report import tables
    from toolwise.terminal.display import Console

    for table in tables(evaluation.frontier, title):
        Console().print(table)
    for note in evaluation.notes:
        print_line(note)
    if evaluation.time is not None:
        print_line(evaluation.time.describe())


def _folder(model: Path) -> Path:
    """Default output folder: in the run, one per checkpoint, or beside an exported model."""
    step = model.resolve().parent
    is_checkpoint = (step / "manifest.json").is_file()
    return step.parent.parent / "frontier" / step.name if is_checkpoint else model.with_name(f"{model.name}-frontier")


def read_budgets(text: str) -> list[float]:
    """Parse comma-separated numbers; `…` or `...` continues the sequence, as in `0,0.1,…,1`."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    budgets: list[float] = []
    for index, part in enumerate(parts):
        if _ELLIPSIS.match(part):
            budgets += _expand_ellipsis(budgets, parts[index + 1 :], text)
        else:
            budgets.append(_number(part, text))
    if not budgets:
        raise ConfigError(f"--budgets {text!r} contains no budgets: write numbers, such as 0,0.1,…,1")
    return sorted(set(budgets))


def _expand_ellipsis(before: Sequence[float], after: Sequence[str], text: str) -> list[float]:
    if len(before) < 2 or not after:
        raise ConfigError(f"--budgets {text!r}: … needs two numbers before it and one after, such as 0,0.1,…,1")
    step, last = before[-1] - before[-2], _number(after[0], text)
    if not step > 0 or last < before[-1] or (last - before[-1]) / step > 10_000:
        raise ConfigError(f"--budgets {text!r}: the numbers around … must increase, in steps that reach the last one")
    count = round((last - before[-1]) / step)
    return [round(before[-1] + step * k, 12) for k in range(1, count)]


def _number(part: str, text: str) -> float:
    try:
        value = float(part)
    except ValueError:
        raise ConfigError(f"--budgets {text!r}: {part!r} is not a number; write numbers, such as 0,0.1,…,1") from None
    if not 0 <= value < float("inf"):
        raise ConfigError(f"--budgets {text!r}: {part} is not a budget; write finite numbers of at least 0")
    return value
