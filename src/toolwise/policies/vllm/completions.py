"""Requests to `/v1/completions` over token ids, and parsing of their replies."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from toolwise.policies.openai.reply import NEUTRAL_SAMPLING, first_choice, parse_ids
from toolwise.protocols import Generation, Sampling
from toolwise.remote.server_errors import ServerError


def completion_body(model: str, token_ids: Sequence[int], sampling: Sampling) -> dict[str, Any]:
    """The request body. Log-probs of greedy decoding are always at temperature 1: servers offer no others."""
    stop = {"stop": list(sampling.stop_strings), "include_stop_str_in_output": True} if sampling.stop_strings else {}
    return NEUTRAL_SAMPLING | {
        "top_p": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "model": model,
        "prompt": list(token_ids),
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature if sampling.do_sample else 0.0,
        "seed": sampling.seed & 0x7FFF_FFFF_FFFF_FFFF,
        "logprobs": 0,  # of the sampled token only
        "return_token_ids": True,
        # Only `stop_token_ids` and stop strings end a reply; their tokens stay in `token_ids`.
        "ignore_eos": True,
        "stop_token_ids": list(sampling.stop_token_ids),
        **stop,
    }


@dataclass(frozen=True, slots=True)
class Completion:
    """A reply, or the part of one that was sampled before the server was told to stop."""

    token_ids: array[int]
    logprobs: array[float]
    finish_reason: Literal["stop", "length", "abort"]


def read_completion(body: Any, prompt: Sequence[int], version: int = 0) -> Generation:
    """Parse the reply to `completion_body(…, prompt, …)`; raises `ServerError` if it is invalid. `version` is that of
    the server's weights."""
    whole = parse_completion(body, prompt)
    assert whole.finish_reason != "abort"
    return Generation(whole.token_ids, whole.logprobs, whole.finish_reason, version)


def parse_completion(body: Any, prompt: Sequence[int], *, may_abort: bool = False) -> Completion:
    """The same for a reply of which the server may return a part, even none, with `may_abort`."""
    choice = first_choice(body)
    finish = choice.get("finish_reason")
    # "abort": the server gave up midway, which is not the model's decision
    if finish not in ("stop", "length") and not (finish == "abort" and may_abort):
        raise ServerError("bad_reply", f"the server ended the reply with finish_reason {finish!r}", retryable=True)
    ids = _ids(choice, "token_ids")
    if _ids(choice, "prompt_token_ids") != array("i", prompt):
        raise ServerError(
            "bad_reply", "the server reports a different prompt than the one sent: does it truncate prompts?"
        )
    logprobs = _logprobs(choice)
    if len(ids) != len(logprobs) or not (ids or finish == "abort"):
        raise ServerError("bad_reply", f"the reply has {len(ids)} token ids and {len(logprobs)} log-probs")
    return Completion(ids, logprobs, finish)


def _ids(choice: dict[str, Any], name: str) -> array[int]:
    ids = parse_ids(choice.get(name), name)
    if ids is None:
        raise ServerError(
            "bad_reply", f"the reply has no {name}: vLLM 0.20 or later returns them, other servers do not"
        )
    return ids


def _logprobs(choice: dict[str, Any]) -> array[float]:
    logprobs = choice.get("logprobs")
    values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
    try:
        result = array("f", values or ())
    except TypeError:
        raise ServerError("bad_reply", "choices[0].logprobs.token_logprobs is not a list of numbers") from None
    if any(math.isnan(value) for value in result):
        raise ServerError("bad_reply", "the reply has NaN log-probs: are the server's weights broken?")
    return result
