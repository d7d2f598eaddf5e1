"""Examples as tensors, in one batch or in parts."""

from __future__ import annotations

import torch

from toolwise.routing.head.batch import RouterBatch
from toolwise.routing.head.loss import NO_LABEL
from toolwise.routing.samples import RoutePrediction, RouterExample, RouteSample

LIKE = torch.zeros(1)
SEEN = RoutePrediction((-1.0, -2.0, -3.0), rewards=(0.1, 0.2, 0.3), costs=((1.0,), (2.0,), (3.0,)))


def examples() -> list[RouterExample]:
    return [
        RouterExample(
            SEEN, (RouteSample(0, 1.0, (0.0,), 0.5), RouteSample(2, 0.0, (1.0,), -0.5)), (0.5, None, -0.5), label=1
        ),
        RouterExample(SEEN, (RouteSample(1, 0.25, (2.0,), 0.75),), (None, 0.75, None)),
    ]


def test_rollouts_point_to_their_example() -> None:
    batch = RouterBatch.of(examples(), LIKE)
    assert batch.prompt_index.tolist() == [0, 0, 1]
    assert batch.actions.tolist() == [0, 2, 1]
    assert batch.sampled_advantages.tolist() == [0.5, -0.5, 0.75]
    assert batch.targets.tolist() == [[1.0, 0.0], [0.0, 1.0], [0.25, 2.0]]
    assert batch.labels.tolist() == [1, NO_LABEL]


def test_routes_without_a_rollout_have_no_advantage() -> None:
    batch = RouterBatch.of(examples(), LIKE)
    assert batch.has_advantage.tolist() == [[True, False, True], [False, True, False]]
    assert batch.advantages is not None
    assert batch.advantages.tolist() == [[0.5, 0.0, -0.5], [0.0, 0.75, 0.0]]


def test_sampled_routes_have_no_advantages_per_route() -> None:
    drawn = [RouterExample(SEEN, (RouteSample(0, 1.0, (0.0,), 0.5),))]
    assert RouterBatch.of(drawn, LIKE).advantages is None


def test_predictions_are_per_route() -> None:
    assert RouterBatch.of(examples(), LIKE).predictions[1, 2].tolist() == torch.tensor([0.3, 3.0]).tolist()


def test_parts_add_up_to_the_batch() -> None:
    first, second = RouterBatch.of(examples(), LIKE).parts(1)
    assert first.actions.tolist() == [0, 2]
    assert second.actions.tolist() == [1]
    assert second.prompt_index.tolist() == [0]
