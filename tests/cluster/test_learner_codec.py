"""A group of learners computes what one process computes: gradients, their norms, and ten updates, in float64."""

from __future__ import annotations

from pathlib import Path

import learner_ranks
import pytest
import torch
from rank_runs import largest_gap, run_ranks

from toolwise.cluster.learner_codec import divide, updated_from_payload, updated_to_payload

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def alone() -> dict[str, torch.Tensor]:
    return learner_ranks.learn(0, 1)


@pytest.mark.long
def test_two_ranks_learn_what_one_does(alone: dict[str, torch.Tensor], tmp_path: Path) -> None:
    for found in run_ranks(2, tmp_path, "plain"):
        assert largest_gap(found, alone) < 1e-10


@pytest.mark.long
@pytest.mark.parametrize("ranks", [4, 8])
def test_more_ranks_than_groups_learn_what_one_does(ranks: int, alone: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """With 8 ranks and 5 rollouts, three have none."""
    for found in run_ranks(ranks, tmp_path, "plain"):
        assert largest_gap(found, alone) < 1e-10


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "job"), [(2, "shard"), (4, "shard"), (8, "shard"), (2, "offload-shard")])
def test_sharded_ranks_learn_what_one_does(
    ranks: int, job: str, alone: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    for found in run_ranks(ranks, tmp_path, job):
        assert largest_gap(found, alone) < 1e-10


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "job"), [(2, "lora"), (2, "lora-shard"), (4, "lora-shard"), (2, "lora-offload-shard")]
)
def test_ranks_with_adapters_learn_what_one_does(ranks: int, job: str, tmp_path: Path) -> None:
    expected = learner_ranks.learn(0, 1, "lora")
    for found in run_ranks(ranks, tmp_path, job):
        assert largest_gap(found, expected) < 1e-10


def first_update(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in found.items() if name.endswith(".0") and "weights" not in name}


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("job", ["fp32", "fp32-shard"])
def test_ranks_in_single_precision_have_the_gradients_of_one(ranks: int, job: str, tmp_path: Path) -> None:
    expected = first_update(learner_ranks.learn(0, 1, "fp32"))
    for found in run_ranks(ranks, tmp_path, job):
        assert largest_gap(first_update(found), expected) < 1e-5


@pytest.mark.long
def test_sharded_ranks_in_bfloat16_are_as_exact_as_one(alone: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """Gradients are summed over ranks in fp32, which `learner_ranks` checks. Both are compared with the gradients of
    the weights before they were rounded."""
    exact = {name: value for name, value in first_update(alone).items() if "gradient" in name}
    one = {name: value.double() for name, value in learner_ranks.learn(0, 1, "bf16").items() if name in exact}
    for found in run_ranks(4, tmp_path, "bf16-shard"):
        gap = largest_gap({name: found[name].double() for name in exact}, exact)
        assert gap < 1.1 * largest_gap(one, exact)


@pytest.mark.long
def test_sharded_ranks_that_recompute_activations_learn_what_one_does(
    alone: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    for found in run_ranks(2, tmp_path, "checkpointed-shard"):
        assert largest_gap(found, alone) < 1e-10


@pytest.mark.long
@pytest.mark.parametrize("job", ["trees", "trees-shard"])
def test_ranks_keep_trees_of_shared_prefixes_whole(job: str, tmp_path: Path) -> None:
    """Two ranks have the trees that one process has, and so its gradients."""
    expected = learner_ranks.learn(0, 1, "trees")
    for found in run_ranks(2, tmp_path, job):
        assert largest_gap(found, expected) < 1e-10


@pytest.mark.long
def test_a_factor_in_the_gradients_is_noticed(alone: dict[str, torch.Tensor], tmp_path: Path) -> None:
    assert largest_gap(run_ranks(2, tmp_path, "planted")[0], alone) > 0.4


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 8])
def test_gaps_entropies_and_clips_come_back_as_of_one_process(ranks: int, tmp_path: Path) -> None:
    alone = learner_ranks.updated_columns(0, 1)
    found: dict[str, torch.Tensor] = {}
    for of_rank in run_ranks(ranks, tmp_path, "updated"):
        assert not found.keys() & of_rank.keys()
        found |= of_rank
    assert found.keys() == alone.keys()
    for name, wanted in alone.items():
        assert found[name].dtype == wanted.dtype
        got, expected = torch.nan_to_num(found[name], 9.0), torch.nan_to_num(wanted, 9.0)
        if name.startswith("0/") and not name.endswith("clipped"):
            assert torch.equal(got, expected), name
        else:  # after a step whose gradients were summed in another order
            assert torch.allclose(got.double(), expected.double(), atol=1e-6), name
    assert any(bool(wanted.any()) for name, wanted in alone.items() if name.endswith("clipped"))


def test_columns_of_a_learner_that_had_nothing_to_learn_are_not_there() -> None:
    assert updated_to_payload([]) == {}
    assert updated_from_payload({}, learner_ranks.rollouts()) == {}


def test_groups_stay_whole_and_ranks_get_as_many_tokens() -> None:
    sizes, groups = [10, 10, 5, 5, 30], ["a", "a", "b", "b", "c"]
    assert divide(sizes, sizes, groups, 2) == [[4], [0, 1, 2, 3]]


def test_with_fewer_groups_than_ranks_rollouts_are_divided() -> None:
    parts = divide([3, 2, 1], [3, 2, 1], ["a", "a", "a"], 5)
    assert sorted(index for part in parts for index in part) == [0, 1, 2]
    assert [len(part) for part in parts] == [1, 1, 1, 0, 0]
