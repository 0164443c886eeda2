"""Functions on autograd's graph: recomputation, transfers, edges without gradients, split backward."""
