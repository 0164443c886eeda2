"""The recurrent networks of the SOAP paper as operator graphs, unrolled: an operator for each layer and each step. All
steps of a layer hold the same weights, whose gradients are exchanged once.

    lstm1.0 ─▶ lstm1.1 ─▶ lstm1.2
       ▲          ▲          ▲
    lstm0.0 ─▶ lstm0.1 ─▶ lstm0.2
       ▲          ▲          ▲
    embed.0    embed.1    embed.2
"""

from __future__ import annotations

from collections.abc import Sequence

from fxpipe.ir.operators.operators import Operator, OperatorGraph

from .graph_builder import Draft
from .operator_kinds import attention, embedding, lstm, projected_softmax, tokens


def rnntc(
    batch: int = 64, steps: int = 40, *, vocab: int = 32000, width: int = 1024, layers: int = 4, classes: int = 2
) -> OperatorGraph:
    """Text classification: one softmax, after the last step."""
    add = Draft()
    states, _ = _unrolled(add, "", batch, steps, vocab, width, [None] * layers)
    add(projected_softmax("softmax", states[-1], classes))
    return add.graph("RNNTC")


def rnnlm(batch: int = 64, steps: int = 40, *, vocab: int = 10000, width: int = 2048, layers: int = 2) -> OperatorGraph:
    """Language model: a softmax over the words at each step."""
    add = Draft()
    states, _ = _unrolled(add, "", batch, steps, vocab, width, [None] * layers)
    for step, state in enumerate(states):
        add(projected_softmax(f"softmax.{step}", state, vocab, shared="softmax"))
    return add.graph("RNNLM")


def nmt(
    batch: int = 64,
    steps: int = 40,
    translated: int | None = None,
    *,
    vocab: int = 32000,
    width: int = 1024,
    layers: int = 2,
) -> OperatorGraph:
    """Translation of `steps` words into `translated` words (by default as many): an encoder, a decoder that starts from
    the encoder's last states, attention of each decoder step to all encoder steps, a softmax over the words."""
    add = Draft()
    encoded, last = _unrolled(add, "source.", batch, steps, vocab, width, [None] * layers)
    decoded, _ = _unrolled(add, "target.", batch, translated or steps, vocab, width, last)
    for step, state in enumerate(decoded):
        attended = add(attention(f"attention.{step}", state, tuple(encoded), shared="attention"))
        add(projected_softmax(f"softmax.{step}", attended, vocab, shared="softmax"))
    return add.graph("NMT")


def _unrolled(
    add: Draft, prefix: str, batch: int, steps: int, vocab: int, width: int, memory: Sequence[Operator | None]
) -> tuple[list[Operator], Sequence[Operator | None]]:
    """An embedding and layers of LSTM cells over the steps, the layers' first states in `memory`. Returns the last
    layer's results, and each layer's last state."""
    results = []
    for step in range(steps):
        words = add(tokens(f"{prefix}words.{step}", batch))
        x = add(embedding(f"{prefix}embed.{step}", words, vocab, width, shared=f"{prefix}embed"))
        states = []
        for layer, state in enumerate(memory):
            x = add(lstm(f"{prefix}lstm{layer}.{step}", x, state, width, shared=f"{prefix}lstm{layer}"))
            states.append(x)
        memory = states
        results.append(x)
    return results, memory
