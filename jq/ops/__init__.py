"""Operators: the table, the rules of each family, and views of nodes."""
