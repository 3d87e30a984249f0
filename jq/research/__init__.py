"""Research on top of quantization: searches and ablations as few compiled calls."""

from jq.research.curvature import fisher, hessian_trace
from jq.research.sensitivity import Sensitivity, sensitivity

__all__ = ["Sensitivity", "fisher", "hessian_trace", "sensitivity"]
