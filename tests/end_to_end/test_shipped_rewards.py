"""Every reward that we ship, under every estimator: succeeding must be worth more than failing, and training for twenty
steps must not unlearn the task. Rewards with a price on each step once did: the final score was left out."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import runpy
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import toolwise
from toolwise.advantages import ESTIMATORS, Gigpo, Hgpo, Rlvcr, credit
from toolwise.messages import Message, ToolCall
from toolwise.rewards.align import align_rollouts
from toolwise.rewards.combine import CompositeReward, WeightedReward
from toolwise.rewards.executor import EPISODE_REWARDS, InProcessExecutor, episode_reward, score_episodes
from toolwise.rewards.function import Reward
from toolwise.types import AnnotatedRollout, EvaluateResult, Rollout, StepData, StopReason, Task, Usage

ROOT = Path(__file__).parents[2]
EXAMPLES, STARTERS = ROOT / "examples", ROOT / "src" / "toolwise" / "checks" / "reward" / "starters"
LIBRARY = "toolwise.rewards.library"
TASK_REWARD = f"{EXAMPLES / 'my_rewards.py'}:right_and_thrifty"
JUDGE_URL = "the loopback server's"
"""Stands for the address of the judge that the tests serve."""


def the_number(town: str, number: int) -> Any:
    return str(number)


def the_call(town: str, number: int) -> Any:
    return [{"name": "search", "arguments": {"query": f"{town} bridges"}}]


def the_call_as_text(town: str, number: int) -> Any:
    call = json.dumps({"name": "search", "parameters": {"query": f"{town} bridges"}})
    return f"<think>I look it up.</think>\n<tool_call>\n{call}\n</tool_call>"


@dataclass(frozen=True)
class Shipped:
    """A reward, and the figure of a validation by which it is judged: "-cost" means that less is better."""

    reference: str
    """As in a configuration; "docs/page.md:name" is a function in a snippet of that page."""
    metric: str = "correct"
    kwargs: tuple[tuple[str, Any], ...] = ()
    beside: float | None = None
    """For a reward that does not know the task: its weight beside the reward for the right answer."""
    truth: Callable[[str, int], Any] = the_number
    """The ground truth that it expects, from a town and the number of its bridges."""
    lowest: float = 0.0
    """The least that it gives."""


REWARDS = {
    "starter, pointwise": Shipped(f"{STARTERS / 'pointwise.py'}:my_reward"),
    "starter, batch": Shipped(f"{STARTERS / 'batch.py'}:my_reward"),
    "starter, group": Shipped(f"{STARTERS / 'group.py'}:my_reward"),
    "my_rewards, pointwise": Shipped(TASK_REWARD),
    # These two compare rollouts with each other, by length and by calls alone.
    "my_rewards, batch": Shipped(f"{EXAMPLES / 'my_rewards.py'}:shortest_of_the_batch", "-tokens"),
    "my_rewards, group": Shipped(f"{EXAMPLES / 'my_rewards.py'}:rank_within_the_task", "-cost"),
    "quickstart": Shipped(f"{EXAMPLES / 'quickstart.py'}:right_and_thrifty", "score"),
    "five routes": Shipped(f"{EXAMPLES / 'five_routes' / 'reward.py'}:right_answer", "score"),
    "calculator use": Shipped(f"{EXAMPLES / 'calculator_use.py'}:calls_work", beside=0.2),
    "docs, score": Shipped("docs/rewards.md:score", "score"),
    "docs, thrifty": Shipped("docs/rewards.md:thrifty", "score"),
    "docs, right and thrifty": Shipped("docs/rewards.md:right_and_thrifty"),
    "demo": Shipped("toolwise.demo.reward:small_world_reward"),
    "exact match": Shipped(f"{LIBRARY}.matching:exact_match_reward", "score", (("after", "Answer:"),)),
    "numeric match": Shipped(f"{LIBRARY}.matching:numeric_match_reward", "score", (("after", "Answer:"),)),
    "gsm8k": Shipped(f"{LIBRARY}.gsm8k:gsm8k_reward", "score", (("method", "flexible"),)),
    "otc": Shipped(f"{LIBRARY}.otc:otc_reward", "correct", (("correct", "toolwise.demo.reward"),)),
    "judge": Shipped(f"{LIBRARY}.judge:judge_reward", "score", (("base_url", JUDGE_URL), ("model", "m"))),
    "rlla": Shipped(f"{LIBRARY}.rlla:rlla_reward", "score", truth=the_call_as_text, lowest=-3.0),
    "call match": Shipped(f"{LIBRARY}.calls:call_match_reward", "score", truth=the_call),
    "schema": Shipped(
        f"{LIBRARY}.calls:schema_reward",
        kwargs=(("tool_schemas", [{"name": "search", "parameters": {"type": "object", "required": ["query"]}}]),),
        beside=0.2,
    ),
    "length": Shipped(f"{LIBRARY}.shaping:length_reward", kwargs=(("high_words", 80),), beside=0.2),
    "format": Shipped(f"{LIBRARY}.shaping:format_reward", kwargs=(("tags", ["answer"]),), beside=0.1),
    "thinking format": Shipped("toolwise.thinking.format_metrics:format_reward", beside=0.1),
}
PRICED = ("starter, pointwise", "my_rewards, pointwise", "docs, thrifty", "docs, right and thrifty")
"""Those with a price on each step in `step_outputs`."""


@pytest.fixture(scope="module")
def judge_url() -> Iterator[str]:
    """A judge that gives the most for a last message with the reference answer in it, else the least."""

    class Judge(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            question = body["messages"][-1]["content"]
            reference = re.search(r"^Reference answer: (.*)$", question, re.MULTILINE)
            last = json.loads(question.splitlines()[-2])
            assert reference is not None
            score = 10 * (last["role"] == "assistant" and reference[1] in (last["content"] or ""))
            reply = json.dumps({"choices": [{"message": {"content": json.dumps({"score": score})}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def python_snippets(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def reward_of(name: str, folder: Path, judge_url: str = "") -> tuple[str, dict[str, Any]]:
    shipped = REWARDS[name]
    kwargs = {key: judge_url if value == JUDGE_URL else value for key, value in shipped.kwargs}
    page, _, function = shipped.reference.partition(".md:")
    if not function:
        return shipped.reference, kwargs
    # A snippet may use the functions of those before it.
    snippets = python_snippets(ROOT / f"{page}.md")
    last = max(index for index, text in enumerate(snippets) if f"def {function}(" in text)
    path = folder / "documented.py"
    path.write_text("\n".join(text for text in snippets[: last + 1] if reward_names(text)), encoding="utf-8")
    return f"{path}:{function}", kwargs


# None is left out.

FIRST_TWO = (("messages", "ground_truth"), ("rollouts_messages", "ground_truths"), ("group_messages", "ground_truth"))


def reward_names(source: str, *, decorated: bool = False) -> list[str]:
    """The functions in `source` that are rewards: by their decorator, or else by their first two parameters."""
    return [
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (
            any("reward_function" in ast.unparse(decorator) for decorator in node.decorator_list)
            or (not decorated and tuple(argument.arg for argument in node.args.args[:2]) in FIRST_TWO)
        )
    ]


def shipped_functions() -> set[str]:
    """ "file:name" of each reward in the package, where all are decorated, in the examples and on the pages."""
    files = [*(ROOT / "src").rglob("*.py"), *EXAMPLES.rglob("*.py")]
    sources = [(path, path.read_text(encoding="utf-8")) for path in files]
    quickstart = (EXAMPLES / "quickstart.py").read_text(encoding="utf-8").strip()
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        sources += [(page, text) for text in python_snippets(page) if text.strip() != quickstart]
    return {
        f"{path.relative_to(ROOT)}:{name}"
        for path, source in sources
        if "ground_truth" in source
        for name in reward_names(source, decorated=(ROOT / "src") in path.parents)
    }


def file_and_name(reference: str) -> str:
    place, _, name = reference.rpartition(":")
    if place.startswith("toolwise."):
        place = f"src/{place.replace('.', '/')}.py"
    return f"{place.removeprefix(f'{ROOT}/')}:{name}"


def test_no_shipped_reward_is_left_out() -> None:
    assert {file_and_name(shipped.reference) for shipped in REWARDS.values()} == shipped_functions()


# At the level of arrays. A rollout that looks the answer up and one that guesses wrong.

CASES = {**ESTIMATORS, "rlvcr over gigpo": lambda: Rlvcr(trajectory=Gigpo())}


def rollout_of(
    name: str, calls: int, answer: str, prices: tuple[float, ...] | None, ground_truth: Any = "37"
) -> Rollout:
    """`prices`: what the world said of each step, as a tool or an environment may."""
    task = Task(task_id="t", prompt=[Message(role="user", content="How many?")], ground_truth=ground_truth)
    call = ToolCall(name="search", arguments={"query": "Velora bridges"})
    messages = [*task.prompt]
    for _ in range(calls):
        messages += [Message(role="assistant", content="", tool_calls=[call])]
        messages += [Message(role="tool", content="Velora has 37 bridges.")]
    messages += [Message(role="assistant", content=answer)]
    steps = [
        StepData(
            system_step_index=index,
            observation_data=None,
            action_taken={"type": "text"},
            resulting_messages_history=[],
            policy_logprobs={"prompt_ids": [1], "token_ids": [2, 3], "logprobs": [-1.0, -1.0]},
            step_info={"state_key": f"s{index}", "assistant_turn_index": index},
            base_reward=None if prices is None else prices[index],
        )
        for index in range(calls + 1)
    ]
    return Rollout(name, "g", 0, 0, task, None, tuple(steps), tuple(messages), StopReason.ANSWERED, Usage())


def annotated(rollouts: list[Rollout], results: list[EvaluateResult]) -> list[AnnotatedRollout]:
    zeros = [tuple(np.zeros(2, np.float32) for _ in r.steps) for r in rollouts]
    return [
        AnnotatedRollout(scored, values=values)
        for scored, values in zip(align_rollouts(rollouts, results), zeros, strict=True)
    ]


def assert_success_is_worth_more(estimator: Any, better: AnnotatedRollout, worse: AnnotatedRollout) -> None:
    """For its first decision and for its last, and by more than rounding."""
    good, bad = credit(estimator, [better, worse]).rollouts
    assert good.advantages[-1].mean() > bad.advantages[-1].mean() + 0.1
    assert good.advantages[0].mean() > bad.advantages[0].mean() + 0.1


@pytest.mark.parametrize("estimator", CASES)
@pytest.mark.parametrize("name", REWARDS)
def test_success_is_worth_more_than_failure(name: str, estimator: str, judge_url: str, tmp_path: Path) -> None:
    reference, kwargs = reward_of(name, tmp_path, judge_url)
    shipped = REWARDS[name]
    truth = shipped.truth("Velora", 37)
    # The one that fails makes no call, so its steps cost less; unless calls are all that the reward looks at.
    looked_up = rollout_of("good", 1, "Answer: 37", (-0.05, 0.0), truth)
    guessed = rollout_of("bad", 0, "Answer: well, it might be 1234", (0.0,), truth)
    pair = [guessed, looked_up] if name == "my_rewards, group" else [looked_up, guessed]
    parts = [WeightedReward(Reward.of(reference, kwargs), shipped.beside or 1.0)]
    if shipped.beside is not None:
        parts.append(WeightedReward(Reward.of(TASK_REWARD, {})))
    results = asyncio.run(CompositeReward(tuple(parts)).evaluate(InProcessExecutor(), pair, step=0))
    assert all(result.has_valid_score for result in results), results
    assert_success_is_worth_more(CASES[estimator](), *annotated(pair, results))


@pytest.mark.parametrize("how", ["remainder", "add"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("contains", [True, False], ids=["score contains the prices", "score beside the prices"])
def test_both_kinds_of_score_prefer_success(contains: bool, estimator: str, how: str) -> None:
    """Right or wrong, and a price on each call: whether the score has the prices in it or not."""
    rollouts = [rollout_of("good", 1, "Answer: 37", (-0.05, 0.0)), rollout_of("bad", 0, "Answer: 1", (0.0,))]
    results = [EvaluateResult(score=0.95 if contains else 1.0), EvaluateResult(score=0.0)]
    made = ESTIMATORS[estimator](**({} if estimator == "rlvcr" else {"terminal_score": how}))
    assert_success_is_worth_more(made, *annotated(rollouts, results))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("name", EPISODE_REWARDS)
def test_what_an_episode_earned_prefers_success(name: str, estimator: str) -> None:
    rollouts = [rollout_of("good", 1, "37", (-0.05, 1.0)), rollout_of("bad", 0, "1", (0.0,))]
    rollouts = [
        replace(r, tool_rewards={"x": worth}, result=EvaluateResult(score=worth))
        for r, worth in zip(rollouts, (1.0, 0.0), strict=True)
    ]
    assert_success_is_worth_more(ESTIMATORS[estimator](), *annotated(rollouts, score_episodes(name, rollouts)))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_format_reward_beside_the_world_s_does_not_hide_it(estimator: str) -> None:
    """Its step rewards take the place of the world's: what the world said is still in the score."""
    rollouts = [rollout_of("good", 1, "37", (0.0, 1.0)), rollout_of("bad", 1, "1", (0.0, 0.0))]
    parts = CompositeReward(
        (
            WeightedReward(episode_reward("env")),
            WeightedReward(Reward.of("toolwise.thinking.format_metrics:format_reward", {}), 0.1),
        )
    )
    results = asyncio.run(parts.evaluate(Mixed(), rollouts, step=0))
    made = annotated(rollouts, results)
    assert [step.base_reward for step in made[0].scored.steps] == [0.0, 0.0]
    good, bad = credit(ESTIMATORS[estimator](), made).rollouts
    assert good.advantages[-1].mean() > bad.advantages[-1].mean() + 0.1


class Mixed(InProcessExecutor):
    """Functions in this process, an episode's own earnings looked up, as a run's executor does."""

    async def evaluate(self, reward: Reward, rollouts: Any, *, step: int) -> list[EvaluateResult]:
        if reward.reference in EPISODE_REWARDS:
            return score_episodes(reward.name, rollouts)
        return await super().evaluate(reward, rollouts, step=step)


@pytest.mark.parametrize("kind", [Gigpo, Hgpo])
@pytest.mark.parametrize("name", PRICED)
def test_step_level_credit_alone_prefers_success_too(name: str, kind: Callable[..., Any], tmp_path: Path) -> None:
    """Without the part that compares whole rollouts: the state that both began in."""
    rollouts = [rollout_of("good", 1, "Answer: 37", None), rollout_of("bad", 0, "Answer: 1", None)]
    reward = Reward.of(*reward_of(name, tmp_path))
    results = asyncio.run(InProcessExecutor().evaluate(reward, rollouts, step=0))
    made = annotated(rollouts, results)
    assert all(step.base_reward is not None for one in made for step in one.scored.steps)
    good, bad = credit(kind(omega=0.0), made).rollouts
    assert good.advantages[0].mean() > bad.advantages[0].mean() + 0.1


def test_every_estimator_over_steps_is_among_them() -> None:
    assert {name for name, make in CASES.items() if make().uses_step_rewards} == {
        "gigpo",
        "hgpo",
        "gae",
        "reinforce_plus_plus",
        "rlvcr over gigpo",
    }


# On the whole path: a model that can do the task, twenty steps of training, and the task again.

STEPS = 20
QUICKSTART = EXAMPLES / "quickstart.py"


def trained(
    reward: dict[str, Any],
    algorithm: dict[str, Any],
    model: str,
    out: Path,
    steps: int,
    truth: Callable[[str, int], Any] = the_number,
) -> Any:
    towns = runpy.run_path(str(QUICKSTART))["bridges"]
    rows = [
        {"prompt": f"How many bridges does {town} have?", "ground_truth": truth(town, number)}
        for town, number in towns.items()
    ]
    settings = {
        "actor": {"lr": 2e-4},
        "critic": {"lr": 1e-3},  # GAE's: with the default of 1e-5 it has learned nothing after twenty steps
        "data": {"batch_size": 8},
        "reward": reward,
        "algorithm": algorithm,
        "trainer": {"total_steps": steps, "console": False, "save_every": 1000},
    }
    return toolwise.train(settings, model=model, tasks=rows[:8], val=rows[8:], tools=[f"{QUICKSTART}:search"], out=out)


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model that ships, after six steps of the quickstart: it looks things up, not yet every time."""
    out = tmp_path_factory.mktemp("taught") / "run"
    result = trained({"function": TASK_REWARD}, {}, "builtin:small", out, 6)
    assert result.summary["after"]["correct"] >= 0.75
    return str(out / "checkpoints" / "step-000006" / "model")


@pytest.mark.long
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("name", REWARDS)
def test_twenty_steps_do_not_unlearn_the_task(
    name: str, estimator: str, taught: str, judge_url: str, tmp_path: Path
) -> None:
    algorithm: dict[str, Any] = {"adv_estimator": estimator}
    if estimator == "rlvcr":
        algorithm["rlvcr"] = {"enable": True, "base": "gigpo", "share": 0.0}
    reference, kwargs = reward_of(name, tmp_path, judge_url)
    shipped = REWARDS[name]
    reward: dict[str, Any] = {"function": reference, "kwargs": kwargs}
    if shipped.beside is not None:
        reward = {"parts": [{"function": TASK_REWARD}, {**reward, "name": "beside", "weight": shipped.beside}]}
    summary = trained(reward, algorithm, taught, tmp_path / "run", STEPS, shipped.truth).summary
    metric = shipped.metric
    before, after = (summary[when][metric.removeprefix("-")] for when in ("before", "after"))
    print(f"{name}, {estimator}: {metric} {before:.3f} -> {after:.3f}")
    cheaper = summary["after"]["cost"] < summary["before"]["cost"]
    if metric.startswith("-"):
        assert after <= 1.1 * before + 0.1
    elif estimator == "pareto" and cheaper:  # it ranks a wrong answer for nothing no lower than a right one for a call
        assert after - shipped.lowest >= 0.5 * (before - shipped.lowest)
    else:
        assert after >= before - 0.13  # one question of eight
