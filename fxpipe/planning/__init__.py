"""Profile and Cluster -> Plan. No torch."""

from fxpipe.planning.stages.loss_placement import with_loss
from fxpipe.planning.stages.parameter_placement import Placement, homes, owners, plan_like
from fxpipe.planning.stages.plan_stages import plan

__all__ = ["Placement", "homes", "owners", "plan", "plan_like", "with_loss"]
