"""What ranks that are replicas of one stage exchange: gradients, values, and parameters of which each has a part."""
