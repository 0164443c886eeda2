"""Pieces with state: buffers, random numbers, recurrent cells, own autograd functions, checkpoints, opaque modules."""

from __future__ import annotations

from .pieces import Piece, simple

BUFFERS, RANDOM, MIXES = (frozenset({name}) for name in ("buffers", "random", "mixes"))

STATE = {
    "counter": Piece(
        "self.$m.add_(0.25)\n$o = $x + self.$m", "self.register_buffer('$m', torch.zeros(()))", flags=BUFFERS
    ),
    "moving average": Piece(
        "if self.training:\n    with torch.no_grad():\n        self.$m.mul_(0.9).add_($x.detach().mean(0), alpha=0.1)\n"
        "$o = $x - self.$m",
        "self.register_buffer('$m', torch.zeros($w))",
        flags=BUFFERS | MIXES,
    ),
    "buffer assigned": Piece(
        "self.$m = self.$m * 0.5 + 1\n$o = $x * self.$m", "self.register_buffer('$m', torch.randn($w))", flags=BUFFERS
    ),
    "buffer copied into": Piece(
        "$o = $x + self.$m\nself.$m.copy_(self.$m.roll(1))",
        "self.register_buffer('$m', torch.randn($w))",
        flags=BUFFERS,
    ),
    "number of steps": Piece(
        "if self.training:\n    self.$m += 1\n$o = $x / (1 + self.$m)",
        "self.register_buffer('$m', torch.tensor(0, dtype=torch.long))",
        flags=BUFFERS,
    ),
    "constant buffer": Piece("$o = $x * self.$m", "self.register_buffer('$m', torch.randn($w), persistent=False)"),
    "constant of the module": Piece("$o = $x * self.$m", "self.$m = torch.linspace(0.5, 1.5, $w, dtype=torch.float64)"),
    "batch norm": Piece("$o = self.$m($x)", "self.$m = nn.BatchNorm1d($w)", flags=BUFFERS | MIXES | {"norm"}),
    "centred": simple("$x - $x.mean(0)", flags=MIXES),
    "pairs": simple("F.normalize($x, dim=-1) @ F.normalize($y, dim=-1).t() @ $x", "vv", flags=MIXES),
    "softmax of samples": simple("$x * $y.softmax(0)", "vv", flags=MIXES),
    "shuffled samples": simple("$x + $x.flip(0)", flags=MIXES),
}

RANDOMS = {
    "dropout": Piece("$o = self.$m($x)", "self.$m = nn.Dropout(0.3)", flags=RANDOM),
    "dropout in place": Piece("$o = self.$m($x * 2)", "self.$m = nn.Dropout(0.4, inplace=True)", flags=RANDOM),
    "alpha dropout": Piece("$o = self.$m($x)", "self.$m = nn.AlphaDropout(0.2)", flags=RANDOM),
    "functional dropout": simple("F.dropout($x, 0.25, self.training)", flags=RANDOM),
    "noise like": simple("$x + 0.1 * torch.randn_like($x)", flags=RANDOM),
    "noise of a size": simple("$x + torch.rand($x.shape, dtype=$x.dtype)", flags=RANDOM),
    "bernoulli": simple("$x * torch.empty_like($x).bernoulli_(0.7)", flags=RANDOM),
    "drop path": Piece(
        "$o = $x\nif self.training:\n    keep_$o = $x.new_empty(($x.shape[0], 1)).bernoulli_(0.6)\n"
        "    $o = $x + $y * keep_$o / 0.6",
        takes="vv",
        flags=RANDOM,
    ),
    "gumbel": simple("F.gumbel_softmax($x, dim=-1) + $x", flags=RANDOM),
    "multinomial": simple("$x.gather(1, torch.multinomial($x.detach().softmax(-1), $w))", flags=RANDOM),
}

OWN_FUNCTION = """\
class Bent(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k):
        ctx.save_for_backward(x)
        ctx.k = k
        return torch.sin(k * x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * ctx.k * torch.cos(ctx.k * x), None"""
PAIR_FUNCTION = """\
class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        high = (x > y)
        ctx.mark_non_differentiable(high)
        return x * y, x + y, high

    @staticmethod
    def backward(ctx, product, total, _):
        x, y = ctx.saved_tensors
        return product * y + total, product * x + total"""
REVERSED_FUNCTION = """\
class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -0.5 * grad"""

FUNCTIONS = {
    "own function": Piece("$o = Bent.apply($x, $n)", top=OWN_FUNCTION),
    "own function of two": Piece(
        "p_$o, s_$o, h_$o = Both.apply($x, $y)\n$o = torch.where(h_$o, p_$o, s_$o)", top=PAIR_FUNCTION, takes="vv"
    ),
    "reversed gradient": Piece("$o = Reversed.apply($x)", top=REVERSED_FUNCTION),
    "checkpoint": Piece(
        "$o = torch.utils.checkpoint.checkpoint(self.$m, $x, use_reentrant=False)",
        "self.$m = nn.Sequential(nn.Linear($w, $w), nn.Tanh(), nn.Linear($w, $w))",
    ),
    "checkpointed closure": Piece(
        "$o = torch.utils.checkpoint.checkpoint(lambda a, b: torch.tanh(self.$m(a)) * b, $x, $y, use_reentrant=False)",
        "self.$m = nn.Linear($w, $w)",
        takes="vv",
    ),
    "hooked": Piece(
        "$o = self.$m($x)",
        "self.$m = nn.Linear($w, $w)\nself.$m.register_forward_hook(doubled)",
        top="def doubled(module, args, output):\n    return output * 2 + args[0]",
    ),
    "pre-hooked": Piece(
        "$o = self.$m($x)",
        "self.$m = nn.Linear($w, $w)\nself.$m.register_forward_pre_hook(before)",
        top="def before(module, args):\n    return (args[0].sin(),)",
    ),
    "full precision inside": Piece(
        "with torch.autocast('cpu', enabled=False):\n    $o = self.$m($x)", "self.$m = nn.Linear($w, $w)"
    ),
}

OPAQUE = """\
class Opaque(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        burn()
        if x.detach().sum().item() > 0:
            return torch.tanh(self.left(x))
        return self.right(x)"""
OPAQUE_DICT = """\
class OpaqueDict(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x, y):
        biggest = float(x.detach().abs().max())
        return {"out": self.layer(x) / (1 + biggest), "rest": (y.sin(), y * 2)}"""
OPAQUE_NUMPY = """\
class Selected(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer, self.first = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        burn()
        rows = x.detach().sum(1).gt(0).nonzero().flatten().tolist()
        out = self.first(x)
        if rows:
            out[rows] = self.layer(x[rows])
        return out"""
OPAQUE_BUFFER = """\
class Watcher(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if x.shape[0] > 0 and float(x.detach().sum()) < 1e9:
            self.seen += 1
        return self.layer(x)"""

OPAQUES = {
    "opaque": Piece("$o = self.$m($x)", "self.$m = Opaque($w)", top=OPAQUE),
    "opaque dict": Piece(
        "d_$o = self.$m($x, $y)\n$o = d_$o['out'] + d_$o['rest'][1]",
        "self.$m = OpaqueDict($w)",
        top=OPAQUE_DICT,
        takes="vv",
    ),
    "opaque rows": Piece("$o = self.$m($x)", "self.$m = Selected($w)", top=OPAQUE_NUMPY),
    "opaque buffer": Piece("$o = self.$m($x)", "self.$m = Watcher($w)", top=OPAQUE_BUFFER, flags=BUFFERS),
}

SEQUENCES = {
    "to a sequence": Piece("$o = $x.unsqueeze(1) * self.$m", "self.$m = nn.Parameter(torch.randn(5, $w))", gives="s"),
    "to a sequence by time": Piece("$o = torch.stack([$x * t for t in (0.1, 0.5, 1.0, $c, 2.0)], dim=1)", gives="s"),
    "last": Piece("$o = $x[:, -1]", takes="s", gives="v"),
    "mean over time": Piece("$o = $x.mean(dim=1) + $x.amax(1)", takes="s", gives="v"),
    "pooled by attention": Piece(
        "$o = (self.$m($x).softmax(1) * $x).sum(1)", "self.$m = nn.Linear($w, 1)", takes="s", gives="v"
    ),
    "lstm cell": Piece(
        "h_$o = c_$o = $x.new_zeros($x.shape[0], $v)\nall_$o = []\nfor t in range($x.shape[1]):\n"
        "    h_$o, c_$o = self.$m($x[:, t], (h_$o, c_$o))\n    all_$o.append(h_$o)\n$o = torch.stack(all_$o, dim=1)",
        "self.$m = nn.LSTMCell($w, $v)",
        takes="s",
        gives="s",
        width="$v",
    ),
    "gru cell": Piece(
        "$o = torch.zeros($x.shape[0], $v, dtype=$x.dtype)\nfor step in $x.unbind(1):\n    $o = self.$m(step, $o)",
        "self.$m = nn.GRUCell($w, $v)",
        takes="s",
        gives="v",
        width="$v",
    ),
    "rnn by hand": Piece(
        "$o = self.$m_start.expand($x.shape[0], -1)\nfor t in reversed(range($x.size(1))):\n"
        "    $o = torch.tanh(self.$m($x[:, t]) + $o)",
        "self.$m, self.$m_start = nn.Linear($w, $v), nn.Parameter(torch.zeros($v))",
        takes="s",
        gives="v",
        width="$v",
    ),
    "lstm": Piece(
        "$o, _ = self.$m($x)", "self.$m = nn.LSTM($w, $v, batch_first=True)", takes="s", gives="s", width="$v"
    ),
    "gru both ways": Piece(
        "_, h_$o = self.$m($x)\n$o = h_$o[0] + h_$o[1]",
        "self.$m = nn.GRU($w, $v, batch_first=True, bidirectional=True)",
        takes="s",
        gives="v",
        width="$v",
    ),
    "attention": Piece(
        "q_$o, k_$o, v_$o = self.$m($x).chunk(3, dim=-1)\n"
        "$o = $x + F.scaled_dot_product_attention(q_$o, k_$o, v_$o, is_causal=True)",
        "self.$m = nn.Linear($w, 3 * $w)",
        takes="s",
        gives="s",
    ),
    "attention by hand": Piece(
        "s_$o = torch.einsum('bqd,bkd->bqk', self.$m($x), $y) / math.sqrt($w)\n"
        "s_$o = s_$o.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), float('-inf'))\n"
        "$o = s_$o.softmax(-1) @ $y",
        "self.$m = nn.Linear($w, $w)",
        takes="ss",
        gives="s",
    ),
    "multi-head": Piece(
        "$o, _ = self.$m($x, $x, $x)", "self.$m = nn.MultiheadAttention($w, 2, batch_first=True)", takes="s", gives="s"
    ),
    "encoder layer": Piece(
        "$o = self.$m($x)",
        "self.$m = nn.TransformerEncoderLayer($w, 2, 8, dropout=0.0, batch_first=True)",
        takes="s",
        gives="s",
    ),
    "convolution over time": Piece(
        "$o = self.$m($x.transpose(1, 2)).transpose(1, 2)",
        "self.$m = nn.Conv1d($w, $w, 3, padding=1)",
        takes="s",
        gives="s",
    ),
    "shift": Piece("$o = torch.cat([$x[:, :1], $x[:, :-1]], dim=1) + $x", takes="s", gives="s"),
    "scan": Piece("$o = $x.cumsum(1) / torch.arange(1, 6, dtype=$x.dtype)[:, None]", takes="s", gives="s"),
    "sequence residual": Piece("$o = $x + $y", takes="ss", gives="s"),
    "write a time": Piece("$o = $x.clone()\n$o[:, 2] = $x[:, 0].sin()\n$o[:, 1:].mul_(0.5)", takes="s", gives="s"),
    "tokens": Piece(
        "$o = self.$m(tokens)", "self.$m = nn.Embedding(11, $v)", takes="", gives="s", width="$v", needs="tokens"
    ),
    "tied tokens": Piece(
        "$o = F.linear(self.$m(tokens).mean(1), self.$m.weight)[:, :$v]",
        "self.$m = nn.Embedding(11, 8)",
        takes="",
        gives="v",
        width="$v",
        needs="tokens",
    ),
    "masked mean": Piece(
        "m_$o = mask.to($x.dtype).unsqueeze(-1)\n$o = ($x * m_$o).sum(1) / m_$o.sum(1).clamp(min=1)",
        takes="s",
        gives="v",
        needs="mask",
    ),
    "padding mask": Piece("$o = $x.masked_fill(~mask[:, :, None], 0.0)", takes="s", gives="s", needs="mask"),
    "pixels": Piece(
        "$o = self.$m(picture).flatten(1)[:, :$v]",
        "self.$m = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(2, 4, 1))",
        takes="",
        gives="v",
        width="$v",
        needs="picture",
    ),
    "other input": Piece(
        "$o = torch.tanh(self.$m(other))", "self.$m = nn.Linear(6, $v)", takes="", gives="v", width="$v", needs="other"
    ),
    "other of a dict": Piece(
        "$o = self.$m(extras['a']) * extras['b']",
        "self.$m = nn.Linear(4, $v)",
        takes="",
        gives="v",
        width="$v",
        needs="extras",
    ),
    "other of a dataclass": Piece(
        "$o = self.$m(side.left) + side.right",
        "self.$m = nn.Linear(4, $v)",
        takes="",
        gives="v",
        width="$v",
        needs="side",
    ),
}
