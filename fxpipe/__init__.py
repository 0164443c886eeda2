"""fxpipe: compiles any PyTorch model into a readable pipeline."""
