"""What libraries of models call on a pipe."""
