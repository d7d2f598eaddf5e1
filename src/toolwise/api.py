"""The Python API: `toolwise.train`, `resume`, `evaluate`, `sft` and `load`."""

from __future__ import annotations

import atexit
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import datetime
from itertools import count
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from toolwise.concurrency.deadlines import run_async
from toolwise.config.imports import in_worker
from toolwise.config.loader import apply_overrides, build_config
from toolwise.config.schema import RunConfig, load_config
from toolwise.config.sft import SftConfig
from toolwise.data.row_layout import PLAIN, RowLayout
from toolwise.errors import ConfigError, ToolwiseError
from toolwise.types import Task

if TYPE_CHECKING:
    from toolwise.agent.agent import Agent
    from toolwise.envs.catalog import EnvSpec
    from toolwise.rollout.call_format import ParserSpec
    from toolwise.routing.routers import RouterSpec
    from toolwise.training.components import EstimatorSpec, LossSpec
    from toolwise.training.evaluate import RewardSources
    from toolwise.training.inputs import RunInputs
    from toolwise.training.run_folder import RunResult
    from toolwise.training.trackers.observers import CallbackSpec, TrackerSpec

log = logging.getLogger("toolwise")

MISSING_TOOLS_HINT = (
    "pass them as `tools` (in the config or to toolwise.evaluate), or set multi_turn.enable=false to run without "
    "tools on purpose"
)
SFT_FIGURES = ("loss", "grad_norm", "tokens")
Tasks = str | Path | Sequence[str | Path] | Sequence[Task | Mapping[str, Any]]
Config = RunConfig | Mapping[str, Any] | str | Path
AgentSpec = str | Callable[[dict[str, Any], str, str], Any]
"""An agent of the user's own: a function run(task, base_url, api_key), or a reference to one."""


def train(
    config: Config | None = None,
    *,
    model: str | Path | None = None,
    tasks: Tasks | None = None,
    val: Tasks | None = None,
    tools: Sequence[Any] | Callable[..., Any] | None = None,
    reward: RewardSources | None = None,
    env: EnvSpec | None = None,
    agent: AgentSpec | None = None,
    router: RouterSpec | None = None,
    parser: ParserSpec | None = None,
    estimator: EstimatorSpec | None = None,
    loss: LossSpec | None = None,
    trackers: Sequence[TrackerSpec] | TrackerSpec | None = None,
    callbacks: Sequence[CallbackSpec] | CallbackSpec | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    overrides: Sequence[str] = (),
) -> RunResult:
    """Train a model; return the run folder and the summary.

    `config` is a file, a nested mapping or a `RunConfig`; the other arguments override it. `tasks` and `val` are a
    file, a glob or a list of them, `Task`s, or rows such as {"prompt": "…", "ground_truth": "…"}. `tools` are typed
    functions, tool objects or names, as a list or a single one. `reward` is a function, or a list of functions or
    (function, weight) pairs whose scores are added. `env` is a class, a function or a name; `agent` a function
    run(task, base_url, api_key), which rolls out in its own way: docs/own-agents.md; `router` a `Router` or its
    class; `parser` a function of the text or a `ToolCallParser`; `estimator` an `AdvantageEstimator` and `loss` a
    `PolicyLoss`, or a class. `trackers` receive the metrics; `callbacks` follow the run and may stop it. `overrides`
    are strings such as "actor.lr=1e-5".

    Everything is recorded in the run folder, so that `toolwise eval`, `resume`, `score` and `export` work on it.
    """
    _refuse_in_worker("train")
    from toolwise.cluster.launcher import launch_training
    from toolwise.training.inputs import gather_inputs
    from toolwise.training.run import check_learnable
    from toolwise.training.run_folder import check_folder
    from toolwise.training.tasks import cache_folder, with_cache
    from toolwise.training.trackers.observers import load_observers
    from toolwise.view.report import ReportFiles

    run_config = read_config(config, overrides, model)
    folder = Path(out) if out is not None else new_run_folder(run_config.name)
    cache = cache_folder(run_config, folder)
    layout = RowLayout.of(run_config.data)
    rows, held_out = read_tasks(tasks, "tasks", cache, layout), read_tasks(val, "val", cache, layout)
    parts: dict[str, Any] = {"tools": tools, "reward": reward, "env": env, "router": router, "parser": parser}
    parts |= {"estimator": estimator, "loss": loss, "agent": agent}
    observed: dict[str, Any] = {"trackers": trackers, "callbacks": callbacks}
    inputs = gather_inputs(run_config, folder, tasks=(tasks, rows), val=(val, held_out), **parts, **observed)
    parts |= _load_parts(inputs.config, estimator, loss)
    check_learnable(inputs.config, parts["estimator"])
    check_folder(folder, inputs.recorded, resume=resume)
    if resume and (finished := _finished_run(inputs, folder)) is not None:
        return finished
    for note in inputs.notes:
        log.warning("%s", note)
    sources = load_observers(run_config.trainer, trackers, callbacks)
    inputs.config = with_cache(inputs.config, cache)
    parts |= {"tasks": rows, "validation_tasks": held_out}
    return launch_training(inputs, sources, folder, resume=resume, callbacks=[ReportFiles()], **parts)


def _finished_run(inputs: RunInputs, folder: Path) -> RunResult | None:
    """The result of a run that is resumed with the same inputs and has nothing left to do."""
    from toolwise.training.run_folder import finished_result

    inputs.check_files()
    return finished_result(folder, inputs.recorded)


def _load_parts(config: RunConfig, estimator: EstimatorSpec | None, loss: LossSpec | None) -> dict[str, Any]:
    """Parts whose errors are reported before anything is written."""
    from toolwise.serve.gateway import build_outside_agent
    from toolwise.training.components import load_estimator, load_loss

    parts = {"estimator": load_estimator(config, estimator), "loss": load_loss(config, loss)}
    return {**parts, "agent": build_outside_agent(config)}


def resume(
    run: str | Path,
    *,
    tools: Sequence[Any] | Callable[..., Any] | None = None,
    reward: RewardSources | None = None,
    env: EnvSpec | None = None,
    agent: AgentSpec | None = None,
    router: RouterSpec | None = None,
    parser: ParserSpec | None = None,
    estimator: EstimatorSpec | None = None,
    loss: LossSpec | None = None,
    trackers: Sequence[TrackerSpec] | TrackerSpec | None = None,
    callbacks: Sequence[CallbackSpec] | CallbackSpec | None = None,
    overrides: Sequence[str] = (),
) -> RunResult:
    """Resume the run in the folder `run`, of `train` or of `sft`, with its recorded settings plus `overrides`.

    The others are needed only if the run was given objects that config.toml cannot reference; each replaces what is
    recorded.
    """
    from toolwise.training.changes import load_run_config

    config = load_run_config(Path(run), overrides)
    if isinstance(config, SftConfig):
        return resume_sft(config, Path(run), trackers, callbacks)
    if tools is not None:
        config = config.model_copy(update={"tools": []})
    replaced: dict[str, Any] = {"trackers": trackers, "callbacks": callbacks}
    cleared: dict[str, Any] = {name: [] for name, value in replaced.items() if value is not None}
    return train(
        config.model_copy(update={"trainer": config.trainer.model_copy(update=cleared)}),
        tools=tools,
        reward=reward,
        env=env,
        agent=agent,
        router=router,
        parser=parser,
        estimator=estimator,
        loss=loss,
        **replaced,
        out=run,
        resume=True,
    )


def resume_sft(
    config: SftConfig,
    run: Path,
    trackers: Sequence[TrackerSpec] | TrackerSpec | None = None,
    callbacks: Sequence[CallbackSpec] | CallbackSpec | None = None,
) -> RunResult:
    """Resume the SFT run in the folder `run` with its settings, which may have changed."""
    _refuse_in_worker("resume")
    from toolwise.training.sft_command import run_sft
    from toolwise.view.report import ReportFiles

    observers: dict[str, Any] = {"trackers": trackers, "callbacks": callbacks}
    return run_sft(config, run, resume=True, own_callbacks=[ReportFiles()], **observers)


def evaluate(
    model: str | Path,
    tasks: Tasks,
    *,
    config: Config | None = None,
    tools: Sequence[Any] | Callable[..., Any] | None = None,
    reward: RewardSources | None = None,
    env: EnvSpec | None = None,
    agent: AgentSpec | None = None,
    router: RouterSpec | None = None,
    parser: ParserSpec | None = None,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Score a model with one rollout per task, without training. Returns the same metrics as a run's summary.

    A model that was trained with tools needs them here too; pass `tools=[]` to use only those of the config.
    """
    _refuse_in_worker("evaluate")
    from toolwise.models import locate
    from toolwise.routing.head import ROUTER_METADATA_FILE
    from toolwise.serve.gateway import build_outside_agent
    from toolwise.tools.catalog import check_recorded_tools
    from toolwise.training.calibration import budget_metrics
    from toolwise.training.diagnosis import evaluation_findings
    from toolwise.training.evaluate import validate
    from toolwise.training.inputs import gather_inputs
    from toolwise.training.metrics import summarize_validation
    from toolwise.training.rollout_setup import setup_evaluation

    run_config = read_config(config, overrides, model)
    held_out = read_tasks(tasks, "tasks", layout=RowLayout.of(run_config.data)) or []
    parts: dict[str, Any] = {"tools": tools, "reward": reward, "env": env, "router": router, "parser": parser}
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="toolwise-"))  # holds the source of notebook cells
        inputs = gather_inputs(run_config, Path(folder), agent=agent, **parts)
        stack.callback(inputs.discard)
        inputs.write()
        setup = setup_evaluation(inputs.config, held_out, agent=build_outside_agent(inputs.config), **parts)
        stack.callback(setup.close)
        saved = Path(locate(str(model)))
        if setup.config.multi_turn.enable and setup.agent is None and (tools is None or tools):
            check_recorded_tools(saved, setup.scheduler.tools, MISSING_TOOLS_HINT)
        if setup.head is not None and not (saved / ROUTER_METADATA_FILE).is_file():
            log.warning("%s has no router (%s): routes are sampled from an untrained one", model, ROUTER_METADATA_FILE)
        else:
            setup.router.load(saved)
        scored = run_async(validate(setup))
        for finding in evaluation_findings(setup.scoring.rewards, held_out, scored):
            log.warning("%s", finding)
        summary = summarize_validation(scored, setup.config.multi_turn.held_out_tools)
        return summary | budget_metrics(setup.router, scored)


def sft(
    model: str | Path | None = None,
    data: str | Path | Iterable[Mapping[str, Any]] | None = None,
    out: str | Path | None = None,
    *,
    config: str | Path | Mapping[str, Any] | None = None,
    val: str | Path | Iterable[Mapping[str, Any]] | None = None,
    trackers: Sequence[TrackerSpec] | TrackerSpec | None = None,
    callbacks: Sequence[CallbackSpec] | CallbackSpec | None = None,
    resume: bool = False,
    overrides: Sequence[str] = (),
    **settings: Any,
) -> dict[str, float]:
    """Fine-tune a model on conversations (loss on assistant tokens only), save it to `out`, return the final metrics.

    `data` and `val` are files or rows with `messages`, or `prompt` and `response`. `config` is a file or a nested
    mapping; `settings` are fields of `toolwise.config.sft.SftConfig` (lr, steps, lora_rank, dtype, …) and override it,
    as do the other arguments. Everything is recorded in `out`, so that `toolwise resume` works on it. The metrics are
    `first_loss`, and of the last step `loss`, `grad_norm` and `tokens` trained on; with validation also `val_loss`.
    """
    _refuse_in_worker("sft")
    check_model(model)
    from toolwise.training.sft_command import read_sft_config, run_sft
    from toolwise.view.report import ReportFiles

    if out is None:
        raise ConfigError("toolwise.sft needs out: the folder for the trained model")
    if config is None:
        settings.setdefault("progress", False)
    inputs = {"data": data, "val": val}
    files = {name: value for name, value in inputs.items() if isinstance(value, str | Path)}
    rows = {name: value for name, value in inputs.items() if value is not None and not isinstance(value, str | Path)}
    result = run_sft(
        read_sft_config(config, model=model, overrides=overrides, **files, settings=settings),
        Path(out),
        rows=rows,
        resume=resume,
        trackers=trackers,
        callbacks=callbacks,
        own_callbacks=[ReportFiles()],
    )
    summary = result.summary
    figures = {"first_loss": summary["first_loss"], **{n: summary["last_step"][n] for n in SFT_FIGURES}}
    return figures if summary["after"] is None else {**figures, "val_loss": summary["after"]["loss"]}


def load(
    source: str | Path,
    *,
    tools: Sequence[Any] | None = None,
    documents: Sequence[Any] | None = None,
    overrides: Sequence[str] = (),
    trust_code: bool = False,
) -> Agent:
    """The agent in an agent folder, a run, a checkpoint or a plain model folder, to `ask` questions: docs/agents.md.

    `tools` and `documents` replace its own. Code that an agent folder brings runs only with `trust_code`.
    """
    _refuse_in_worker("load")
    from toolwise.agent.agent import Agent

    return Agent.load(source, tools=tools, documents=documents, overrides=overrides, trust_code=trust_code)


def _refuse_in_worker(name: str) -> None:
    """Workers import the user's file to load a reward or a tool: an unguarded call in it would start another run."""
    if in_worker():
        raise ToolwiseError(
            f"toolwise.{name} was called while a worker process imported this file to load a function from it: put "
            'the call under `if __name__ == "__main__":`'
        )


def read_config(config: Config | None, overrides: Sequence[str] = (), model: str | Path | None = None) -> RunConfig:
    check_model(model)
    if model is not None:
        overrides = [*overrides, f"model.path={json.dumps(str(model), ensure_ascii=False)}"]  # valid TOML too
    if isinstance(config, str | Path):
        return load_config(config, overrides)
    if isinstance(config, RunConfig):
        config = config.model_dump(mode="json", exclude_none=True)
    return build_config(RunConfig, apply_overrides(dict(config or {}), overrides), source="config")


def check_model(model: Any) -> None:
    """A model must be a path: runs record it, and other processes load it."""
    if model is not None and not isinstance(model, str | PathLike):
        raise ConfigError(
            f"model is a {type(model).__name__} object: save it and its tokenizer with "
            'save_pretrained("folder") first, then pass model="folder"'
        )


def read_tasks(
    tasks: Tasks | None, source: str, cache: Path | None = None, layout: RowLayout = PLAIN
) -> Sequence[Task] | None:
    """The tasks of files or of rows given in Python; `cache` is for converted files."""
    from toolwise.training.tasks import read_given_tasks

    return read_given_tasks(tasks, source, cache, layout)


def new_run_folder(name: str) -> Path:
    """Create a folder that no other run has, even one started in the same second. Removed at exit if still empty."""
    first = Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    for number in count(1):
        folder = first if number == 1 else first.with_name(f"{first.name}-{number}")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
        except FileExistsError:
            if not folder.parent.is_dir():
                raise ConfigError(f"{folder.parent} is a file: choose a folder with --out (out=)") from None
            continue
        except OSError as fault:
            raise ConfigError(
                f"cannot create {folder} ({fault.strerror}): choose a folder with --out (out=)"
            ) from fault
        atexit.register(_remove_empty, folder.absolute())
        return folder
    raise AssertionError("unreachable")


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # not empty: a run
        folder.rmdir()
