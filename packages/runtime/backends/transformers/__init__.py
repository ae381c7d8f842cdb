"""Targets run by Hugging Face transformers on torch: any decoder whose attention goes through its AttentionInterface."""

from runtime.backends.transformers.target import TransformersTarget

__all__ = ["TransformersTarget"]
