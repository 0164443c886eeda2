"""Profile and Cluster -> Plan. No torch."""

from fxpipe.planning.stages.loss_placement import with_loss
from fxpipe.planning.stages.parameter_placement import homes, owners, plan_like
from fxpipe.planning.stages.plan_stages import plan

__all__ = ["homes", "owners", "plan", "plan_like", "with_loss"]
