"""The bricks that generated code stands on. Nothing here imports the rest of fxpipe."""
