"""A run's rewards: loaded by workers, in this process only if trusted, and checked before any work is done."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import re
import runpy
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from toolwise.config.schema import RewardConfig
from toolwise.data.rows import read_task
from toolwise.errors import ConfigError, RewardError, ToolwiseError
from toolwise.messages import Message
from toolwise.rewards.function import Reward
from toolwise.training.evaluate import Scoring, build_scoring
from toolwise.types import EvaluateResult, Rollout, StopReason, Task, Usage

loaded_here: list[int] = []


def score(messages: Any, ground_truth: Any, price: float = 0.0) -> EvaluateResult:
    loaded_here.append(1)
    return EvaluateResult(score=1.0 - price, reason=str(os.getpid()))


@pytest.fixture
def built() -> Iterator[list[Scoring]]:
    made: list[Scoring] = []
    yield made
    for scoring in made:
        scoring.close()


def scoring_of(built: list[Scoring], given: Any = None, **settings: Any) -> Scoring:
    settings["sandbox"] = {"workers": 1} | settings.get("sandbox", {})
    built.append(build_scoring(RewardConfig.model_validate(settings), given))
    return built[-1]


def task(number: int = 0, **columns: Any) -> Task:
    return Task(task_id=f"t{number}", prompt=[Message(role="user", content="?")], reward_kwargs=columns)


def rollout(of: Task) -> Rollout:
    return Rollout("r", "g", 0, 0, of, None, (), list(of.prompt), StopReason.ANSWERED, Usage())


def results(scoring: Scoring, *tasks: Task) -> list[EvaluateResult]:
    return asyncio.run(scoring.evaluate([rollout(t) for t in tasks or (task(),)], step=4))


def test_a_function_given_in_python_runs_in_another_process(built: list[Scoring]) -> None:
    [result] = results(scoring_of(built, score, kwargs={"price": 0.25}))
    assert result.score == 0.75
    assert result.reason != str(os.getpid())
    assert not loaded_here


def test_a_file_is_not_imported_by_the_trainer(built: list[Scoring], tmp_path: Path) -> None:
    file = tmp_path / "r.py"
    file.write_text("import os\nWHERE = os.getpid()\ndef f(messages, ground_truth, step):\n    return float(WHERE)\n")
    [result] = results(scoring_of(built, function=f"{file}:f"))
    assert result.score != os.getpid()
    assert not any(getattr(module, "__file__", None) == str(file) for module in list(sys.modules.values()))


def test_the_mode_and_the_arguments_are_learned_from_the_worker(built: list[Scoring], tmp_path: Path) -> None:
    file = tmp_path / "r.py"
    file.write_text("def f(rollouts_messages, ground_truths, level, step):\n    return [l + step for l in level]\n")
    scoring = scoring_of(built, function=str(file) + ":f")
    assert scoring.rewards.parts[0].reward.mode == "batch"
    assert [r.score for r in results(scoring, task(0, level=1), task(1, level=2))] == [5.0, 6.0]
    with pytest.raises(RewardError, match="takes no argument 'prise'"):
        scoring_of(built, function=str(file) + ":f", kwargs={"prise": 1})


def test_a_missing_argument_is_found_before_the_run(built: list[Scoring], tmp_path: Path) -> None:
    file = tmp_path / "r.py"
    file.write_text("def f(messages, ground_truth, level, step, more=1):\n    return level\n")
    scoring = scoring_of(built, function=f"{file}:f")
    scoring.check([task(0, level=1)])
    with pytest.raises(RewardError, match=r"argument 'level', which task t1 does not have: set it in reward\.kwargs"):
        scoring.check([task(0, level=1), task(1)])
    scoring_of(built, function=f"{file}:f", kwargs={"level": 3}).check([task(1)])


VERL = """
def one(messages, ground_truth, data_source, extra_info=None):
    return {"score": extra_info["index"], "reason": data_source}

def batch(rollouts_messages, ground_truths, extra_info, data_source=()):
    return [{"score": info["index"], "reason": source} for info, source in zip(extra_info, data_source)]

def group(group_messages, ground_truth, extra_info, data_source=""):
    return [{"score": extra_info["index"], "reason": data_source}] * len(group_messages)

def other(messages, ground_truth, extra_info, data_source="none", **kwargs):
    return {"score": len(extra_info), "reason": data_source}

def plain(messages, ground_truth, **kwargs):
    return {"score": len(kwargs), "reason": ",".join(kwargs)}
"""


@pytest.mark.parametrize("tier", ["standard", "off"])
@pytest.mark.parametrize("name", ["one", "batch", "group"])
def test_extra_info_and_data_source_reach_functions_that_name_them(
    built: list[Scoring], tmp_path: Path, name: str, tier: str
) -> None:
    (tmp_path / "r.py").write_text(VERL)
    row = {"prompt": "?", "data_source": "math", "extra_info": {"index": 7, "tools": ["search"]}}
    scoring = scoring_of(built, function=f"{tmp_path / 'r.py'}:{name}", sandbox={"tier": tier, "workers": 1})
    read = read_task(Path("rows.jsonl"), 0, row, {})
    scoring.check([read])
    [result] = results(scoring, read)
    assert (result.score, result.reason) == (7.0, "math")


def test_a_row_without_them_gives_an_empty_extra_info_and_no_data_source(built: list[Scoring], tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(VERL)
    of = {name: scoring_of(built, function=f"{tmp_path / 'r.py'}:{name}") for name in ("one", "other", "plain")}
    of["other"].check([task()])
    assert [(r.score, r.reason) for r in results(of["other"])] == [(0.0, "none")]
    assert [r.reason for r in results(of["plain"], task(level=1))] == ["step,level"]
    with pytest.raises(RewardError, match="requires the argument 'data_source', which task t0 does not have"):
        of["one"].check([task()])


SLOW = """
import asyncio

async def one(messages, ground_truth):
    await asyncio.sleep(0.3)
    return 1.0

async def batch(rollouts_messages, ground_truths):
    await asyncio.sleep(0.3)
    return [1.0] * len(rollouts_messages)
"""


@pytest.mark.parametrize("name", ["one", "batch"])
def test_an_async_reward_has_its_timeout_without_a_sandbox_unless_it_is_trusted(
    built: list[Scoring], tmp_path: Path, name: str
) -> None:
    file = tmp_path / "r.py"
    file.write_text(SLOW)
    limits = {"tier": "off", "timeout_s": 0.1}
    [late] = results(scoring_of(built, function=f"{file}:{name}", sandbox=limits))
    assert late.error is not None
    assert (late.error.kind, late.error.message) == ("timeout", "it ran longer than 0.1 s and was cancelled")
    [trusted] = results(scoring_of(built, function=f"{file}:{name}", sandbox={**limits, "trusted": [str(file)]}))
    assert trusted.score == 1.0


def test_a_batch_wants_a_column_of_any_task(built: list[Scoring], tmp_path: Path) -> None:
    file = tmp_path / "r.py"
    file.write_text("def f(rollouts_messages, ground_truths, level):\n    return [0] * len(level)\n")
    scoring = scoring_of(built, function=f"{file}:f")
    scoring.check([task(0), task(1, level=1)])
    with pytest.raises(RewardError, match="which no task has"):
        scoring.check([task(0)])


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("def f(messages):\n    return 1", r"must take \(messages, ground_truth\)"),
        ("1 / 0", "ZeroDivisionError"),
        ("while True: pass", "took too long to be imported"),
        ("import os; os._exit(3)", "exited with status 3"),
        ("open('/etc/passwd')", "denied"),
        ("def g(messages, ground_truth): return 1", "has no 'f'"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(built: list[Scoring], tmp_path: Path, source: str, told: str) -> None:
    file = tmp_path / "r.py"
    file.write_text(source)
    with pytest.raises(ToolwiseError, match=told) as caught:
        scoring_of(built, function=f"{file}:f", sandbox={"timeout_s": 2})
    assert "\n" not in str(caught.value)
    assert "r" in str(caught.value)


def test_a_lambda_and_a_closure_are_refused_with_a_way_out(built: list[Scoring]) -> None:
    def inner(messages: Any, ground_truth: Any) -> float:
        return 2.0

    for function in (lambda messages, ground_truth: 1.0, inner):
        with pytest.raises(RewardError, match=r'loads a reward from its file.*or set reward\.sandbox\.tier = "off"'):
            scoring_of(built, function)
    scoring = scoring_of(built, inner, sandbox={"tier": "off"})
    assert results(scoring)[0].score == 2.0


def test_a_disabled_sandbox_is_reported_and_recorded(built: list[Scoring], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        scoring = scoring_of(built, score, sandbox={"tier": "off"})
    assert "off, as requested: user code runs in this process" in caplog.text
    assert "off, as requested" in scoring.describe()
    assert results(scoring)[0].reason == str(os.getpid())
    loaded_here.clear()


def test_trusted_modules_run_here_and_are_named(built: list[Scoring]) -> None:
    scoring = scoring_of(built, score, sandbox={"trusted": [__name__]})
    assert results(scoring)[0].reason == str(os.getpid())
    loaded_here.clear()
    assert "in the trainer's process: score" in scoring.describe()
    judge = scoring_of(built, function="toolwise.rewards.library.judge:judge_reward")
    assert judge.rewards.parts[0].reward.function is not None


def test_a_finished_reward_keeps_its_arguments(built: list[Scoring]) -> None:
    scoring = scoring_of(built, Reward.of(score, {"price": 0.5}))
    assert results(scoring)[0].score == 0.5
    assert not loaded_here


@pytest.mark.long
def test_several_rewards_are_each_loaded_by_their_own_worker(built: list[Scoring], tmp_path: Path) -> None:
    file = tmp_path / "r.py"
    file.write_text("def a(messages, ground_truth):\n    return 1\ndef b(messages, ground_truth):\n    return 10\n")
    parts = [{"function": f"{file}:a", "weight": 2.0}, {"function": f"{file}:b", "weight": 0.5}]
    (result,) = results(scoring_of(built, parts=parts))
    assert result.score == 7.0
    assert sorted(result.metrics) == ["a", "b"]  # not the paths
    parts[0]["name"] = "right"
    assert sorted(results(scoring_of(built, parts=parts))[0].metrics) == ["b", "right"]


def test_the_configuration_must_name_one(built: list[Scoring]) -> None:
    with pytest.raises(ConfigError, match=r"reward\.function is missing"):
        scoring_of(built)
    with pytest.raises(ConfigError, match="both set"):
        scoring_of(built, function="a:b", parts=[{"function": "a:b"}])


@pytest.mark.parametrize(
    ("uses", "told"),
    [
        ("1.0", "batch_size 16 is more than the 1 tasks"),  # the reward was loaded; the data is checked next
        ("len(held)", 'importing script.py would run it again: put what it runs under `if __name__ == "__main__":`'),
    ],
)
def test_a_script_without_a_guard_is_not_run_again(
    tmp_path: Path, uses: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import toolwise\nheld = iter([])\n"
        f"def score(messages, ground_truth):\n    return {uses}\n"
        "toolwise.train(tasks=[{'prompt': '?', 'ground_truth': 1}], reward=score, out='run')\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ToolwiseError, match=re.escape(told)):
        runpy.run_path(str(script), run_name="__main__")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("stop", [StopReason.PROMPT_TOO_LONG, StopReason.POLICY_FAULT, StopReason.ENV_FAULT])
def test_a_rollout_without_an_answer_is_not_scored(stop: StopReason, built: list[Scoring]) -> None:
    """Its messages are the prompt alone."""
    answered = rollout(task())
    silent = replace(answered, stop_reason=stop, fault="too long")
    scoring = scoring_of(built, score)
    before, first, after = asyncio.run(scoring.evaluate([silent, answered, silent], step=0))
    assert first.score == 1.0
    assert before == after
    assert (before.score, before.has_valid_score, before.error) == (None, False, None)
    assert before.reason == f"not scored, the agent never acted: {stop.value}: too long"
    assert asyncio.run(scoring.evaluate([silent], step=0)) == [before]


def half(messages: Any, ground_truth: Any) -> float:
    return 0.5


def test_a_list_of_rewards_is_their_sum(built: list[Scoring], tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("def half(messages, ground_truth):\n    return 0.25\n")
    scoring = scoring_of(built, [half, (half, 2.0), f"{tmp_path / 'r.py'}:half"])
    [result] = results(scoring)
    assert result.score == 0.5 + 1.0 + 0.25
    assert {name: metric.score for name, metric in result.metrics.items()} == {
        "test_scoring:half": 0.5,
        "test_scoring:half-2": 0.5,
        "r:half": 0.25,
    }
    assert results(scoring_of(built, (half, 3.0)))[0].score == 1.5
    assert results(scoring_of(built, [half], sandbox={"tier": "off"}))[0].score == 0.5


def test_a_list_that_makes_no_rewards_is_refused() -> None:
    for given, said in (
        ([], "empty list"),
        ([half, 3], "a part is a int"),
        ([(half, "much")], "a part is a tuple"),
    ):
        with pytest.raises(ConfigError, match=said):
            build_scoring(RewardConfig(), given)
    with pytest.raises(ConfigError, match=r"reward\.kwargs applies to a single reward"):
        build_scoring(RewardConfig(kwargs={"price": 1.0}), [half, score])


def test_prints_are_reported_with_their_step_and_rollout(built: list[Scoring], tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        "import logging, warnings\nprint('loaded')\n"
        "def f(messages, ground_truth, n):\n"
        "    print('printed', n); logging.warning('logged %s', n); warnings.warn(f'warned {n}')\n"
        "    return 1.0\n"
    )
    told: list[tuple[str, str]] = []
    scoring = scoring_of(built, function=f"{tmp_path / 'r.py'}:f")
    scoring.set_print_callback(lambda label, text: told.append((label, text)))
    rollouts = [dataclasses.replace(rollout(task(i, n=i)), rollout_id=f"r{i}") for i in range(3)]
    asyncio.run(scoring.evaluate(rollouts, step=4))
    assert ("on import", "loaded\n") in told
    texts = dict(told)
    for number in range(3):
        text = texts[f"step 4, r{number}"]
        assert text.splitlines()[:2] == [f"printed {number}", f"WARNING:root:logged {number}"]
        assert f"warned {number}" in text
