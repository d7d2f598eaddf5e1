"""Checks before the first rollout that the vLLM server can be used to train this model."""

from __future__ import annotations

import math
from typing import Any

import torch

from toolwise.errors import PolicyError
from toolwise.policies.vllm.completions import completion_body, read_completion
from toolwise.policies.vllm.control import ModelInfo, VllmControlClient, VllmStatusError
from toolwise.policies.vllm.weights import WeightsFolder, checkpoint_state, tied_names
from toolwise.protocols import Generation, Sampling
from toolwise.remote.server_errors import ServerError

MAX_GAP_FP32 = 1e-3
MEAN_GAP_HALF = 0.05
_PROBE_TOKENS = 16


def check_settings(model_info: ModelInfo, model: Any, url: str) -> None:
    """Check the options that the server was started with."""
    dtype = str(model.dtype).removeprefix("torch.")
    if model_info.dtype and model_info.dtype != dtype:
        raise PolicyError(
            f"vLLM at {url} computes in {model_info.dtype} and the learner in {dtype}: start it with --dtype {dtype}"
        )
    if model_info.logprobs_mode and model_info.logprobs_mode != "processed_logprobs":
        raise PolicyError(
            f"vLLM at {url} returns log-probs before temperature ({model_info.logprobs_mode}): start it with "
            "--logprobs-mode processed_logprobs"
        )


def check_vocabulary(control: VllmControlClient, model_info: ModelInfo, model: Any) -> None:
    """Check that the server accepts the model's last token id and not the one after it. Done before any weights are
    sent, because vLLM's engine dies if they do not fit."""
    size = int(model.config.vocab_size)
    known = _accepts_token(control, model_info, size - 1), _accepts_token(control, model_info, size)
    if known != (True, False):
        comparison = "more" if known[1] else "fewer"
        raise PolicyError(
            f"vLLM at {control.root} serves another model ({model_info.name}), with {comparison} tokens than the "
            f"learner's {size}: serve the model at model.path"
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
    """Check that a head tied to the embeddings is updated with them; vLLM's CPU build silently keeps the old one. Sends
    weights under which all tokens look alike, so that every token must have the same probability."""
    if (tied := tied_names(model)) is None:
        return
    state = checkpoint_state(model)
    uniform = state[tied[0]][:1].expand_as(state[tied[0]])
    control.load(weights.write(model, state | {tied[0]: uniform.clone(), tied[1]: uniform.clone()}), 0)
    completion = _sample_completion(control, model_info, [1], Sampling(max_new_tokens=4))
    if any(abs(logprob + math.log(uniform.shape[0])) > 0.01 for logprob in completion.logprobs):
        raise PolicyError(
            f"vLLM at {control.root} does not update the output head of a model with tied embeddings: let toolwise "
            "start the server (leave rollout.vllm.base_url out), or serve a folder with a separate lm_head"
        )


def check_logprobs(control: VllmControlClient, model_info: ModelInfo, model: Any) -> None:
    """Check that server and learner agree on the log-probs of a few tokens, sampled at a temperature other than 1."""
    size = int(model.config.vocab_size)
    prompt = [(7 * i + 1) % size for i in range(_PROBE_TOKENS)]
    sampling = Sampling(temperature=2.0, max_new_tokens=_PROBE_TOKENS)
    completion = _sample_completion(control, model_info, prompt, sampling)
    gap = _logprob_gap(model, prompt, completion, sampling.temperature)
    bound = MAX_GAP_FP32 if torch.finfo(model.dtype).bits >= 32 else MEAN_GAP_HALF
    if not gap <= bound:
        raw = _logprob_gap(model, prompt, completion, 1.0) <= bound
        why = (
            "the server's are before temperature, start it with --logprobs-mode processed_logprobs"
            if raw
            else "the server holds another model, or did not load the weights it was sent"
        )
        raise PolicyError(
            f"vLLM at {control.root} and the learner disagree on log-probs by {gap:.3g} (bound {bound:g}): {why}"
        )


def _sample_completion(
    control: VllmControlClient, model_info: ModelInfo, prompt: list[int], sampling: Sampling
) -> Generation:
    try:
        return read_completion(control.complete(completion_body(model_info.name, prompt, sampling)), prompt)
    except ServerError as fault:
        raise PolicyError(f"vLLM at {control.root}: {fault}") from fault


@torch.inference_mode()
def _logprob_gap(model: Any, prompt: list[int], completion: Generation, temperature: float) -> float:
    tokens = list(completion.token_ids)
    ids = torch.tensor([prompt + tokens], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    expected = torch.log_softmax(logits / temperature, dim=-1)[range(len(tokens)), tokens]
    gaps = (expected.cpu() - torch.tensor(list(completion.logprobs))).abs()
    return float(gaps.max() if torch.finfo(model.dtype).bits >= 32 else gaps.mean())
