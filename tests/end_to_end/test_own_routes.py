"""Routes of a user's own, from a TOML file to training, checkpoints, evaluation, exports and answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from toolwise import RoutedAgent
from toolwise.data.files import write_rows
from toolwise.demo.tasks import make_rows
from toolwise.errors import ConfigError
from toolwise.models import load_model
from toolwise.policies.local import LocalPolicy
from toolwise.protocols import Sampling
from toolwise.serve import ServedModel, Server, build_app
from toolwise.training.records import read_records

torch.set_num_threads(1)
Cli = Callable[..., Any]

THREE = """
name = "own"
deterministic = true
tools = ["calculator", "search"]
[model]
path = "builtin:small"
[data]
train = "train.jsonl"
val = "val.jsonl"
batch_size = 4
[rollout]
n = 6
max_new_tokens = 32
[multi_turn]
max_turns = 3
[reward]
function = "toolwise.demo.reward:small_world_reward"
kwargs = { price_per_call = 0.0 }
sandbox = { trusted = ["toolwise.demo.reward"] }
[actor]
lr = 1e-4
[algorithm]
zero_std_groups = "keep"
[trainer]
total_steps = 2
save_every = 1
console = false
[validation]
before = false
[router]
enable = true
cost = "calls"
calibration = 0.25
calibration_rollouts = 3
[[router.budgets]]
limit = 0.5
[router.policies.expert]
base_url = "URL"
model = "expert"
[[router.routes]]
name = "myself"
max_new_tokens = 16
[[router.routes]]
name = "look-up"
tools = ["search"]
[[router.routes]]
name = "ask-expert"
policy = "expert"
price = 1.0
"""
FIVE = (
    THREE.replace(
        'tools = ["calculator", "search"]',
        'tools = ["calculator", "search", { name = "python", price = 2.0 }, '
        '{ name = "mcp", command = ["mcp-server-time"] }]',
    )
    .replace(
        '[[router.routes]]\nname = "ask-expert"',
        """[[router.routes]]
name = "calculate"
tools = ["calculator"]
[[router.routes]]
name = "run-code"
families = ["code"]
note = "You may write a program: {{ first | join(', ') }}."
[[router.routes]]
name = "clock"
families = ["CLOCK"]
[[router.routes]]
name = "ask-expert\"""",
    )
    .replace(
        "[[router.budgets]]",
        '[router.families]\npython = "CODE"\nget_current_time = "CLOCK"\nconvert_time = "clock"\n[[router.budgets]]',
    )
)


@pytest.fixture(scope="module")
def expert() -> Iterator[str]:
    """The URL of a second model."""
    model, chat = load_model("builtin:small", device="cpu")
    served = ServedModel.of(LocalPolicy(model, chat, Sampling(max_new_tokens=16)), "expert")
    with Server(build_app(served)) as server:
        yield server.url


def write_project(folder: Path, toml: str, url: str, *, more: tuple[str, ...] = (), count: int = 260) -> Path:
    """Tasks of which every second one has no search, and every fourth the tools in `more`."""
    for name, split, rows in (("train", "train", count), ("val", "heldout", 4)):
        made = list(make_rows(rows, seed=0, split=split, kinds=("known", "lookup", "arithmetic")))
        for index, row in enumerate(made):
            kept = row["tools"] if index % 2 else ["calculator"]
            row["tools"] = [*kept, *(more if index % 4 == 0 else ())]
            row["extra_info"]["has_search"] = "search" in kept
            if "search" not in kept:
                del row["extra_info"]["tools_kwargs"], row["extra_info"]["need_tools_kwargs"]
        write_rows(made, folder / f"{name}.jsonl")
    config = folder / "own.toml"
    config.write_text(toml.replace("URL", url), encoding="utf-8")
    return config


@pytest.fixture(scope="module")
def trained(expert: str, tmp_path_factory: pytest.TempPathFactory, cli: Cli) -> Path:
    folder = tmp_path_factory.mktemp("own")
    ended = cli("train", write_project(folder, THREE, expert), "--out", folder / "run")
    assert ended.status == 0, ended.err
    return folder / "run"


def step_records(run: Path, pattern: str = "step-*.jsonl") -> list[Any]:
    return [record for file in sorted((run / "rollouts").glob(pattern)) for record in read_records(file)]


def test_every_route_that_applies_is_tried_alike(trained: Path) -> None:
    """Six rollouts over three routes, or over two where the task has no search."""
    tried: dict[str, list[str | None]] = {}
    for record in step_records(trained):
        tried.setdefault(record.group_id.rpartition("/")[0], []).append(record.route)
        assert record.extra_info["has_search"] or record.route != "look-up"
    shares = {tuple(sorted({route: routes.count(route) for route in routes}.items())) for routes in tried.values()}
    assert shares <= {
        (("ask-expert", 2), ("look-up", 2), ("myself", 2)),
        (("ask-expert", 3), ("myself", 3)),
    }
    assert len(shares) == 2


def test_another_model_teaches_the_router_only_and_is_priced(trained: Path) -> None:
    records = step_records(trained)
    asked = [record for record in records if record.route == "ask-expert"]
    assert {record.answered_by for record in asked} == {"expert"}
    assert all(record.cost == 1.0 and record.trained_on is False and record.score is not None for record in asked)
    assert all(record.router_advantages is not None for record in asked)
    assert any(record.trained_on for record in records if record.route == "myself")
    assert {record.answered_by for record in records if record.route != "ask-expert"} == {""}


def test_a_route_limits_its_replies(trained: Path) -> None:
    lengths = {
        r: [s.tokens for x in step_records(trained) if x.route == r for s in x.steps] for r in ("myself", "look-up")
    }
    assert max(lengths["myself"]) <= 16 < max(lengths["look-up"]) <= 32


def test_the_records_say_what_the_router_did(trained: Path) -> None:
    for record in step_records(trained):
        assert record.router_log_prob is not None
        assert record.router_log_prob < 0
        logits = record.router_logits
        assert len(logits) == 3
        assert [logit is None for logit in logits] == [False, not record.extra_info["has_search"], False]
        assert record.used_any_tool is bool(record.calls)
        assert record.used_search is ("search" in record.calls)
        assert record.used_calculate is False
        assert record.router_returns == record.router_advantages
    (checked, *_) = [r for r in step_records(trained, "step-000001.jsonl") if r.route == "look-up"]
    assert checked.router_token_level_rewards == pytest.approx(checked.score)  # λ is 0 in the first step


def test_it_is_calibrated_evaluated_and_asked(trained: Path, cli: Cli) -> None:
    summary = json.loads((trained / "summary.json").read_text("utf-8"))
    assert summary["calibration"]["rolled_out"] == 3
    ended = cli("eval", trained)
    assert ended.status == 0, ended.err
    asked = cli("run", trained, "How many mills does Alder have?", "--route", "ask-expert", "--json")
    assert asked.status == 0, asked.err
    answer = json.loads(asked.out)
    assert (answer["route"], answer["cost"]) == ("ask-expert", 1.0)
    assert set(answer["odds"]) == {"myself", "look-up", "ask-expert"}
    assert cli("run", trained, "What is 3 + 4?", "--route", "search").status != 0
    capped = cli("run", trained, "What is 3 + 4?", "--route", "ask-expert", "--max-cost", 0.5)
    assert "the route 'ask-expert' costs more than 0.5" in capped.err
    for question in ("What is 3 + 4?", "How many mills does Alder have?", "What is 12 * 11?"):
        assert json.loads(cli("run", trained, question, "--max-cost", 0.5, "--json").out)["cost"] <= 0.5


def test_a_run_is_resumed_with_its_server_at_another_address(trained: Path, expert: str, cli: Cli) -> None:
    moved = expert.replace("127.0.0.1", "localhost")
    ended = cli(
        "resume", trained, "--set", "trainer.total_steps=3", "--set", f"router.policies.expert.base_url={moved}"
    )
    assert ended.status == 0, ended.err
    assert (trained / "rollouts" / "step-000003.jsonl").is_file()


def test_an_export_does_not_choose_which_server_is_asked(trained: Path, expert: str, tmp_path: Path, cli: Cli) -> None:
    out = tmp_path / "exported"
    ended = cli("export", trained, "--out", out)
    assert ended.status == 0, ended.err
    assert expert not in (out / "router.json").read_text("utf-8")
    with pytest.raises(ConfigError, match=r"--set router\.policies\.expert\.base_url=URL"):
        RoutedAgent.load(out, tools=["calculator", "search"])
    named = [f"router.policies.expert.base_url={expert}", "router.policies.expert.model=expert"]
    agent = RoutedAgent.load(out, tools=["calculator", "search"], documents=["Alder has 12 mills."], overrides=named)
    answer = agent.ask("How many mills does Alder have?")
    assert answer.route in ("myself", "look-up", "ask-expert")
    assert sum(answer.route_probs.values()) == pytest.approx(1.0)
    assert agent.ask("How many mills does Alder have?", route="ask-expert").rollout.answered_by == "expert"


def test_a_conditioned_prompt_is_undone_after_json(expert: str, tmp_path: Path, cli: Cli) -> None:
    noted = THREE.replace('name = "look-up"', 'name = "look-up"\nnote = "Look it up with {{ first | join }}."')
    config = write_project(tmp_path, noted, expert)
    one_step = ("--set", "trainer.total_steps=1", "--set", "router.train_actor=false")
    ended = cli("train", config, "--out", tmp_path / "run", *one_step)
    assert ended.status == 0, ended.err
    records = [record for record in step_records(tmp_path / "run") if record.route == "look-up"]
    assert records
    for record in records:
        assert record.messages[0] == {"role": "system", "content": "Look it up with search."}
        assert record.original_messages[0].role == "user"
        assert [m.to_openai() for m in record.original_messages] == list(record.messages[1:])


def test_questions_are_answered_at_once_along_all_routes(trained: Path) -> None:
    agent, routes = RoutedAgent.load(trained), ("myself", "look-up", "ask-expert")

    async def ask_all() -> list[Any]:
        return await asyncio.gather(*(agent.answer(f"What is {i} + 4?", route=routes[i % 3]) for i in range(12)))

    answers = asyncio.run(ask_all())
    assert [answer.rollout.answered_by for answer in answers] == ["", "", "expert"] * 4
    assert all(answer.text for answer in answers)


@pytest.mark.long
def test_a_frontier_has_a_point_for_every_route(trained: Path, tmp_path: Path, cli: Cli) -> None:
    ended = cli("eval", trained, "--budgets", "0,0.5,1", "--draws", 1, "--out", tmp_path / "frontier")
    assert ended.status == 0, ended.err
    record = json.loads((tmp_path / "frontier" / "frontier.json").read_text("utf-8"))
    assert {"always myself", "always look-up", "always ask-expert"} <= set(record["fixed"])
    assert record["fixed"]["always ask-expert"]["cost"]["value"] == 1.0


@pytest.mark.long
def test_five_routes_with_real_tools(expert: str, tmp_path: Path, cli: Cli) -> None:
    config = write_project(tmp_path, FIVE, expert, more=("python", "get_current_time"))
    ended = cli("train", config, "--out", tmp_path / "run", "--set", "rollout.n=12", "--set", "trainer.total_steps=4")
    assert ended.status == 0, ended.err
    records = step_records(tmp_path / "run")
    names = {"myself", "look-up", "calculate", "run-code", "clock", "ask-expert"}
    assert {record.route for record in records} == names
    assert all(len(record.router_logits) == 6 for record in records)
    assert any(message["content"] == "You may write a program: python." for r in records for message in r.messages)
    assert cli("eval", tmp_path / "run").status == 0
    agent = RoutedAgent.load(tmp_path / "run")
    assert set(agent.ask("What is 3 + 4?").route_probs) == names


@pytest.mark.long
def test_adapters_and_a_second_local_model(tmp_path: Path, cli: Cli) -> None:
    local = THREE.replace('base_url = "URL"\nmodel = "expert"', 'path = "builtin:small"')
    config = write_project(tmp_path, local.replace("[actor]", "[actor]\nlora = { rank = 4 }"), "")
    ended = cli("train", config, "--out", tmp_path / "run")
    assert ended.status == 0, ended.err
    asked = [record for record in step_records(tmp_path / "run") if record.route == "ask-expert"]
    assert {(record.answered_by, record.trained_on) for record in asked} == {("expert", False)}
    assert RoutedAgent.load(tmp_path / "run").ask("What is 3 + 4?", route="ask-expert").cost == 1.0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (('name = "look-up"', 'name = "MYSELF"'), "two routes are named 'myself' and 'MYSELF'"),
        (('tools = ["search"]\n[[', 'tools = ["serch"]\n[['), "route 'look-up' names the tool 'serch', but the run's"),
        (('tools = ["search"]\n[[', "tools = []\n[["), "tools of route 'look-up' is empty"),
        (('tools = ["search"]\n[[', 'families = ["FILES"]\n[['), "names the family 'FILES', which no tool has"),
        (("price = 1.0", ""), "route 'ask-expert' is answered by another policy: set its price"),
        (("price = 1.0", "price = -1.0"), "the price of route 'ask-expert' is negative"),
        (("price = 1.0", "price = { usd = 1.0 }"), "has a price in 'usd', but costs are in cost, search"),
        (('policy = "expert"', 'policy = "oracle"'), "names the policy 'oracle', but router.policies are: expert"),
        (('name = "myself"', 'name = "myself"\nprice = 0.6'), "cannot be met: the cheapest routes cost 0.6"),
        (('name = "myself"', 'name = "auto"'), "a route is named 'auto'"),
        (('base_url = "URL"', ""), "set either base_url and model, or path"),
        (('name = "myself"', 'name = "myself"\nnote = "{{ frist }}"'), "the note of 'myself': 'frist' is undefined"),
    ],
)
def test_bad_routes_are_refused_at_the_start(tmp_path: Path, cli: Cli, change: tuple[str, str], told: str) -> None:
    toml = THREE.replace(*change, 1)
    assert toml != THREE
    if "0.6" in change[1]:
        toml = toml.replace('name = "look-up"', 'name = "look-up"\nprice = 0.7')
    ended = cli("train", write_project(tmp_path, toml, "http://127.0.0.1:9/v1", count=8), "--out", tmp_path / "run")
    assert ended.status != 0
    assert told in " ".join(ended.err.split())
    assert "Traceback" not in ended.err


def test_one_route_is_no_choice(tmp_path: Path, cli: Cli) -> None:
    toml = THREE[: THREE.index("[router.policies")] + '[[router.routes]]\nname = "myself"\n'
    ended = cli("train", write_project(tmp_path, toml, "", count=8), "--out", tmp_path / "run")
    assert "routes has one route only (myself)" in " ".join(ended.err.split())


@pytest.mark.long
def test_a_route_for_each_tool_with_a_value_head_and_sampled_routes(tmp_path: Path, cli: Cli) -> None:
    config = write_project(tmp_path, THREE[: THREE.index("[router.policies")], "")
    options = ("router.per_tool=true", "router.mode=value", "router.sampling=independent")
    ended = cli("train", config, "--out", tmp_path / "run", *(part for o in options for part in ("--set", o)))
    assert ended.status == 0, ended.err
    records = step_records(tmp_path / "run")
    assert {record.route for record in records} == {"ANSWER", "search", "calculator"}
    assert all(record.route != "search" or record.extra_info["has_search"] for record in records)
    exported = tmp_path / "exported"
    assert cli("export", tmp_path / "run", "--out", exported).status == 0
    agent = RoutedAgent.load(exported, tools=["search", "calculator"], documents=["Alder has 12 mills."])  # other order
    assert list(agent.ask("How many mills does Alder have?").route_probs) == ["ANSWER", "calculator", "search"]
