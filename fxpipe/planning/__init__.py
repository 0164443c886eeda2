"""Profile and Cluster -> Plan. No torch."""

from .homes import homes, plan_like
from .loss import with_loss
from .plan import plan

__all__ = ["homes", "plan", "plan_like", "with_loss"]
