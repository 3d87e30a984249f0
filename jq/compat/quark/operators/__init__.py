"""`quark.onnx.operators`, whose library of operators jq does not need."""
