"""torch.compile and Inductor, for stages that are compiled."""
