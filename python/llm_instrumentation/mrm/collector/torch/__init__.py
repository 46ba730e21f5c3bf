"""The torch tracer: every operator of a PyTorch model as loads and stores of its tensors."""

from __future__ import annotations

from .tracer import TorchTracer

__all__ = ["TorchTracer"]
