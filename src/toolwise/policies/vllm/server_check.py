"""Before the first rollout: is the server behind the URL one that this model can be trained with? One line for each way
in which it is not."""

from __future__ import annotations

import math
from typing import Any

import torch

from toolwise.errors import PolicyError
from toolwise.policies.openai.server_errors import ServerError
from toolwise.policies.vllm.completions import Completion, completion_body, read_completion
from toolwise.policies.vllm.control import ModelInfo, VllmControlClient, VllmStatusError
from toolwise.policies.vllm.weights import WeightsFolder, checkpoint_state, tied_names
from toolwise.protocols import Sampling

MAX_GAP_FP32 = 1e-3
MEAN_GAP_HALF = 0.05
_PROBE_TOKENS = 16


def check_settings(model_info: ModelInfo, model: Any, url: str) -> None:
    """What the server was started with."""
    own = str(model.dtype).removeprefix("torch.")
    if model_info.dtype and model_info.dtype != own:
        raise PolicyError(
            f"vLLM at {url} computes in {model_info.dtype} and the learner in {own}: start it with --dtype {own}"
        )
    if model_info.logprobs_mode and model_info.logprobs_mode != "processed_logprobs":
        raise PolicyError(
            f"vLLM at {url} gives log-probs before temperature ({model_info.logprobs_mode}): start it with "
            "--logprobs-mode processed_logprobs"
        )


def check_vocabulary(control: VllmControlClient, model_info: ModelInfo, model: Any) -> None:
    """Its last token is known there, and the one after it is not. Asked before any weight is sent: vLLM's engine ends
    where weights do not fit it."""
    size = int(model.config.vocab_size)
    known = _accepts_token(control, model_info, size - 1), _accepts_token(control, model_info, size)
    if known != (True, False):
        more = "more" if known[1] else "fewer"
        raise PolicyError(
            f"vLLM at {control.root} serves another model ({model_info.name}): it knows {more} tokens than the "
            f"learner's "
            f"{size}; serve the model at model.path"
        )


def _accepts_token(control: VllmControlClient, model_info: ModelInfo, token: int) -> bool:
    try:
        control.complete(completion_body(model_info.name, [token], Sampling(max_new_tokens=1)))
    except VllmStatusError as refused:
        if refused.status == 400:
            return False
        raise
    return True


def check_tied_head(control: VllmControlClient, model_info: ModelInfo, model: Any, weights: WeightsFolder) -> None:
    """Whether a head that shares the embeddings is renewed with them; that of a tied model in vLLM's CPU build is not,
    and nothing says so. Weights are sent under which all tokens look alike: every draw must be a fair one."""
    if (tied := tied_names(model)) is None:
        return
    state = checkpoint_state(model)
    alike = state[tied[0]][:1].expand_as(state[tied[0]])
    control.load(weights.write(model, state | {tied[0]: alike.clone(), tied[1]: alike.clone()}), 0)
    drawn = _sample_completion(control, model_info, [1], Sampling(max_new_tokens=4))
    if any(abs(logprob + math.log(alike.shape[0])) > 0.01 for logprob in drawn.logprobs):
        raise PolicyError(
            f"vLLM at {control.root} keeps the output head of a model with tied embeddings when new weights come: let "
            "toolwise start it (leave rollout.vllm.base_url out), or serve a folder with an lm_head of its own"
        )


def check_logprobs(control: VllmControlClient, model_info: ModelInfo, model: Any) -> None:
    """A few tokens drawn from the weights that were sent, at a temperature other than 1: do both give them the same?"""
    size = int(model.config.vocab_size)
    prompt = [(7 * i + 1) % size for i in range(_PROBE_TOKENS)]
    sampling = Sampling(temperature=2.0, max_new_tokens=_PROBE_TOKENS)
    drawn = _sample_completion(control, model_info, prompt, sampling)
    gap = _logprob_gap(model, prompt, drawn, sampling.temperature)
    bound = MAX_GAP_FP32 if torch.finfo(model.dtype).bits >= 32 else MEAN_GAP_HALF
    if not gap <= bound:
        raw = _logprob_gap(model, prompt, drawn, 1.0) <= bound
        why = (
            "they are those before temperature, start it with --logprobs-mode processed_logprobs"
            if raw
            else "it holds another model, or did not take the weights it was sent"
        )
        raise PolicyError(
            f"vLLM at {control.root} and the learner disagree on log-probs by {gap:.3g} (bound {bound:g}): {why}"
        )


def _sample_completion(
    control: VllmControlClient, model_info: ModelInfo, prompt: list[int], sampling: Sampling
) -> Completion:
    try:
        return read_completion(control.complete(completion_body(model_info.name, prompt, sampling)), prompt)
    except ServerError as fault:
        raise PolicyError(f"vLLM at {control.root}: {fault}") from fault


@torch.inference_mode()
def _logprob_gap(model: Any, prompt: list[int], drawn: Completion, temperature: float) -> float:
    tokens = list(drawn.token_ids)
    ids = torch.tensor([prompt + tokens], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    expected = torch.log_softmax(logits / temperature, dim=-1)[range(len(tokens)), tokens]
    gaps = (expected.cpu() - torch.tensor(list(drawn.logprobs))).abs()
    return float(gaps.max() if torch.finfo(model.dtype).bits >= 32 else gaps.mean())
