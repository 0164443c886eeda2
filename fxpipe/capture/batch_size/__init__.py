"""What a trace shows of the batch size: graphs in which it is a number, and conditions on it."""
