"""Custom operator domains that quantized models use."""

MICROSOFT = "com.microsoft"
QUARK = "com.amd.quark"  # AMD Quark's custom operators
VITIS = "com.vai.quantize"  # those of its predecessor
CONTRIB = "ai.onnx.contrib"  # where the predecessor has FixNeuron
