"""What one asks of quantization rather than what one ships: searches and ablations over plans, which are data."""

from jq.research.descent import Step
from jq.research.exponents import Search, search_exponents
from jq.research.integer_factors import equalize_pow2

__all__ = ["Search", "Step", "equalize_pow2", "search_exponents"]
