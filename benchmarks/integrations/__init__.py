"""fxpipe in other people's training loops: each script trains a small model of random weights on CPU workers."""
