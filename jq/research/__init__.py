"""Research on top of quantization: searches and ablations as few compiled calls."""

from jq.research.curvature import fisher, hessian_trace
from jq.research.mixed import Mixed, mixed_precision
from jq.research.sensitivity import Sensitivity, sensitivity

__all__ = ["Mixed", "Sensitivity", "fisher", "hessian_trace", "mixed_precision", "sensitivity"]
