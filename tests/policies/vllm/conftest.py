"""A stand-in for a vLLM server: the bundled model behind the vLLM endpoints that toolwise uses. It really loads the
weights it is sent; `tests/policies/vllm/test_vllm_real.py` tests against vLLM itself."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from toolwise.models import load_model
from toolwise.policies.local import LocalPolicy
from toolwise.protocols import Sampling
from toolwise.serve import Server

torch.set_num_threads(1)


@dataclass
class StandIn:
    """A stand-in server; tests choose how it misbehaves."""

    model: Any
    chat: Any
    url: str = ""
    development: bool = True
    logprobs_mode: str = "processed_logprobs"
    dtype: str = "torch.float32"
    keeps_head: bool = False
    """The head of a tied model is not updated with new weights."""
    ignores_weights: bool = False
    ignores_after: int | None = None
    """Number of weight loads accepted before all others are ignored."""
    resets: bool = True
    refuses_weights: bool = False
    faults: list[int] = field(default_factory=list)
    """HTTP statuses of the next completions."""
    aborts: int = 0
    """Number of completions that are cut off."""
    asked: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    version: str = ""
    paused: bool = False

    def __post_init__(self) -> None:
        self.policy = LocalPolicy(self.model, self.chat, Sampling(), engine="transformers")

    def app(self) -> Starlette:
        control = {
            "/pause": self.pause,
            "/resume": self.resume,
            "/collective_rpc": self.rpc,
            "/reset_prefix_cache": self.reset,
            "/update_weight_version": self.label,
        }
        routes = [Route(path, self.developed(answer), methods=["POST"]) for path, answer in control.items()]
        routes.append(Route("/server_info", self.developed(self.info)))
        routes.append(Route("/v1/models", self.models))
        routes.append(Route("/v1/completions", self.complete, methods=["POST"]))
        return Starlette(routes=routes)

    def developed(self, answer: Any) -> Any:
        async def asked(request: Request) -> Response:
            self.asked.append(request.url.path.removeprefix("/"))
            if not self.development:
                return JSONResponse({"detail": "Not Found"}, 404)
            found: Response = await answer(request)
            return found

        return asked

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "small", "max_model_len": 4096}, {"id": "adapter"}]})

    async def info(self, request: Request) -> Response:
        told = {"dtype": self.dtype, "logprobs_mode": self.logprobs_mode}
        return JSONResponse({"vllm_config": {"model_config": told}})

    async def pause(self, request: Request) -> Response:
        assert request.query_params["mode"] == "wait"
        self.paused = True
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        self.paused = False
        return JSONResponse({"status": "resumed"})

    async def label(self, request: Request) -> Response:
        self.version = (await request.json())["new_version"]
        return JSONResponse({"success": True})

    async def reset(self, request: Request) -> Response:
        return JSONResponse({"success": self.resets})

    async def rpc(self, request: Request) -> Response:
        from safetensors.torch import load_file

        body = await request.json()
        assert body["method"] == "reload_weights"
        if self.refuses_weights:
            return JSONResponse({"error": {"message": "shapes do not match"}}, 500)
        assert self.paused
        state = load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors")
        if self.keeps_head:
            state["lm_head.weight"] = self.model.lm_head.weight.detach().clone()
        late = self.ignores_after is not None and self.asked.count("collective_rpc") > self.ignores_after
        if not self.ignores_weights and not late:
            self.model.load_state_dict(state)
        return JSONResponse({"results": [None]})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if self.faults:
            return JSONResponse({"error": {"message": "no"}}, self.faults.pop(0))
        if max(body["prompt"]) >= self.policy.vocabulary:
            return JSONResponse({"error": {"message": f"Token id {max(body['prompt'])} is out of vocabulary"}}, 400)
        if len(body["prompt"]) + body["max_tokens"] > 4096:
            return JSONResponse({"error": {"message": "This model's maximum context length is 4096 tokens."}}, 400)
        sampling = Sampling(
            temperature=body["temperature"] or 1.0,
            do_sample=body["temperature"] > 0,
            max_new_tokens=body["max_tokens"],
            seed=body["seed"],
            stop_token_ids=tuple(body["stop_token_ids"]),
        )
        found = await self.policy.generate(body["prompt"], sampling)
        logprobs = list(found.logprobs)
        if self.logprobs_mode == "raw_logprobs":
            logprobs = forced(self.model, body["prompt"], list(found.token_ids), 1.0)
        self.aborts, aborted = max(0, self.aborts - 1), self.aborts > 0
        choice = {
            "finish_reason": "abort" if aborted else found.finish_reason,
            "token_ids": list(found.token_ids),
            "prompt_token_ids": body["prompt"],
            "logprobs": {"token_logprobs": logprobs},
        }
        return JSONResponse({"choices": [choice]})


@torch.inference_mode()
def forced(model: Any, prompt: list[int], tokens: list[int], temperature: float) -> list[float]:
    """Log-probs of a teacher-forced pass."""
    logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    found: list[float] = torch.log_softmax(logits / temperature, -1)[range(len(tokens)), tokens].tolist()
    return found


@pytest.fixture(scope="session")
def loaded() -> tuple[Any, Any]:
    return load_model("builtin:small", device="cpu")


@pytest.fixture
def teacher_forced() -> Any:
    return forced


@pytest.fixture
def stand_in(loaded: tuple[Any, Any]) -> Iterator[StandIn]:
    model, chat = loaded
    # The head is a separate tensor, so that it can stay while the embeddings change.
    apart = copy.deepcopy(model)
    apart.lm_head.weight = torch.nn.Parameter(apart.lm_head.weight.detach().clone())
    made = StandIn(apart, chat)
    with Server(made.app()) as server:
        made.url = server.url
        yield made
