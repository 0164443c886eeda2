"""Profile and Cluster -> Plan. No torch."""

from .homes import homes, plan_like
from .plan import plan

__all__ = ["homes", "plan", "plan_like"]
