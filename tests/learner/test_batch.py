"""Rows and columns: every value lines up with its token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from learner_cases import credit, sample, tiny_model

from toolwise.config.schema import ActorConfig
from toolwise.errors import ToolwiseError
from toolwise.learner.batch import Batch, build_batch, with_zero_advantages
from toolwise.types import CreditedRollout


def numbered(rollout: CreditedRollout, start: int) -> CreditedRollout:
    """Advantages that identify their token."""
    found, at = [], start
    for array in rollout.advantages:
        found.append(np.arange(at, at + len(array), dtype=np.float32))
        at += len(array)
    return replace(rollout, advantages=tuple(found))


def example() -> Batch:
    """Three rows: one of two turns; a rollout whose second turn does not continue the first."""
    whole = credit([([5, 6], [7, 8], [-0.1, -0.2]), ([5, 6, 7, 8, 9], [10], [-0.3])], 0.0, name="a", version=3)
    forked = credit([([5, 6], [7], [-0.4]), ([2, 2], [11, 12, 13], [-0.5, -0.6, -0.7])], 0.0, name="b", group="h")
    return build_batch([numbered(whole, 0), numbered(forked, 3)])


def test_columns_by_hand() -> None:
    batch = example()
    assert [row.ids.tolist() for row in batch.rows] == [[5, 6, 7, 8, 9, 10], [5, 6, 7], [2, 2, 11, 12, 13]]
    assert batch.row.tolist() == [0, 0, 0, 1, 2, 2, 2]
    assert batch.step.tolist() == [0, 0, 1, 2, 3, 3, 3]
    assert batch.rollout.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert batch.first.tolist() == [True, False, True, True, True, False, False]
    assert batch.version.tolist() == [3, 3, 3, -1, -1, -1, -1]
    assert batch.advantages.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert batch.rollout_logprobs.tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4, -0.5, -0.6, -0.7])
    assert (batch.rollout_ids, batch.group_of_rollout) == (["a", "b"], ["g", "h"])
    assert batch.rollout_of_row == [0, 1, 1]
    assert batch.old_logprobs is batch.values is batch.returns is batch.ref_logprobs is None


@pytest.mark.parametrize(
    "cut",
    [
        ActorConfig(micro_batch_tokens=1),
        ActorConfig(micro_batch_tokens=6),
        ActorConfig(micro_batch_tokens=100),
        ActorConfig(micro_batch_tokens=100, share_prefixes=False),
    ],
)
@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0], [1]])
def test_micro_batches_index_their_tokens_in_the_columns(cut: ActorConfig, rows: list[int]) -> None:
    batch = example()
    seen = []
    for packed, places in batch.packed(rows, tiny_model(), cut):
        for target, place, row, at in zip(packed.target, places, packed.row, packed.at, strict=True):
            assert batch.row[place] == rows[int(row)]
            assert batch.rows[rows[int(row)]].ids[int(at)] == int(target)
            seen.append(int(place))
    assert sorted(seen) == [p for p in range(7) if int(batch.row[p]) in rows]
    assert sorted(seen) == batch.predicted_tokens(rows).tolist()


def test_a_token_without_context_is_not_predicted() -> None:
    batch = build_batch([credit([([], [7, 8], [-0.1, -0.2])], 1.0), credit([([], [7], [-0.1])], 1.0)])
    assert batch.has_context.tolist() == [False, True, False]
    assert batch.trainable_rows() == [0]
    assert batch.predicted_tokens([0]).tolist() == [1]


def test_splitting_a_column_per_step_inverts_concatenation() -> None:
    credited = [numbered(c, 10 * i) for i, c in enumerate(sample(tiny_model(), [1.0, 1.0, 1.0]))]
    batch = build_batch(credited)
    parts = batch.per_step(batch.advantages, [c.steps for c in credited])
    for c, found in zip(credited, parts, strict=True):
        assert [a.tolist() for a in found] == [a.tolist() for a in c.advantages]


def test_steps_without_tokens_are_skipped() -> None:
    [given] = sample(tiny_model(), [1.0])
    silent = given.steps[0].model_copy(update={"policy_logprobs": None})
    rollout = replace(
        given,
        steps=(silent, *given.steps, silent),
        advantages=(np.zeros(0, np.float32), *given.advantages, np.zeros(0, np.float32)),
    )
    batch = build_batch([rollout])
    assert batch.advantages.tolist() == build_batch([given]).advantages.tolist()
    assert sorted(set(batch.step.tolist())) == [1, 2]


def test_an_empty_batch() -> None:
    batch = build_batch([])
    assert (len(batch), batch.rows, batch.trainable_rows()) == (0, [], [])
    assert list(batch.packed([], None, ActorConfig())) == []
    assert batch.predicted_tokens([]).tolist() == []
    assert batch.returns is not None  # vacuously: there are no rollouts


def test_a_column_of_the_wrong_length_is_named() -> None:
    [given] = sample(tiny_model(), [1.0])
    short = replace(given, returns=tuple(a[:-1] for a in given.advantages))
    with pytest.raises(
        ToolwiseError, match="rollout r0, step 0: 1 returns for 2 sampled tokens; there must be one per token"
    ):
        build_batch([short])


def test_scored_rollouts_without_advantages_make_rows() -> None:
    credited = sample(tiny_model(), [1.0, -1.0])
    batch = build_batch(with_zero_advantages([c.annotated.scored for c in credited]))
    assert batch.advantages.tolist() == [0.0] * len(batch)
    assert torch.equal(batch.rollout_logprobs, build_batch(credited).rollout_logprobs)
