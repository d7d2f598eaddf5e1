"""A stand-in for a vLLM server: the bundled model behind the vLLM endpoints that toolwise uses. It really loads the
weights it is sent; `tests/policies/vllm/test_vllm_real.py` tests against vLLM itself."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator, Sequence
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
    cache: dict[str, Any] = field(default_factory=lambda: {"num_gpu_blocks": 100, "block_size": 16})
    token_s: float = 0.0
    """Seconds that each token takes."""
    written: int = 0
    """Tokens of all completions so far, where they take time."""
    running: int = 0
    requests: list[asyncio.Event] = field(default_factory=list)
    """Of each completion under way: set when it is interrupted."""
    interrupted: int = 0
    """Completions that were returned as they were."""

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
        model = {"dtype": self.dtype, "logprobs_mode": self.logprobs_mode}
        return JSONResponse({"vllm_config": {"model_config": model, "cache_config": self.cache}})

    async def pause(self, request: Request) -> Response:
        """No request starts from now on; those under way end by themselves, or at once."""
        mode = request.query_params["mode"]
        assert mode in ("wait", "abort")
        self.paused = True
        for event in self.requests if mode == "abort" else ():
            event.set()
        await until(lambda: not self.running)
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        self.paused = False
        return JSONResponse({"status": "resumed"})

    async def label(self, request: Request) -> Response:
        self.version = (await request.json())["new_version"]
        return JSONResponse({"success": True})

    async def reset(self, request: Request) -> Response:
        assert not self.running
        return JSONResponse({"success": self.resets})

    async def rpc(self, request: Request) -> Response:
        from safetensors.torch import load_file

        body = await request.json()
        assert body["method"] == "reload_weights"
        if self.refuses_weights:
            return JSONResponse({"error": {"message": "shapes do not match"}}, 500)
        assert self.paused
        assert not self.running
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
        interrupt = asyncio.Event()
        self.requests.append(interrupt)
        try:
            await until(lambda: not self.paused or interrupt.is_set())
            return JSONResponse({"choices": [await self.sample(body["prompt"], sampling, interrupt)]})
        finally:
            self.requests.remove(interrupt)

    async def sample(self, prompt: Sequence[int], sampling: Sampling, interrupt: asyncio.Event) -> dict[str, Any]:
        tokens, logprobs, finish = list[int](), list[float](), "abort"
        if not interrupt.is_set():
            self.running += 1
            found = await self.policy.generate(prompt, sampling)
            tokens, logprobs, finish = list(found.token_ids), list(found.logprobs), found.finish_reason
            if self.logprobs_mode == "raw_logprobs":
                logprobs = forced(self.model, list(prompt), tokens, 1.0)
            count = 0
            while self.token_s and count < len(tokens) and not interrupt.is_set():
                await asyncio.sleep(self.token_s)
                count += 1
                self.written += 1
            if interrupt.is_set():
                tokens, logprobs, finish = tokens[:count], logprobs[:count], "abort"
            self.running -= 1
        self.interrupted += interrupt.is_set()
        self.aborts, aborted = max(0, self.aborts - 1), self.aborts > 0
        return {
            "finish_reason": "abort" if aborted else finish,
            "token_ids": tokens,
            "prompt_token_ids": list(prompt),
            "logprobs": {"token_logprobs": logprobs},
        }


async def until(ready: Callable[[], bool]) -> None:
    """The server and the tests are in different threads, which set no events of each other."""
    while not ready():  # noqa: ASYNC110
        await asyncio.sleep(0.002)


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
def wait_until() -> Any:
    return until


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
