"""The nouns: values that pass between the rooms. Nothing here imports the rest of fxpipe."""
