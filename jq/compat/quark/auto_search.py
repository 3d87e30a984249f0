"""`quark.onnx.auto_search`, the older path of `quark.onnx.quantization.auto_search`."""

from jq.compat.quark.quantization.auto_search import (
    AutoSearch,
    AutoSearchConfig,
    AutoSearchPro,
    SearchSpace,
    cos_metric,
    generate_all_configs,
    get_auto_search_config,
    l1_metric,
    l2_metric,
    psnr_metric,
    split_config_levels,
    ssim_metric,
)

__all__ = [
    "AutoSearch", "AutoSearchConfig", "AutoSearchPro", "SearchSpace", "cos_metric", "generate_all_configs",
    "get_auto_search_config", "l1_metric", "l2_metric", "psnr_metric", "split_config_levels", "ssim_metric",
]  # fmt: skip
