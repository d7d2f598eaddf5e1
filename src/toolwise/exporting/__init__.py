"""A trained model on its way out: a plain Hugging Face folder with a model card, from a run or a checkpoint of one."""

from toolwise.exporting.folder import Export, export_model

__all__ = ["Export", "export_model"]
