"""The plan is data: which tensors are quantized, and how, as a pytree."""

from jq.plan.model import Plan, QParams, QTensor

__all__ = ["Plan", "QParams", "QTensor"]
