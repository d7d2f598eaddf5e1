"""An OpenAI-compatible HTTP server for a model."""

from toolwise.serve.app import build_app
from toolwise.serve.chat import ServedModel
from toolwise.serve.limits import ServerLimits
from toolwise.serve.server import Server

__all__ = ["ServedModel", "Server", "ServerLimits", "build_app"]
