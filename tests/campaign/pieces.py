"""The pieces that random models are put together from: a few lines each, with holes for the values that they read.

    Piece("$o = torch.tanh(self.$m($x))", init="self.$m = nn.Linear($w, $v)", gives="v", width="$v")

The holes: `$x`, `$y` values of the model so far (f64[b, w], or f64[b, 5, w] of pieces that take "s"), `$w` their width,
`$half` half of that, `$v` another width, `$o` the name of the result, `$m` the name of a submodule, parameter or buffer
of this piece, `$n` a small whole number, `$c` a constant, `$extra` the name of one more input. A piece with `risky` may
be one that the plain model cannot differentiate (it writes what backward needs); such models are made without it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """`forward` lines, `init` lines and `top` lines (functions and classes of the module, once each). `takes`: "v" a
    vector, "vv" two of one width, "s" a sequence, "ss" two, "" nothing. `gives`: "v", "s", or "" for none. `flags`:
    "random" draws numbers, "mixes" samples see each other, "buffers" are written, "norm" is a BatchNorm."""

    forward: str
    init: str = ""
    top: str = ""
    takes: str = "v"
    gives: str = "v"
    width: str = "$w"
    flags: frozenset[str] = frozenset()
    risky: bool = False
    needs: str = ""  # one more input of the model: its name


def simple(expression: str, takes: str = "v", width: str = "$w", **options: object) -> Piece:
    return Piece(f"$o = {expression}", takes=takes, gives=takes[0], width=width, **options)  # type: ignore[arg-type]


LAYERS = {
    "linear": Piece("$o = torch.tanh(self.$m($x))", "self.$m = nn.Linear($w, $v)", width="$v"),
    "linear without bias": Piece("$o = self.$m($x)", "self.$m = nn.Linear($w, $v, bias=False)", width="$v"),
    "block": Piece(
        "$o = $x + self.$m($x)",
        "self.$m = nn.Sequential(nn.LayerNorm($w), nn.Linear($w, 12), nn.GELU(), nn.Linear(12, $w))",
    ),
    "frozen": Piece("$o = torch.sin(self.$m($x))", "self.$m = nn.Linear($w, $v).requires_grad_(False)", width="$v"),
    "half frozen": Piece("$o = self.$m($x)", "self.$m = nn.Linear($w, $w)\nself.$m.bias.requires_grad_(False)"),
    "bilinear": Piece("$o = self.$m($x, $y)", "self.$m = nn.Bilinear($w, $w, $v)", takes="vv", width="$v"),
    "norm": Piece("$o = self.$m($x)", "self.$m = nn.LayerNorm($w)"),
    "rms norm": Piece(
        "$o = $x * torch.rsqrt($x.pow(2).mean(-1, keepdim=True) + 0.1) * self.$m",
        "self.$m = nn.Parameter(torch.randn($w))",
    ),
    "group norm": Piece("$o = self.$m($x)", "self.$m = nn.GroupNorm(2, $w)"),
    "prelu": Piece("$o = self.$m($x)", "self.$m = nn.PReLU($w, init=0.3)"),
    "convolution": Piece("$o = self.$m($x.unsqueeze(1)).relu().mean(1)", "self.$m = nn.Conv1d(1, 3, 3, padding=1)"),
    "image": Piece(
        "$o = self.$m($x.view($x.shape[0], 1, 2, $half)).flatten(1)[:, :$w]",
        "self.$m = nn.Sequential(nn.Conv2d(1, 2, (1, 3), padding=(0, 1)), nn.InstanceNorm2d(2), nn.SiLU())",
    ),
    "experts": Piece(
        "gate_$o = self.$m_gate($x).softmax(-1)\n"
        "$o = sum(gate_$o[:, i : i + 1] * expert($x) for i, expert in enumerate(self.$m))",
        "self.$m = nn.ModuleList(nn.Linear($w, $v) for _ in range(3))\nself.$m_gate = nn.Linear($w, 3)",
        width="$v",
    ),
    "weight norm": Piece(
        "$o = self.$m($x)", "self.$m = nn.utils.parametrizations.weight_norm(nn.Linear($w, $v))", width="$v"
    ),
    "parameter list": Piece(
        "$o = $x\nfor scale in self.$m:\n    $o = ($o * scale).sin()",
        "self.$m = nn.ParameterList(torch.randn($w) for _ in range(3))",
    ),
    "module dict": Piece(
        "$o = $x\nfor name, layer in self.$m.items():\n    $o = layer($o) * (2.0 if name == 'a' else 0.5)",
        "self.$m = nn.ModuleDict({'a': nn.Linear($w, $w), 'class': nn.Linear($w, $w)})",
    ),
    "called twice": Piece("$o = torch.tanh(self.$m(torch.sin(self.$m($x))))", "self.$m = nn.Linear($w, $w)"),
    "called twice apart": Piece("$o = self.$m($x) * self.$m($y).sigmoid()", "self.$m = nn.Linear($w, $w)", takes="vv"),
    "tied": Piece(
        "$o = F.linear(torch.tanh(self.$m($x)), self.$m.weight.t(), self.$m_bias)",
        "self.$m = nn.Linear($w, $v)\nself.$m_bias = nn.Parameter(torch.randn($w))",
    ),
    "tied parameters": Piece(
        "$o = self.$m_b(torch.relu(self.$m_a($x)))",
        "self.$m_a, self.$m_b = nn.Linear($w, $w), nn.Linear($w, $w)\nself.$m_b.weight = self.$m_a.weight",
    ),
    "unused": Piece("self.$m($x)", "self.$m, self.$m_spare = nn.Linear($w, 3), nn.Linear(2, 2)", gives=""),
    "embedding by argmax": Piece("$o = self.$m($x.detach().argmax(-1)) + $x", "self.$m = nn.Embedding($w, $w)"),
    "embedding bag": Piece(
        "$o = self.$m(($x.detach() * 3).abs().long().clamp(max=6)) + $x", "self.$m = nn.EmbeddingBag(7, $w, mode='sum')"
    ),
    "quantised": Piece(
        "near_$o = torch.cdist($x.detach(), self.$m.detach()).argmin(-1)\n"
        "$o = $x + (self.$m[near_$o] - $x).detach() + 0.1 * F.embedding(near_$o, self.$m)",
        "self.$m = nn.Parameter(torch.randn(5, $w))",
    ),
}

ARITHMETIC = {
    "tanh": simple("torch.tanh($x)"),
    "activation": simple("F.$act($x)"),
    "residual": simple("$x + $y", "vv"),
    "product": simple("$x * $y", "vv"),
    "difference": simple("$c * $x - $y / (1 + $y.abs())", "vv"),
    "softmax": simple("$x.softmax(dim=1)"),
    "normalise": simple("F.normalize($x, dim=-1)"),
    "log sum exp": simple("$x - torch.logsumexp($x, dim=1, keepdim=True)"),
    "statistics": simple("($x - $x.mean(1, keepdim=True)) / ($x.std(1, keepdim=True) + 0.3)"),
    "cumulative": simple("$x.cumsum(-1) * $x.sigmoid().cumprod(1)"),
    "maximum": simple("torch.maximum($x, $y) + torch.minimum($x, 0.3 * $y)", "vv"),
    "clamp": simple("$x.clamp(-0.5, 0.7) + 0.1 * $x"),
    "outer": simple("torch.einsum('bi,bj->bij', $x, $y).sum(-1) / 4", "vv"),
    "attention of parts": simple("torch.bmm($x.unsqueeze(2).softmax(1), $y.unsqueeze(1)).mean(1)", "vv"),
    "matrix": simple(
        "($x.view(-1, 2, $half).transpose(1, 2) @ $y.view(-1, 2, $half)).flatten(1).repeat(1, 2)[:, :$w]", "vv"
    ),
    "flip and roll": simple("$x.flip(1) + $x.roll($n, dims=1)"),
    "pad": simple("F.pad($x, (1, 2))[:, 1 : $w + 1] + F.pad($x[:, 1:], (0, 1), value=$c)"),
    "unfold": simple("$x.unfold(1, 2, 1).prod(-1).sum(1, keepdim=True) + $x"),
    "interpolate": simple("F.interpolate($x.unsqueeze(1), scale_factor=2.0).squeeze(1)[:, ::2] + $x"),
    "glu": simple("F.glu(torch.cat([$x, $y], dim=1), dim=-1)", "vv"),
    "distance": simple("$x * F.cosine_similarity($x, $y, dim=1).unsqueeze(1)", "vv"),
    "stack": simple("torch.stack([$x, $y.sin(), $x * $y]).sum(0)", "vv"),
    "repeat": simple("$x.repeat_interleave(2, dim=1)[:, 1 : $w + 1]"),
    "lerp": simple("torch.lerp($x, $y, 0.3).addcmul($x, $y, value=0.2)", "vv"),
    "median": simple("$x - $x.median(1, keepdim=True).values + $x.amax(1, keepdim=True)"),
    "chunks": Piece("a_$o, b_$o = $x.chunk(2, dim=1)\n$o = torch.cat([b_$o, a_$o.sin()], dim=1)"),
    "split": Piece("a_$o, *rest_$o = $x.split([2, $w - 3, 1], dim=-1)\n$o = torch.cat([*rest_$o[::-1], a_$o], dim=-1)"),
    "unbind": Piece("p_$o = $x.unbind(1)\n$o = torch.stack(p_$o[::-1], dim=1) * p_$o[0][:, None]"),
    "fold": simple("torch.tanh($x.reshape($x.shape[0] * 2, $half)).reshape($x.shape[0], $w)"),
    "where": simple("torch.where($x > $c, $x * 2, $y)", "vv"),
    "masked fill": simple("$x.masked_fill($y < 0, $c)", "vv"),
    "grid": simple("$x * torch.linspace(0, 1, $w, dtype=$x.dtype) + torch.arange($w, dtype=$x.dtype).cos()"),
    "triangle": simple("$x @ torch.ones($w, $w, dtype=$x.dtype).tril().softmax(-1)"),
    "expand": simple("$x.unsqueeze(1).expand(-1, 3, -1).reshape(-1, 3 * $w)[:, 1::3]"),
    "norms": simple(
        "$x / (1 + $x.norm(dim=1, keepdim=True) + torch.linalg.vector_norm($x, ord=1, dim=1, keepdim=True))"
    ),
    "solve": simple(
        "torch.linalg.solve(torch.eye($w, dtype=$x.dtype) * 3 + 0.1 * $x.unsqueeze(1) * $x.unsqueeze(2), "
        "$x.unsqueeze(2))"
        ".squeeze(2)"
    ),
    "samples of a size": simple("$x / ($x.shape[1] + $x.size(-1))"),
}

INDEXING = {
    "gather": simple("$x.gather(1, $x.detach().argsort(dim=1))"),
    "sort": simple("$x.sort(dim=-1, descending=True).values + $x"),
    "top": Piece("v_$o, i_$o = $x.topk(2, dim=1)\n$o = torch.zeros_like($x).scatter(1, i_$o, v_$o.sigmoid())"),
    "scatter add": simple("torch.zeros_like($x).scatter_add(1, $y.detach().argsort(1), $x)", "vv"),
    "scatter reduce": simple("$x.scatter_reduce(1, ($y.detach() > 0).long(), $x.sin(), reduce='sum')", "vv"),
    "take along": simple("torch.take_along_dim($x, $y.detach().argmax(1, keepdim=True), dim=1) + $x", "vv"),
    "index by a list": simple("$x[:, [1, 0] + list(range(2, $w))]"),
    "index by a buffer": Piece("$o = $x[:, self.$m]", "self.register_buffer('$m', torch.randperm($w))"),
    "index select": Piece(
        "$o = $x.index_select(1, self.$m)", "self.register_buffer('$m', torch.randint(0, $w, ($w,)))"
    ),
    "index add": Piece(
        "$o = $x.index_add(1, self.$m, $x[:, :3], alpha=0.5)", "self.register_buffer('$m', torch.randint(0, $w, (3,)))"
    ),
    "index copy": simple("$x.index_copy(1, torch.tensor([0, 2]), $y[:, 1:3])", "vv"),
    "one hot": simple("$x * F.one_hot($x.detach().argmax(1), $w).to($x.dtype) + $x"),
    "table by tensor": Piece("$o = self.$m[$x.detach().argmax(1)] * $x", "self.$m = nn.Parameter(torch.randn($w, $w))"),
    "bucket": Piece(
        "$o = $x + self.$m[torch.bucketize($x.detach(), torch.tensor([-0.5, 0.0, 0.5], dtype=$x.dtype))]",
        "self.$m = nn.Parameter(torch.randn(4))",
    ),
    "select scatter": simple("torch.select_scatter($x, $y[:, 0].sin(), 1, 1)", "vv"),
    "boolean index": simple("torch.where(($x > 0)[:, [0]], $x.narrow(1, 0, 1), $x.select(1, -1).unsqueeze(-1))* $x"),
}

COMPLEX = {
    "fourier": simple("torch.fft.irfft(torch.fft.rfft($x, dim=1) * (1 + 0.5j), n=$w, dim=1)"),
    "view as complex": simple(
        "torch.view_as_real(torch.view_as_complex($x.reshape(-1, $half, 2).clone()) * (0.6 - 0.8j)).flatten(1)"
    ),
    "polar": simple("torch.polar($x.abs() + 0.1, $y).real + torch.complex($x, $y).abs()", "vv"),
    "complex weight": Piece(
        "$o = torch.view_as_real(torch.view_as_complex($x.reshape(-1, $half, 2).clone())"
        " * torch.view_as_complex(self.$m)).flatten(1)",
        "self.$m = nn.Parameter(torch.randn($half, 2))",
    ),
    "rotary": Piece(
        "turn_$o = torch.polar(torch.ones($half, dtype=$x.dtype), torch.arange($half, dtype=$x.dtype))\n"
        "z_$o = torch.view_as_complex($x.reshape(-1, $half, 2).clone()) * turn_$o\n"
        "$o = torch.view_as_real(z_$o).reshape(-1, $w) + z_$o.angle().sin().repeat(1, 2)",
    ),
    "conjugate": Piece("z_$o = torch.complex($x, $x.sin())\n$o = (z_$o * z_$o.conj()).real + z_$o.imag"),
}
