"""What `fxpipe.plan` and `fxpipe.search` return: values to explain, compare and save."""
