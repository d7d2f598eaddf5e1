"""Build a run's vLLM engine from its configuration: connect to or start a server, check it, and send the weights."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from toolwise.config.schema import RunConfig
from toolwise.policies.vllm.control import VllmControlClient
from toolwise.policies.vllm.engine import VllmEngine
from toolwise.policies.vllm.server import VllmServer
from toolwise.policies.vllm.server_check import check_logprobs, check_settings, check_tied_head, check_vocabulary
from toolwise.policies.vllm.weights import WeightsFolder
from toolwise.remote.endpoint import Endpoint, read_api_key


def build_vllm(config: RunConfig, model: Any, folder: str) -> VllmEngine:
    """`folder` is where `model` was loaded from; a server that is started here takes its tokenizer from there."""
    settings, rollout = config.rollout.vllm, config.rollout
    key = read_api_key(settings.api_key_env, "rollout.vllm.api_key_env")
    with ExitStack() as cleanup:
        weights = WeightsFolder(settings.weights_dir)
        cleanup.callback(weights.close)
        server = None
        if not settings.base_url:
            server = VllmServer(
                settings.command,
                weights.write(model),
                tokenizer=folder,
                dtype=str(model.dtype).removeprefix("torch."),
                start_s=settings.start_s,
            )
            cleanup.callback(server.close)
        url = server.base_url if server is not None else settings.base_url
        endpoint = Endpoint(
            f"{url.rstrip('/')}/completions",
            api_key=key,
            timeout_s=settings.timeout_s,
            deadline_s=max(rollout.deadline_s, settings.timeout_s),
            max_concurrent=rollout.max_batch,
            seed=config.seed,
        )
        control = VllmControlClient(url, api_key=key, timeout_s=settings.timeout_s)
        cleanup.callback(control.close)
        model_info = control.model_info(settings.model)
        check_settings(model_info, model, control.root)
        check_vocabulary(control, model_info, model)
        check_tied_head(control, model_info, model, weights)
        engine = VllmEngine(model, model_info, control=control, endpoint=endpoint, weights=weights, server=server)
        engine.weights_changed(0)
        check_logprobs(control, model_info, model)
        cleanup.pop_all()
    return engine
