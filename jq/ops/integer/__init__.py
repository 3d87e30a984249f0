"""Integers with an exact scale, and the sums, products and roundings that integer rules share."""
