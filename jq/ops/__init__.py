"""The op table by family. Importing this package registers every rule."""

from jq.ops import (  # noqa: F401
    attention,
    blocks,
    control,
    loss,
    math,
    nn,
    norm,
    quant,
    random,
    recurrent,
    reduce,
    sequence,
    shape,
    signal,
    vision,
)
