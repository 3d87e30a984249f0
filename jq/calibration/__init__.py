"""Statistics of every tensor from one streaming pass over the data."""
