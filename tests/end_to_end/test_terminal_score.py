"""`algorithm.terminal_score` as a user meets it: configuration, the line at the start, the warning, old run folders."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from toolwise.advantages import build_estimator
from toolwise.config.loader import note_renamed
from toolwise.config.schema import RunConfig, load_config
from toolwise.errors import ConfigError
from toolwise.training.changes import changes_since, check_same_run
from toolwise.training.components import load_estimator
from toolwise.training.loop import select_groups
from toolwise.types import AnnotatedRollout, EvaluateResult, ScoredRollout, StepData

Cli = Callable[..., Any]
MakeConfig = Callable[..., Path]

LINE = "advantages: gigpo sees score on the last step, step rewards at each step"

BESIDE = """
from toolwise import EvaluateResult, StepOutput

def judge(rollouts_messages, ground_truths):
    # The score says nothing of the prices, which differ from rollout to rollout.
    results = []
    for place, messages in enumerate(rollouts_messages):
        steps = sum(m.role == "assistant" for m in messages)
        outputs = [StepOutput(step_index=i, base_reward=-0.1 * (place + 1)) for i in range(steps)]
        results.append(EvaluateResult(score=float(place % 4 == 0), step_outputs=outputs))
    return results
"""


@pytest.fixture(autouse=True)
def note_again() -> Iterator[None]:
    """The note on an old name comes once a process, and each test is to see it."""
    note_renamed.cache_clear()
    yield
    note_renamed.cache_clear()


# The setting.


def test_the_default_is_the_remainder() -> None:
    config = RunConfig()
    assert config.algorithm.terminal_score == "remainder"
    for name in ("grpo", "rloo", "gigpo", "hgpo", "gae", "reinforce_plus_plus", "hdpo", "pareto"):
        made: Any = build_estimator(name)
        assert made.terminal_score == "remainder"


@pytest.mark.parametrize(("old", "now"), [("auto", "remainder"), ("always", "add")])
def test_old_names_are_read_with_a_note(old: str, now: str, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        config = RunConfig.model_validate({"algorithm": {"adv_estimator": "gigpo", "terminal_score": old}})
        assert config.algorithm.terminal_score == now
    made: Any = load_estimator(config)
    assert made.terminal_score == now
    assert caplog.messages == [f'algorithm.terminal_score = "{old}" is an old name for "{now}": please use the new one']


def test_other_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[algorithm]\nterminal_score = "maybe"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"`algorithm\.terminal_score` must be 'remainder', 'add' or 'never'"):
        load_config(tmp_path / "run.toml")


def test_every_estimator_gets_the_setting() -> None:
    for name in ("grpo", "rloo", "gigpo", "hgpo", "gae", "reinforce_plus_plus", "hdpo", "pareto"):
        config = RunConfig.model_validate({"algorithm": {"adv_estimator": name, "terminal_score": "add"}})
        made: Any = load_estimator(config)
        assert made.terminal_score == "add"
    rlvcr = {"adv_estimator": "rlvcr", "terminal_score": "add", "rlvcr": {"enable": True}}
    found: Any = load_estimator(RunConfig.model_validate({"algorithm": rlvcr}))  # what RLVCR adds to
    assert found.terminal_score == "add"


# What is learned from.


def scored(score: float, *rewards: float | None) -> ScoredRollout:
    from toolwise.messages import Message
    from toolwise.types import Rollout, StopReason, Task, Usage

    steps = tuple(
        StepData(
            system_step_index=index,
            observation_data=None,
            action_taken={"type": "text"},
            resulting_messages_history=[],
            policy_logprobs={"prompt_ids": [1], "token_ids": [2], "logprobs": [-1.0]},
            base_reward=reward,
        )
        for index, reward in enumerate(rewards)
    )
    task = Task(task_id="t", prompt=[Message(role="user", content="?")])
    rollout = Rollout(f"r{score}{rewards}", "g", 0, 0, task, None, steps, task.prompt, StopReason.ANSWERED, Usage())
    return ScoredRollout(rollout, EvaluateResult(score=score), steps)


def test_grpo_compares_score_and_step_rewards_together_where_they_are_added() -> None:
    """1 − 0.5 and 1: by hand ∓0.25 around 0.75. With the remainder both are 1, and there is nothing to learn."""
    batch = [AnnotatedRollout(scored(1.0, -0.5, None)), AnnotatedRollout(scored(1.0, 0.0))]
    for name in ("grpo", "rloo"):
        add = build_estimator(name, terminal_score="add", norm_by_std=False)(batch).rollouts
        scale = 1.0 if name == "grpo" else 2.0
        assert [c.steps[0].advantage for c in add] == [-0.25 * scale, 0.25 * scale]
        assert [c.steps[0].advantage for c in build_estimator(name)(batch).rollouts] == [0.0, 0.0]


def test_a_group_that_differs_in_step_rewards_alone_is_kept_where_they_are_added() -> None:
    group = [scored(1.0, -0.5, None), scored(1.0, 0.0)]
    for how, kept in (("remainder", []), ("add", group), ("never", [])):
        rewards = build_estimator("grpo", terminal_score=how).rewards
        found = select_groups(group, keeps_equal=lambda score: False, rewards=rewards)
        assert found[0] == kept
    assert select_groups(group, keeps_equal=lambda score: False)[0] == []


# A run.


def test_a_run_says_once_what_its_estimator_will_see(tiny_run: Path) -> None:
    line = "advantages: grpo sees the score of each rollout; step rewards are not used"
    out = (tiny_run.parent / "stdout.txt").read_text(encoding="utf-8")
    assert out.count(line) == 1
    assert out.index(line) < out.index("validation")
    assert json.loads((tiny_run / "summary.json").read_bytes())["advantages"].startswith(line)


@pytest.mark.long
def test_without_a_console_the_log_has_it(
    tmp_path: Path, make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    import toolwise

    changes = {"algorithm": {"adv_estimator": "gigpo", "terminal_score": "never"}, "validation": {"before": False}}
    config = make_config(tmp_path, {**changes, "trainer": {"total_steps": 1, "console": False}})
    toolwise.train(config, out=tmp_path / "run")
    (told,) = [record for record in caplog.records if record.getMessage().startswith("advantages: gigpo sees")]
    assert told.levelno == logging.WARNING  # where the score is left out, also for those who read warnings alone
    assert "the score is not part of the returns" in told.getMessage()


def test_a_score_that_does_not_contain_the_step_rewards_is_warned_about_once(
    tmp_path: Path, cli: Cli, make_config: MakeConfig
) -> None:
    (tmp_path / "judge.py").write_text(BESIDE, encoding="utf-8")
    changes = {
        "reward": {"function": "judge.py:judge", "sandbox": {"tier": "off"}},
        "algorithm": {"adv_estimator": "gigpo"},
        "rollout": {"n": 4, "max_new_tokens": 8},
        "multi_turn": {"max_turns": 1},
        "validation": {"before": False},
        "trainer": {"total_steps": 2, "save_every": 10},
    }
    ended = cli("train", make_config(tmp_path, changes), "--out", tmp_path / "run")
    assert ended.status == 0, ended.err
    assert ended.out.count(LINE) == 1
    assert (ended.out + ended.err).count('set algorithm.terminal_score = "add"') == 1


# Old run folders.


def aged(run: Path, copy: Path, old: str) -> Path:
    """A copy of a run's folder, with an old name in its configuration."""
    shutil.copytree(run, copy)
    path = copy / "config.toml"
    text = path.read_text(encoding="utf-8")
    assert 'terminal_score = "remainder"' in text
    path.write_text(text.replace('terminal_score = "remainder"', f'terminal_score = "{old}"'), encoding="utf-8")
    return copy


@pytest.mark.long
def test_an_old_run_goes_on_and_is_evaluated_with_a_note(tiny_run: Path, tmp_path: Path, cli: Cli) -> None:
    run = aged(tiny_run, tmp_path / "run", "auto")
    note = 'algorithm.terminal_score = "auto" is an old name for "remainder"'
    evaluated = cli("eval", run)
    assert evaluated.status == 0, evaluated.err
    assert evaluated.err.count(note) == 1
    note_renamed.cache_clear()
    config = tiny_run.parent / "run.toml"
    ended = cli("train", config, "--out", run, "--resume", "--set", "trainer.total_steps=3")
    assert ended.status == 0, ended.err
    assert ended.err.count(note) == 1
    assert "changed settings" not in ended.err
    assert 'terminal_score = "remainder"' in (run / "config.toml").read_text(encoding="utf-8")


def test_a_checkpoint_saved_under_an_old_name_is_of_the_same_settings(tiny_run: Path, tmp_path: Path) -> None:
    run = aged(tiny_run, tmp_path / "run", "always")
    config = RunConfig.model_validate({"algorithm": {"terminal_score": "add"}})
    assert changes_since({"algorithm": {"terminal_score": "always"}}, config, tmp_path) == []
    assert changes_since({"algorithm": {"terminal_score": "auto"}}, RunConfig(), tmp_path) == []
    check_same_run(load_config(tiny_run.parent / "run.toml", ["algorithm.terminal_score=add"]), run / "config.toml")
    with pytest.raises(ConfigError, match=r"algorithm\.terminal_score: add → remainder"):
        check_same_run(load_config(tiny_run.parent / "run.toml"), run / "config.toml")
