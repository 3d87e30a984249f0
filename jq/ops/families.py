"""The families of operators. `jq.ops.table.lookup` imports this module, and that registers every rule."""

from jq.ops import (  # noqa: F401
    activations,
    attention,
    blocks,
    control,
    convolutions,
    elementwise,
    loss,
    norm,
    pools,
    products,
    qlinear,
    quant,
    recurrent,
    reduce,
    sampling,
    sequence,
    shape,
    spectral,
    vision,
)
