"""`quark.onnx.quantization.auto_search`: many configs tried on one model, by jq's pipeline.

Trials share what they have in common, as in `jq.research.ablate`: the data are read once, and what a calibration measures
serves all configs that calibrate alike. For a target on unseen data take `jq.auto`, which climbs.
"""

from jq.compat.quark.quantization.auto_search.pro import AutoSearchPro, get_auto_search_config
from jq.compat.quark.quantization.auto_search.search import AutoSearch, AutoSearchConfig
from jq.compat.quark.quantization.auto_search.space import SearchSpace, generate_all_configs, split_config_levels
from jq.compat.quark.quantization.auto_search.trials import (
    cos_metric,
    l1_metric,
    l2_metric,
    psnr_metric,
    ssim_metric,
)

__all__ = [
    "AutoSearch", "AutoSearchConfig", "AutoSearchPro", "SearchSpace", "cos_metric", "generate_all_configs",
    "get_auto_search_config", "l1_metric", "l2_metric", "psnr_metric", "split_config_levels", "ssim_metric",
]  # fmt: skip
