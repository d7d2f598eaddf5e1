"""What a trainer asks of a vLLM server besides tokens: what it serves, and to take new weights. vLLM's own development
endpoints, one call each; blocking, since nothing is to be sampled meanwhile and a failure must end the run."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolwise.errors import PolicyError
from toolwise.policies.openai.server_errors import parse_error_body

if TYPE_CHECKING:
    import httpx

_DEV_MODE_HINT = "VLLM_SERVER_DEV_MODE=1 in its environment"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a server says of its model; empty where it does not."""

    name: str
    max_context: int
    dtype: str
    """As torch calls it: "float32"."""
    logprobs_mode: str


class VllmStatusError(PolicyError):
    """An answer other than 2xx."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class VllmControlClient:
    """`base_url` is that of the OpenAI-compatible endpoints (…/v1); the others lie beside it."""

    def __init__(
        self, base_url: str, *, api_key: str | None = None, timeout_s: float, client: httpx.Client | None = None
    ) -> None:
        import httpx

        self.base_url = base_url.rstrip("/")
        self.root = self.base_url.removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = client or httpx.Client(timeout=timeout_s, headers=headers)

    def model_info(self, name: str = "") -> ModelInfo:
        """The model called `name`, or the one there is; an error where it cannot be trained with."""
        models = self._list(self._ask("GET", f"{self.base_url}/models"))
        names = [str(model.get("id")) for model in models]
        name = name or (names[0] if names else "")
        found = next((model for model in models if model.get("id") == name), None)
        if found is None:
            raise PolicyError(
                f"vLLM at {self.root} serves {', '.join(names) or 'nothing'}, not {name!r}: set rollout.vllm.model"
            )
        try:
            told = self._ask("GET", f"{self.root}/server_info?config_format=json")
        except VllmStatusError as refused:
            raise self._no_weight_transfer() if refused.status == 404 else refused from None
        model = (told.get("vllm_config") or {}).get("model_config") or {} if isinstance(told, dict) else {}
        return ModelInfo(
            name=name,
            max_context=int(found.get("max_model_len") or 0),
            dtype=str(model.get("dtype") or "").removeprefix("torch."),
            logprobs_mode=str(model.get("logprobs_mode") or ""),
        )

    def complete(self, body: dict[str, Any]) -> Any:
        return self._ask("POST", f"{self.base_url}/completions", body)

    def load(self, folder: Path, version: int) -> None:
        """Weights from a folder that the server can read. Whoever is being served is served to the end before, and
        nothing that the old weights computed is used after."""
        self._transfer("pause?mode=wait")
        try:
            self._reload(folder, version)
        except PolicyError:
            with suppress(PolicyError):  # others may be waiting, and the next run will ask before it sends anything
                self._transfer("resume")
            raise
        self._transfer("resume")

    def _reload(self, folder: Path, version: int) -> None:
        try:
            # The one transfer of vLLM's that needs no GPU between the two processes (its nccl and ipc engines do).
            self._transfer("collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
            forgotten = self._transfer("reset_prefix_cache").get("success")
            self._transfer("update_weight_version", {"new_version": str(version)})
        except VllmStatusError as refused:
            raise PolicyError(
                f"{refused}; does it serve the model at model.path, and can it read {folder}? A refused load ends "
                "vLLM's engine: start the server again"
            ) from refused
        if forgotten is not True:
            raise PolicyError(
                f"vLLM at {self.root} did not forget its cached prefixes: does somebody else use the server?"
            )

    def close(self) -> None:
        self._client.close()

    def _transfer(self, what: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            reply = self._ask("POST", f"{self.root}/{what}", body)
        except VllmStatusError as refused:
            raise self._no_weight_transfer() if refused.status == 404 else refused from None
        return reply if isinstance(reply, dict) else {}

    def _no_weight_transfer(self) -> PolicyError:
        return PolicyError(f"vLLM at {self.root} takes no new weights: start it with {_DEV_MODE_HINT}")

    def _ask(self, method: str, url: str, body: dict[str, Any] | None = None) -> Any:
        import httpx

        try:
            response = self._client.request(method, url, json=body)
            if not response.is_success:
                said, _ = parse_error_body(response.content)
                raise VllmStatusError(f"vLLM at {url}: HTTP {response.status_code}: {said}", response.status_code)
            return response.json()
        except httpx.InvalidURL as fault:
            raise PolicyError(f"rollout.vllm.base_url: {url!r} is no URL ({fault})") from None
        except httpx.TimeoutException:
            raise PolicyError(f"vLLM at {url} gave no answer in time: raise rollout.vllm.timeout_s") from None
        except httpx.HTTPError as fault:
            reason = " ".join(str(fault).split()) or type(fault).__name__
            raise PolicyError(
                f"there is no vLLM at {self.root} ({reason}): start one, or see rollout.vllm.base_url"
            ) from fault
        except ValueError:
            raise PolicyError(f"{url} answers, but not in JSON: is a vLLM there?") from None

    def _list(self, models: Any) -> list[dict[str, Any]]:
        data = models.get("data") if isinstance(models, dict) else None
        if not isinstance(data, list) or not all(isinstance(model, dict) for model in data):
            raise PolicyError(f"{self.base_url}/models lists no models: is a vLLM there?")
        return data
