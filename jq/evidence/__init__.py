"""Reports on what quantization lost, and checks of a model before any work."""
