"""The names that users of AMD's quantizers already type: their scripts run after changing the import line.

`quark` corresponds to `quark.onnx`, `vai_q_onnx` to the package of that name.
"""
