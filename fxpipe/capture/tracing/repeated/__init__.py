"""Equal layers of a model: Dynamo traces one of them, and the graph gets a copy for each."""
