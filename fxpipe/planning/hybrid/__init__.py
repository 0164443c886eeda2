"""Plans with replicas for whole clusters: the planners, and how long a plan takes."""
