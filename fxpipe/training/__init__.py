"""What a training loop needs beside the module: checkpoints, optimizer state, gradients across processes."""
