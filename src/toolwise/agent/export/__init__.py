"""Exports a run or a checkpoint as a plain Hugging Face folder with a model card."""

from toolwise.agent.export.folder import Export, export_model

__all__ = ["Export", "export_model"]
