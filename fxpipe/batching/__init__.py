"""Whether the batch of a graph may be cut: the samples in each value, what mixes them, and how results of micro-batches
make up those of the batch."""
