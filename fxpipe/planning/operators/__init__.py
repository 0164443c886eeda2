"""Operator-level parallelism: what each operator may be cut into, what a strategy takes, and which strategy to take.

OperatorGraph + Cluster + Strategy --simulate--> seconds, Timeline
OperatorGraph + Cluster --search--> Strategy
"""
