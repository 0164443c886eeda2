"""Capture layer by layer: a repeated submodule is one op of the model's trace, and has a trace of its own."""
