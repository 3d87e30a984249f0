"""What one asks of quantization rather than what one ships: searches and ablations over plans, which are data."""

from jq.research.descent import Step
from jq.research.exponents import Search, search_exponents

__all__ = ["Search", "Step", "search_exponents"]
