"""`fxpipe plan --launch`: the files that train a planned model."""
