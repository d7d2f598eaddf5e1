"""A trained model on its way out: a plain Hugging Face folder with a model card, from a run or a checkpoint of one."""

from toolwise.agent.export.folder import Export, export_model

__all__ = ["Export", "export_model"]
