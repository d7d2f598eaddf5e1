"""SFT: which tokens are trained on, how conversations share a row without attending to each other, that it learns."""

from __future__ import annotations

from itertools import islice, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from toolwise.errors import DataError
from toolwise.learner.supervised import (
    Example,
    SftSettings,
    batches,
    collate,
    learning_rate,
    pack_examples,
    sft_steps,
    tokenize_conversation,
)
from toolwise.messages import Message, ToolCall
from toolwise.models import load_model
from toolwise.rollout.chat_tokenizer import ChatTokenizer

torch.set_num_threads(1)
PAD = 0
EXAMPLES = st.lists(
    st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=2, max_size=12).map(
        lambda pairs: Example([i for i, _ in pairs], [False, *[t for _, t in pairs[1:-1]], True])
    ),
    max_size=12,
)


@pytest.fixture(scope="module")
def small() -> tuple[Any, ChatTokenizer]:
    return load_model("builtin:small", device="cpu")


def fresh_model() -> Any:
    return load_model("builtin:small", device="cpu")[0]


def say(role: Any, content: str, **more: Any) -> Message:
    return Message(role=role, content=content, **more)


def example(length: int, start: int = 1) -> Example:
    """A conversation whose second half is trained on."""
    return Example(list(range(start, start + length)), [at >= length // 2 for at in range(length)])


CONVERSATION = [
    say("user", "How many wells does Alder have?"),
    say("assistant", "", tool_calls=[ToolCall(id="call_0", name="search", arguments={"query": "Alder wells"})]),
    say("tool", "Alder has 31 wells.", tool_call_id="call_0"),
    say("assistant", "Answer: 31"),
]


# Which tokens are trained on.


def test_only_assistant_tokens_are_trained_on_including_the_end_token(small: tuple[Any, ChatTokenizer]) -> None:
    chat = small[1]
    found = tokenize_conversation(chat, CONVERSATION)
    taught: list[list[int]] = [[]]
    for token, here in zip(found.ids, found.loss_mask, strict=True):
        if here:
            taught[-1].append(token)
        elif taught[-1]:
            taught.append([])
    assert len(taught) == 2
    assert all(turn[-1] == chat.end_id for turn in taught)
    assert all(turn.count(chat.end_id) == 1 for turn in taught)
    call, answer = (chat.decode(turn) for turn in taught)
    assert answer == "Answer: 31"
    assert '"name": "search"' in call
    assert "Alder wells" in call
    untaught = chat.tokenizer.decode([t for t, here in zip(found.ids, found.loss_mask, strict=True) if not here])
    assert "How many wells" in untaught
    assert "Alder has 31 wells." in untaught
    assert "Answer" not in untaught


def test_a_conversation_decodes_to_the_template_s_text(small: tuple[Any, ChatTokenizer]) -> None:
    chat = small[1]
    tools = [{"type": "function", "function": {"name": "search", "parameters": {"properties": {"query": {}}}}}]
    found = tokenize_conversation(chat, CONVERSATION, tools)
    whole = chat.tokenizer.apply_chat_template(
        [chat.style.convert(m, chat.controls) for m in CONVERSATION],
        tools=tools,
        tokenize=False,
        add_generation_prompt=False,
    )
    text = chat.tokenizer.decode(found.ids, skip_special_tokens=False)
    assert whole.startswith(text)
    assert not whole[len(text) :].strip()


def test_a_conversation_is_tokenized_as_a_rollout_would_have_been(small: tuple[Any, ChatTokenizer]) -> None:
    """The prompt the policy sees at its second turn is a prefix of the training sequence."""
    chat = small[1]
    found = tokenize_conversation(chat, CONVERSATION)
    first = chat.start(CONVERSATION[:1])
    reply = chat.reply(CONVERSATION[1])
    assert found.ids[: len(first)] == first
    seen = [*first, *reply, *chat.encode_continuation(CONVERSATION[2:3])]
    assert found.ids[: len(seen)] == seen
    assert found.loss_mask[len(seen) :] == [True] * (len(found.ids) - len(seen))


def test_what_comes_after_the_last_reply_is_left_out(small: tuple[Any, ChatTokenizer]) -> None:
    assert tokenize_conversation(small[1], [*CONVERSATION, say("user", "Thanks.")]) == tokenize_conversation(
        small[1], CONVERSATION
    )


@pytest.mark.parametrize("messages", [[], [say("user", "Hello?")], [say("system", "Be brief."), say("user", "Hm")]])
def test_a_conversation_without_an_assistant_message_is_rejected(
    messages: list[Message], small: tuple[Any, ChatTokenizer]
) -> None:
    with pytest.raises(DataError, match="no assistant message"):
        tokenize_conversation(small[1], messages)


# Packing.


@given(EXAMPLES, st.integers(12, 40))
def test_packing_loses_nothing_and_keeps_rows_within_their_length(examples: list[Example], row_tokens: int) -> None:
    rows = list(pack_examples(examples, row_tokens))
    assert [e for row in rows for e in row] == examples
    assert all(0 < sum(len(e.ids) for e in row) <= row_tokens for row in rows)
    for here, after in pairwise(rows):
        assert sum(len(e.ids) for e in here) + len(after[0].ids) > row_tokens


def test_a_conversation_too_long_for_a_row_is_cut_at_its_end() -> None:
    [[kept]] = pack_examples([example(10)], 7)
    assert kept == Example([1, 2, 3, 4, 5, 6, 7], [False] * 5 + [True] * 2)


def test_a_truncated_conversation_without_targets_is_dropped() -> None:
    """A row without a token to train on would have a loss of 0 / 0."""
    rows = list(pack_examples([example(4), example(100), example(4)], 8))
    assert rows == [[example(4), example(4)]]


def test_packing_leaves_its_input_alone() -> None:
    examples = [example(10), example(3)]
    list(pack_examples(examples, 5))
    assert examples == [example(10), example(3)]


def test_batches_have_their_tokens_and_go_through_everything_each_epoch() -> None:
    examples = [Example([n, n, n, n], [False, False, True, True]) for n in range(1, 13)]
    settings = SftSettings(batch_tokens=16, row_tokens=8, seed=3)
    found = list(islice(batches(examples, settings), 6))
    assert all(len(batch) == 2 for batch in found)
    order = [e.ids[0] for batch in found for row in batch for e in row]
    assert sorted(order[:12]) == sorted(order[12:]) == list(range(1, 13))
    assert order[:12] != order[12:]
    again = [e.ids[0] for batch in islice(batches(examples, settings), 6) for row in batch for e in row]
    assert again == order


@pytest.mark.parametrize("examples", [[], [example(100)]])
def test_nothing_to_train_on_raises_instead_of_looping(examples: list[Example]) -> None:
    with pytest.raises(DataError, match="nothing to train on"):
        next(batches(examples, SftSettings(row_tokens=10)))


# Rows as tensors.


def test_positions_restart_and_labels_are_the_assistant_tokens() -> None:
    batch = collate([[example(4, 10), example(3, 20)], [example(5, 30)]], PAD)
    assert batch["input_ids"].tolist() == [[10, 11, 12, 13, 20, 21, 22], [30, 31, 32, 33, 34, PAD, PAD]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 3, 4, 0, 0]]
    assert batch["labels"].tolist() == [
        [-100, -100, 12, 13, -100, 21, 22],
        [-100, -100, 32, 33, 34, -100, -100],
    ]


def test_the_mask_lets_no_token_see_later_ones_or_another_conversation() -> None:
    mask = collate([[example(2), example(3)]], PAD)["attention_mask"]
    assert mask.shape == (1, 1, 5, 5)
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]


def test_every_padded_position_attends_to_something() -> None:
    """A row of the mask without a single True makes attention divide 0 by 0."""
    mask = collate([[example(2)], [example(6)]], PAD)["attention_mask"]
    assert mask.any(-1).all()


def test_a_first_token_is_never_predicted_from_the_conversation_before() -> None:
    spoken_at_once = Example([5, 6], [True, True])
    assert collate([[example(2), spoken_at_once]], PAD)["labels"].tolist() == [[-100, 2, -100, 6]]


def logits_of(model: Any, rows: list[list[Example]]) -> torch.Tensor:
    batch = collate(rows, PAD)
    batch.pop("labels")
    with torch.no_grad():
        return torch.as_tensor(model(**batch).logits)


def test_packed_conversations_do_not_see_each_other(small: tuple[Any, ChatTokenizer]) -> None:
    model, chat = small
    first, second = (
        tokenize_conversation(chat, [say("user", text), say("assistant", "Answer: 7")])
        for text in ("What is 3 + 4?", "How many mills does Orsa have?")
    )
    packed = logits_of(model, [[first, second]])
    cut = len(first.ids)
    changed = Example([(token + 1) % 500 for token in first.ids], first.loss_mask)
    assert torch.equal(logits_of(model, [[changed, second]])[0, cut:], packed[0, cut:])
    later = Example([(token + 1) % 500 for token in second.ids], second.loss_mask)
    assert torch.equal(logits_of(model, [[first, later]])[0, :cut], packed[0, :cut])
    torch.testing.assert_close(logits_of(model, [[first]])[0], packed[0, :cut], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits_of(model, [[second]])[0], packed[0, cut:], rtol=1e-4, atol=1e-4)


def test_padding_changes_no_logits(small: tuple[Any, ChatTokenizer]) -> None:
    alone = logits_of(small[0], [[example(6)]])
    beside = logits_of(small[0], [[example(6)], [example(40)]])
    torch.testing.assert_close(beside[0, :6], alone[0], rtol=1e-4, atol=1e-4)
    assert torch.isfinite(beside).all()


# Training.


def test_the_rate_warms_up_and_falls_to_a_tenth() -> None:
    settings = SftSettings(steps=100, lr=1.0, warmup=0.1)
    rates = [learning_rate(step, settings) for step in range(101)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert max(rates) == 1.0
    assert all(a >= b for a, b in pairwise(rates[10:]))
    assert rates[100] == pytest.approx(0.1)


def test_the_first_loss_is_the_mean_over_assistant_tokens(small: tuple[Any, ChatTokenizer]) -> None:
    model, chat = fresh_model(), small[1]
    found = [tokenize_conversation(chat, CONVERSATION), tokenize_conversation(chat, CONVERSATION[:2])]
    losses, count = 0.0, 0
    for one in found:
        with torch.no_grad():
            logp = torch.log_softmax(model(torch.tensor([one.ids])).logits[0], -1)
        for at in range(1, len(one.ids)):
            if one.loss_mask[at]:
                losses -= float(logp[at - 1, one.ids[at]])
                count += 1
    settings = SftSettings(steps=1, batch_tokens=512, row_tokens=512)
    [figures] = sft_steps(model, found, settings, pad_id=chat.pad_id)
    assert figures["loss"] == pytest.approx(losses / count, rel=1e-4)
    assert figures["tokens"] == count


@pytest.mark.long
def test_two_conversations_are_learned_by_heart(small: tuple[Any, ChatTokenizer]) -> None:
    model, chat = fresh_model(), small[1]
    said = {"What is the word?": "xylophone 99182", "Which colour?": "turquoise, no doubt"}
    examples = [tokenize_conversation(chat, [say("user", q), say("assistant", a)]) for q, a in said.items()]
    settings = SftSettings(steps=60, batch_tokens=128, row_tokens=128, lr=2e-3)
    figures = list(sft_steps(model, examples, settings, pad_id=chat.pad_id))
    assert figures[-1]["loss"] < 0.1 < figures[0]["loss"]
    assert not model.training
    for question, answer in said.items():
        prompt = torch.tensor([chat.start([say("user", question)])])
        with torch.no_grad():
            out = model.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=chat.end_id, pad_token_id=PAD)
        assert chat.decode(out[0, prompt.shape[1] :].tolist()) == answer


def test_training_is_deterministic(small: tuple[Any, ChatTokenizer]) -> None:
    examples = [tokenize_conversation(small[1], CONVERSATION)]
    settings = SftSettings(steps=3, batch_tokens=128, row_tokens=128)
    one, two = (list(sft_steps(fresh_model(), examples, settings, pad_id=small[1].pad_id)) for _ in range(2))
    assert one == two


def test_a_gradient_that_is_not_a_number_moves_nothing(small: tuple[Any, ChatTokenizer]) -> None:
    model, chat = fresh_model(), small[1]
    hook = model.lm_head.register_forward_hook(lambda module, args, out: out * float("nan"))
    before = [p.detach().clone() for p in model.parameters()]
    settings = SftSettings(steps=1, batch_tokens=128, row_tokens=128)
    list(sft_steps(model, [tokenize_conversation(chat, CONVERSATION)], settings, pad_id=chat.pad_id))
    hook.remove()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
