"""Puts the bodies of `torch.utils.checkpoint` calls in place of the calls.

What is recomputed in backward is the plan's decision, for whole stages; a checkpoint inside a stage would hide its ops,
its random numbers and its running statistics from everything that handles them.
"""

from __future__ import annotations

import operator

from torch import fx

from fxpipe.capture.capture_errors import line_of
from fxpipe.ir.graph.graph import Origin

CHECKPOINTED = "fxpipe_checkpointed"
BODIES = ("tag_activation_checkpoint", "wrap")


def inline_checkpoints(module: fx.GraphModule) -> None:
    """Replace every call of a body by the body's ops, in place. The module's `meta` has the first call under
    CHECKPOINTED."""
    for node in list(module.graph.nodes):
        if node.op != "call_function" or getattr(node.target, "__name__", "") not in BODIES:
            continue
        module.meta.setdefault(CHECKPOINTED, line_of(node) or Origin("", 0, "", ""))
        body = getattr(module, node.args[0].target)
        inline_checkpoints(body)
        given = dict(zip((n for n in body.graph.nodes if n.op == "placeholder"), node.args[1:], strict=True))
        with module.graph.inserting_before(node):
            results = module.graph.graph_copy(body.graph, given)
        for user in list(node.users):
            if user.target is operator.getitem:
                user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
                module.graph.erase_node(user)
        if not node.users:
            source = node.args[0]
            module.graph.erase_node(node)
            if not source.users:
                module.graph.erase_node(source)
