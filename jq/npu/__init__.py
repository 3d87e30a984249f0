"""Everything known of the chips: facts, targets, support, rewrites, forms and constraints."""
