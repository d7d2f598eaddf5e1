"""Control requests to a vLLM server: query its model and load new weights, through vLLM's development endpoints.

Blocking, because nothing may be sampled meanwhile and a failure must end the run.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolwise.errors import PolicyError
from toolwise.remote.server_errors import parse_error_body

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a server reports about its model; fields it does not report are empty."""

    name: str
    max_context: int
    dtype: str
    """Torch's name, such as "float32"."""
    logprobs_mode: str
    cache_tokens: int = 0
    """What its KV cache holds."""


class VllmStatusError(PolicyError):
    """A response other than 2xx."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class VllmControlClient:
    """`base_url` is that of the OpenAI-compatible endpoints (…/v1); the control endpoints are at its root."""

    def __init__(
        self, base_url: str, *, api_key: str | None = None, timeout_s: float, client: httpx.Client | None = None
    ) -> None:
        import httpx

        self.base_url = base_url.rstrip("/")
        self.root = self.base_url.removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = client or httpx.Client(timeout=timeout_s, headers=headers)

    def model_info(self, name: str = "") -> ModelInfo:
        """The model called `name`, or the first one listed; raises if the server cannot be used for training."""
        listing = self._ask("GET", f"{self.base_url}/models")
        models = listing.get("data") if isinstance(listing, dict) else None
        if not isinstance(models, list) or not all(isinstance(model, dict) for model in models):
            raise PolicyError(f"{self.base_url}/models lists no models: is it a vLLM server?")
        names = [str(model.get("id")) for model in models]
        name = name or (names[0] if names else "")
        entry = next((model for model in models if model.get("id") == name), None)
        if entry is None:
            raise PolicyError(
                f"vLLM at {self.root} serves {', '.join(names) or 'nothing'}, not {name!r}: set rollout.vllm.model"
            )
        info = self._control("server_info?config_format=json", method="GET")
        config = info.get("vllm_config") or {}
        model, cache = config.get("model_config") or {}, config.get("cache_config") or {}
        in_blocks = int(cache.get("num_gpu_blocks") or 0) * int(cache.get("block_size") or 0)
        return ModelInfo(
            name=name,
            max_context=int(entry.get("max_model_len") or 0),
            dtype=str(model.get("dtype") or "").removeprefix("torch."),
            logprobs_mode=str(model.get("logprobs_mode") or ""),
            cache_tokens=int(cache.get("kv_cache_size_tokens") or in_blocks),
        )

    def complete(self, body: dict[str, Any]) -> Any:
        return self._ask("POST", f"{self.base_url}/completions", body)

    def interrupt(self) -> None:
        """Have all running requests return what they have; later ones wait until weights are loaded."""
        self._control("pause?mode=abort")

    def load(self, folder: Path, version: int) -> None:
        """Load weights from a folder that the server can read. Running requests finish first, and nothing computed with
        the old weights is used afterwards."""
        self._control("pause?mode=wait")
        try:
            self._reload(folder, version)
        except PolicyError:
            with suppress(PolicyError):  # other clients may be waiting, and the next run checks the server first
                self._control("resume")
            raise
        self._control("resume")

    def _reload(self, folder: Path, version: int) -> None:
        try:
            # The only vLLM weight transfer that needs no shared GPU (its nccl and ipc engines do).
            self._control("collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
            cache_reset = self._control("reset_prefix_cache").get("success")
            self._control("update_weight_version", {"new_version": str(version)})
        except VllmStatusError as refused:
            raise PolicyError(
                f"{refused}; does it serve the model at model.path, and can it read {folder}? A failed load stops "
                "vLLM's engine: restart the server"
            ) from refused
        if cache_reset is not True:
            raise PolicyError(
                f"vLLM at {self.root} did not reset its prefix cache: does another client use the server?"
            )

    def close(self) -> None:
        self._client.close()

    def _control(self, what: str, body: dict[str, Any] | None = None, *, method: str = "POST") -> dict[str, Any]:
        """Ask a development endpoint."""
        try:
            reply = self._ask(method, f"{self.root}/{what}", body)
        except VllmStatusError as refused:
            if refused.status != 404:
                raise
            raise PolicyError(
                f"vLLM at {self.root} does not accept new weights: start it with VLLM_SERVER_DEV_MODE=1 in its "
                "environment"
            ) from None
        return reply if isinstance(reply, dict) else {}

    def _ask(self, method: str, url: str, body: dict[str, Any] | None = None) -> Any:
        import httpx

        try:
            response = self._client.request(method, url, json=body)
            if not response.is_success:
                detail, _ = parse_error_body(response.content)
                raise VllmStatusError(f"vLLM at {url}: HTTP {response.status_code}: {detail}", response.status_code)
            return response.json()
        except httpx.InvalidURL as fault:
            raise PolicyError(f"rollout.vllm.base_url: {url!r} is not a URL ({fault})") from None
        except httpx.TimeoutException:
            raise PolicyError(f"vLLM at {url} did not reply in time: raise rollout.vllm.timeout_s") from None
        except httpx.HTTPError as fault:
            reason = " ".join(str(fault).split()) or type(fault).__name__
            raise PolicyError(
                f"there is no vLLM server at {self.root} ({reason}): start one, or check rollout.vllm.base_url"
            ) from fault
        except ValueError:
            raise PolicyError(f"{url} replies, but not in JSON: is it a vLLM server?") from None
