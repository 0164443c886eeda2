"""Whether a pipe computes what the plain model does, and where the two part."""
