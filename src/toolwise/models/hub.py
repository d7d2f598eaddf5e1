"""Models by name: a snapshot of a Hugging Face repository, downloaded once and then used like any folder."""

from __future__ import annotations

import logging
from pathlib import Path

from toolwise.errors import ModelError

log = logging.getLogger("toolwise.models")

FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py")
"""What a model needs. Pickled weights are not among them."""
AGENT_FILES = ("code/*", "documents/*", "wording.*")
"""What an agent folder holds besides its model."""
OTHER_FORMATS = ("original/*", "onnx/*", "consolidated*", "*.gguf")
CONNECT_S = 3.0
"""How long the hub may take to accept a connection. Its client would retry for 20 s and more, with warnings."""
_UNREACHABLE = frozenset({"ConnectError", "ConnectTimeout", "ConnectionError", "ProxyError", "SSLError"})
"""Names of errors, since the hub's client changes the library that it connects with."""


def download(name: str, revision: str = "") -> Path:
    """The folder of the repository `name`, at a branch, tag or commit; taken from the local cache where it is there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    at = f" at revision {revision!r}" if revision else ""
    no_connection = _connection_error()
    try:
        folder = snapshot_download(
            name,
            revision=revision or None,
            allow_patterns=[*FILES, *AGENT_FILES],
            ignore_patterns=list(OTHER_FORMATS),
            local_files_only=bool(no_connection),
        )
    except GatedRepoError as fault:
        raise ModelError(
            f"the model {name!r} is gated: accept its terms on the hub and log in (hf auth login)"
        ) from fault
    except RevisionNotFoundError as fault:
        raise ModelError(f"the model {name!r} has no revision {revision!r}: check model.revision") from fault
    except RepositoryNotFoundError as fault:
        raise ModelError(
            f"there is no folder and no public model {name!r}: check the spelling of model.path; a private model "
            "needs a login (hf auth login)"
        ) from fault
    except Exception as fault:  # no network, no space, a name that is not one: many types
        reason = no_connection or (str(fault).strip().splitlines() or [type(fault).__name__])[0]
        raise ModelError(
            f"the model {name!r}{at} is not in the local cache and cannot be downloaded: {reason}; give a folder, or "
            "download it first where there is a network (hf download)"
        ) from fault
    log.info("the model %s%s is in %s", name, at, folder)
    return Path(folder)


def _connection_error() -> str:
    """Why the hub cannot be reached; empty if it can, or if its client is told not to try (HF_HUB_OFFLINE)."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=CONNECT_S)
    except Exception as fault:  # a slow reply or a refused method is still a hub that is there
        if type(fault).__name__ in _UNREACHABLE:
            reason = (str(fault).strip().splitlines() or [type(fault).__name__])[0]
            return f"{constants.ENDPOINT} cannot be reached ({reason})"
    return ""
