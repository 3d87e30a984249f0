"""The ONNX backend suite, run on `jq.testing.backend`, and the list of cases that must pass."""
