"""The names that users of AMD's quantizers already type, so that their scripts run after a change of the import line.

`quark` stands for `quark.onnx`, `vai_q_onnx` for the package of that name.
"""
