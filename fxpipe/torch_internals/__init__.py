"""All that fxpipe uses of torch without torch promising it: one file for each capability.

Each file says what fxpipe does where a torch lacks the capability: the same by another way, or an error that names it.
"""
