"""An OpenAI-compatible HTTP server for a model, or for an agent that runs its own tools (`toolwise serve`)."""

from toolwise.serve.app import ServerLimits, build_app
from toolwise.serve.chat import ServedModel
from toolwise.serve.server import Server

__all__ = ["ServedModel", "Server", "ServerLimits", "build_app"]
