"""Whether a pipe computes the same as the plain model, and where they first differ."""
