"""Accuracy recovery algorithms, with the names and parameters of Quark's newer configs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from jq.compat.quark.quantization.config.fields import Fields, plain
from jq.errors import ConfigError, suggest


@dataclasses.dataclass
class AlgoConfig(Fields):
    """An algorithm; the subclasses have its parameters."""

    name: ClassVar[str] = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the name and the parameters that differ from the defaults.

        >>> from_dict(CLEConfig(cle_steps=2).to_dict()) == CLEConfig(cle_steps=2)
        True
        """
        usual = {f.name: f.default for f in dataclasses.fields(self)}
        return {"name": self.name} | {name: plain(v) for name, v in self._values() if v != usual[name]}


@dataclasses.dataclass
class CLEConfig(AlgoConfig):
    """Cross-layer equalization.

    >>> CLEConfig(cle_steps=2).cle_weight_threshold
    0.5
    """

    name: ClassVar[str] = "cle"

    cle_balance_method: str = "max"
    cle_steps: int = 1
    cle_weight_threshold: float = 0.5
    cle_scale_append_bias: bool = True
    cle_scale_use_threshold: bool = True
    cle_total_layer_diff_threshold: float = 1.9e-07


@dataclasses.dataclass
class BiasCorrectionConfig(AlgoConfig):
    """Bias correction for the shift that rounding causes."""

    name: ClassVar[str] = "bias_correction"


_LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul", "InstanceNormalization", "LayerNormalization")


@dataclasses.dataclass
class FinetuneConfig(AlgoConfig):
    """Parameters that AdaRound and AdaQuant share."""

    optim_device: str = "cpu"
    infer_device: str = "cpu"
    fixed_seed: int = 1705472343
    data_size: int = 1000000000
    batch_size: int = 1
    num_batches: int = 1
    num_iterations: int = 1000
    learning_rate: float = 0.1
    early_stop: bool = False
    output_index: int = 0
    lr_adjust: tuple[float, float] | None = None
    target_op_type: list[str] = dataclasses.field(default_factory=lambda: list(_LAYERS))
    selective_update: bool = False
    update_bias: bool = False
    output_qdq: bool = False
    drop_ratio: float = 1.0
    mem_opt_level: int = 1
    cache_dir: str | None = None
    log_period: int = 100
    ref_model_path: str | None = None
    dynamic_batch: bool = False
    parallel: bool = False
    reg_param: float = 0.01
    beta_range: tuple[float, float] = (20, 2)
    warm_start: float = 0.2
    select_max_mem_layer: bool = False
    num_workers: int = 1
    pin_memory: bool = False
    use_gds: bool = False


@dataclasses.dataclass
class AdaRoundConfig(FinetuneConfig):
    """AdaRound: each weight rounded up or down for the least output error of its layer.

    >>> AdaRoundConfig(num_iterations=2000).learning_rate
    0.1
    """

    name: ClassVar[str] = "adaround"


@dataclasses.dataclass
class AdaQuantConfig(FinetuneConfig):
    """AdaQuant: weights learned through their rounding.

    >>> AdaQuantConfig().num_iterations, AdaQuantConfig().learning_rate
    (3000, 1e-05)
    """

    name: ClassVar[str] = "adaquant"

    num_iterations: int = 3000
    learning_rate: float = 0.00001


@dataclasses.dataclass
class SmoothQuantConfig(AlgoConfig):
    """Not in jq: quantizing with it is a ConfigError."""

    name: ClassVar[str] = "smooth_quant"

    alpha: float = 0.5


@dataclasses.dataclass
class GPTQConfig(AlgoConfig):
    """Not in jq: quantizing with it is a ConfigError."""

    name: ClassVar[str] = "gptq"

    bits: int = 8
    block_size: int = 128
    group_size: int = -1
    perc_damp: float = 0.01
    act_order: bool = False
    per_channel: bool = False
    mse: bool = False
    weight_symmetric: bool = True


@dataclasses.dataclass
class QuarotConfig(AlgoConfig):
    """Not in jq: quantizing with it is a ConfigError."""

    name: ClassVar[str] = "quarot"

    r_matrix_dim: int = 4096
    use_random_had: bool = False
    r_config_path: str | None = None


@dataclasses.dataclass
class AutoMixprecisionConfig(AlgoConfig):
    """Layers of a 16-bit config in the target's 8 bits, until a threshold: by `jq.auto`, which widens what loses most.

    Read are `target_layer_config`, `metric_threshold`, `metric_default` (kl or sqnr) and `metric_evaluate_fn`, a function of
    a model; the other fields steer Quark's own search.
    """

    name: ClassVar[str] = "auto_mixprecision"

    target_layer_config: Any
    target_op_type: Any = ("Conv", "ConvTranspose", "Gemm", "MatMul")
    subgraph_json: Any = None
    include_layers: list[str] | None = None
    exclude_layers: list[str] | None = None
    data_size: int = 0
    metric_output_index: int = 0
    metric_distance_fn: Any = None
    metric_evaluate_fn: Any = None
    metric_default: str = "l2"
    metric_threshold: float | None = 0
    metric_optimize_object: str = "speed"
    sensitivity_cache_file: Any = None
    worker_num: int = 1
    dual_quant_nodes: bool = False
    no_input_qdq_shared: bool = False
    shared_param_mode: str = "propagate"


def from_dict(options: Mapping[str, Any]) -> AlgoConfig:
    """Return the algorithm that `to_dict` described.

    >>> from_dict({"name": "adaround", "num_iterations": 500}).num_iterations
    500
    """
    known = {kind.name: kind for base in (AlgoConfig, FinetuneConfig) for kind in base.__subclasses__() if kind.name}
    name = options.get("name")
    if name not in known:
        raise ConfigError(f"no algorithm {name!r}.{suggest(str(name), known)} Available: {', '.join(known)}")
    return known[name](**{k: v for k, v in options.items() if k != "name"})
