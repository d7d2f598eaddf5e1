"""`toolwise eval`: score a trained run or any model on held-out tasks; with --budgets, a router's accuracy against
cost, compared to baselines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolwise.cli.tables import print_table
from toolwise.cli.train import USER_FILES, OverridesOption, TrustOption
from toolwise.errors import ConfigError
from toolwise.terminal import print_json, print_line

if TYPE_CHECKING:
    from toolwise.config.schema import RunConfig
    from toolwise.types import Task


def evaluate(
    source: Annotated[
        Path,
        typer.Argument(help="Agent or run folder, checkpoint, model, or configuration file.", show_default=False),
    ],
    model: Annotated[str | None, typer.Option(help="Model to use instead of the run's latest checkpoint.")] = None,
    data: Annotated[Path | None, typer.Option(help="Task file to use instead of data.val.")] = None,
    overrides: OverridesOption = None,
    trust_code: TrustOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the metrics as JSON.")] = False,
    budgets: Annotated[
        str,
        typer.Option(help="Evaluate a run's router at these budgets (such as 0,0.1,…,1) and compare it to baselines."),
    ] = "",
    draws: Annotated[int, typer.Option(min=1, help="--budgets: rollouts per task and route.")] = 16,
    metric: Annotated[
        str, typer.Option(help='--budgets: metric to plot against cost. "auto": correct if reported, else score.')
    ] = "auto",
    baselines: Annotated[
        list[str] | None,
        typer.Option(
            "--baseline", help="--budgets: NAME=RUN, another trained actor; may be repeated.", show_default=False
        ),
    ] = None,
    otc: Annotated[Path | None, typer.Option(help="--budgets: the same as --baseline OTC=RUN.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="--budgets: output folder (default: frontier/ beside the checkpoint).")
    ] = None,
    store: Annotated[
        bool, typer.Option(help="--budgets: store the routing thresholds for these budgets in the checkpoint.")
    ] = True,
    tuning_rows: Annotated[
        int,
        typer.Option(
            min=0, help="--budgets: training rows that the baselines are tuned on; 0: only classifiers, not tuned."
        ),
    ] = 256,
    jobs: Annotated[int, typer.Option(min=1, help="--budgets: number of rollout processes, one core each.")] = 1,
) -> None:
    """Score a model on held-out tasks, one rollout per task; with --budgets, measure accuracy against cost."""
    if budgets:
        return measure_frontier(
            source,
            data,
            overrides or [],
            budgets=budgets,
            draws=draws,
            metric=metric,
            baselines=read_baselines(baselines or [], otc),
            tuning_rows=tuning_rows,
            out=out,
            store=store,
            jobs=jobs,
            as_json=as_json,
        )
    from toolwise.agent.sources import is_agent_folder
    from toolwise.api import evaluate as evaluate_model
    from toolwise.training.changes import check_files

    config, model_path = resolve_model(source, model, overrides or [], trust_code=trust_code)
    if source.is_dir() and not is_agent_folder(source):
        check_files(config, source, *(() if data else ("data.val",)), *USER_FILES)
    tasks = held_out_tasks(config, source, data)
    warn_about_calibration_tasks(source, tasks)
    metrics = evaluate_model(model_path, tasks, config=config)
    if as_json:
        print_json(metrics)
    else:
        _show(metrics, model_path)
    return None


def held_out_tasks(config: RunConfig, source: Path, data: Path | None) -> Sequence[Task]:
    """The tasks in `data`, or those of the configuration's data.val."""
    from toolwise.data import open_tasks
    from toolwise.data.row_layout import RowLayout

    if (file := data or config.data.val) is None:
        raise ConfigError(f"{source} does not set data.val: add --data FILE")
    limit = config.data.val_limit if data is None else None
    return open_tasks(file, limit=limit, cache=config.data.cache, layout=RowLayout.of(config.data))


def warn_about_calibration_tasks(source: Path, tasks: Sequence[Task]) -> None:
    """Tasks that a run was calibrated on are no fair test of what it delivers."""
    from toolwise.data.task_set import task_id_lists
    from toolwise.training.calibration import recorded_split

    known = recorded_split(source) | recorded_split(source.resolve().parent.parent)  # of a run, or of a checkpoint
    if shared := sum(task_id in known for task_ids in task_id_lists(tasks) for task_id in task_ids):
        print_line(f"WARNING the router was calibrated on {shared} of these {len(tasks)} tasks", err=True)


def resolve_model(
    source: Path, model: str | None, overrides: list[str], *, trust_code: bool = False
) -> tuple[RunConfig, str]:
    """Return the configuration and model path of an agent, a run, one of its checkpoints, a configuration file, or a
    model.

    `model` overrides the model; a run folder means its latest checkpoint.
    """
    from toolwise.agent.sources import find_agent, find_checkpoint, find_run, is_model
    from toolwise.config.schema import load_config

    if is_model(source):
        config, found = find_agent(source, overrides, trust_code=trust_code, use_reward=True)
        return config, model or found
    if not source.is_dir():
        config = load_config(source, overrides)
        return config, model or config.model.path
    run = find_run(source, "has no config.toml, so it is not a run folder: give a run folder or a configuration file")
    config = load_config(run / "config.toml", overrides)
    if model is None:
        model = str(find_checkpoint(source, command="toolwise eval", hint="choose a model with --model").path / "model")
    return config, model


def _show(metrics: dict[str, Any], model: str) -> None:
    from toolwise.routing.delivered_budget import format_cost

    parts = {"all": metrics, **metrics["by_kind"]}
    rows = [  # metrics are rows: a router reports more than fit as columns
        [name, *(format_cost(v) if isinstance(v, float) else str(v) for v in (p.get(name, "") for p in parts.values()))]
        for name in metrics
        if name != "by_kind"
    ]
    print_table(("tasks", *parts), rows, numbers=True, title=model, caption="one rollout per task")


def measure_frontier(
    source: Path,
    data: Path | None,
    overrides: list[str],
    *,
    budgets: str,
    draws: int,
    metric: str,
    baselines: Mapping[str, Path],
    tuning_rows: int,
    out: Path | None,
    store: bool,
    jobs: int,
    as_json: bool,
) -> None:
    """Evaluate the frontier, write and show it, and store the thresholds in the checkpoint."""
    from toolwise.agent.inference import store_calibration
    from toolwise.agent.loader import load_router
    from toolwise.agent.sources import find_router
    from toolwise.concurrency import deadlines
    from toolwise.frontier.evaluation import evaluate_frontier
    from toolwise.terminal.display import Console, Status
    from toolwise.view.frontier import frontier_tables

    levels = read_budgets(budgets)
    source = _source_on_disk(source, overrides, writes=store or out is None)
    config, model = find_router(source, overrides)
    tasks = held_out_tasks(config, source, data)
    warn_about_calibration_tasks(source, tasks)
    actors = {
        name: (of, Path(found)) for name, run in baselines.items() for of, found in [resolve_model(run, None, [])]
    }
    folder = out or _folder(model)
    routing = load_router(source, config=config)
    with Status(Console(stderr=True)) as status:
        evaluation = deadlines.run(
            evaluate_frontier(
                routing,
                tasks,
                levels,
                folder,
                actors=actors,
                tuning_rows=tuning_rows,
                draws=draws,
                metric=metric,
                seed=config.seed,
                source=source,
                jobs=jobs,
                on_done=lambda what, done, of: status.update(f"{what}: {done:,} of {of:,} groups of {draws} rollouts"),
            )
        )
    evaluation.write(folder, str(source))
    if store:
        store_calibration(model, evaluation.calibration)
    if as_json:
        return print_json(evaluation.frontier.to_json())
    for table in frontier_tables(evaluation.frontier.to_json(), str(source)):
        Console().print(table)
    for note in evaluation.notes:
        print_line(note)
    if evaluation.time is not None:
        print_line(evaluation.time.describe())
    print_line(f"wrote {folder / 'frontier.json'}, {folder / 'frontier.png'}")
    if store:
        print_line(f"stored the thresholds for these budgets in {model}: toolwise run {source} QUESTION --budget B")
    return None


def _source_on_disk(source: Path, overrides: list[str], *, writes: bool) -> Path:
    """Where the source is; one from a hub cannot be written to."""
    from toolwise.agent.sources import local_source

    found = Path(local_source(source, overrides))
    if found != source and writes:
        raise ConfigError(
            f"{source} is in the hub's cache, where nothing is written: add --no-store and --out FOLDER, or a copy "
            f"of it (toolwise export {source} --out FOLDER)"
        )
    return found


def _folder(model: Path) -> Path:
    """Default output folder: in the run, one per checkpoint, or beside an exported model."""
    step = model.resolve().parent
    if (step / "manifest.json").is_file():
        return step.parent.parent / "frontier" / step.name
    return model.with_name(f"{model.name}-frontier")


def read_baselines(given: Sequence[str], otc: Path | None = None) -> dict[str, Path]:
    """NAME=RUN of each --baseline, and of --otc."""
    runs: dict[str, Path] = {}
    for text in (*given, *([] if otc is None else [f"OTC={otc}"])):
        name, _, run = text.partition("=")
        if not name or not run:
            raise ConfigError(f"--baseline {text!r}: write NAME=RUN, such as HDPO=runs/hdpo")
        if name in runs:
            raise ConfigError(f"--baseline {name} is given twice: give each run a name of its own")
        runs[name] = Path(run)
    return runs


def read_budgets(text: str) -> list[float]:
    """Parse comma-separated numbers; `…` or `...` continues the sequence, as in `0,0.1,…,1`."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    budgets: list[float] = []
    for index, part in enumerate(parts):
        if part in ("…", "..."):
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
    return [round(before[-1] + step * k, 12) for k in range(1, round((last - before[-1]) / step))]


def _number(part: str, text: str) -> float:
    try:
        value = float(part)
    except ValueError:
        raise ConfigError(f"--budgets {text!r}: {part!r} is not a number; write numbers, such as 0,0.1,…,1") from None
    if not 0 <= value < float("inf"):
        raise ConfigError(f"--budgets {text!r}: {part} is not a budget; write finite numbers of at least 0")
    return value
