"""The three readings of a graph: in float, in fake-quant and in integers."""
