"""What a training loop needs besides the module: checkpoints, optimizer state, gradients across processes."""
