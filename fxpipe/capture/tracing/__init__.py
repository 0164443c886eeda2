"""From the bytecode of a model to a graph: Dynamo on tensors without memory."""
