"""Operator-level parallelism: how operators may be cut, how long a strategy takes, and the search for a fast one.

OperatorGraph + Cluster + Strategy --simulate--> seconds, Timeline
OperatorGraph + Cluster --search--> Strategy
"""
