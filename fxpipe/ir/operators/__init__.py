"""A model as operator-level parallelism sees it: operators, and strategies that cut them."""
