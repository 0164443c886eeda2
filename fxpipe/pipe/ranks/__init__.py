"""The same pipe over the processes of torch.distributed."""
