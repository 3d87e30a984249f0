"""Number formats and the arithmetic on them, and the forms in which XLA computes them fast."""
