"""nn.Module -> Graph."""
