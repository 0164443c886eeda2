"""The data that the other packages exchange. Nothing here imports the rest of fxpipe."""
