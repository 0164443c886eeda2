"""Pieces of Python: control flow on values, shapes and flags, containers, closures, views, and writes in place."""

from __future__ import annotations

from .pieces import Piece, simple

CONTROL = {
    "training": Piece("if self.training:\n    $o = $x * 2\nelse:\n    $o = torch.sin($x)"),
    "loop": Piece(
        "$o = $x\nfor turn in range($n + 1):\n    $o = torch.tanh(self.$m($o)) + turn", "self.$m = nn.Linear($w, $w)"
    ),
    "while": Piece("$o, left_$o = $x, $n + 1\nwhile left_$o > 0:\n    $o = $o.sin() * left_$o\n    left_$o -= 1"),
    "by shape": Piece(
        "if $x.shape[-1] > 5 and $x.dim() == 2:\n    $o = $x[:, 1:-1].mean(1, keepdim=True) + $x\nelse:\n"
        "    $o = $x.cos()"
    ),
    "by attribute": Piece(
        "$o = $x.relu() if self.$m == 'relu' else $x.tanh() * self.$m_c", "self.$m, self.$m_c = '$act', $c"
    ),
    "by number": Piece("$o = $x * number if number > 0 else $x.sin()", needs="number"),
    "number in": Piece("$o = $x * number + number / 2", needs="number"),
    "by flag": Piece("$o = $x.tanh()\nif flag:\n    $o = $o + $x", needs="flag"),
    "by string": Piece(
        "match mode:\n    case 'wide':\n        $o = 3 * $x\n    case _:\n        $o = $x.sigmoid()", needs="mode"
    ),
    "by none": Piece("$o = $x if absent is None else $x * absent", needs="absent"),
    "zip": Piece(
        "kept_$o = []\nfor index, (layer, scale) in enumerate(zip(self.$m, ($c, 2.0, -1.0))):\n"
        "    kept_$o.append(layer($x if not kept_$o else kept_$o[-1]) * scale + index)\n$o = sum(kept_$o)",
        "self.$m = nn.ModuleList(nn.Linear($w, $w) for _ in range(3))",
    ),
    "dict": Piece(
        "box_$o = {'a': $x.sin(), **{str(i): $x * i for i in range(2)}}\nbox_$o['a'] = box_$o['a'] + 1\n"
        "$o = sum(box_$o.values())"
    ),
    "dataclass inside": Piece(
        "pair_$o = Pair($x, $y.tanh())\n$o = pair_$o.swapped().total()",
        top="@dataclass\nclass Pair:\n    left: Tensor\n    right: Tensor\n\n    def swapped(self):\n"
        "        return Pair(self.right, self.left)\n\n    def total(self):\n        return self.left * 2 - self.right",
        takes="vv",
    ),
    "named tuple": Piece(
        "found_$o = Found(mean=$x.mean(1, keepdim=True), x=$x)\n"
        "$o = found_$o.x - found_$o.mean * found_$o._replace(x=$x.cos()).x",
        top="class Found(NamedTuple):\n    mean: Tensor\n    x: Tensor",
    ),
    "closure": Piece(
        "def bent_$o(value, k=$n):\n    return torch.tanh(value * k + $y)\n\n$o = bent_$o($x) + bent_$o($x, k=2)",
        takes="vv",
    ),
    "lambda": Piece("$o = functools.reduce(lambda a, b: a * 0.5 + b, [$x, $y.sin(), $x.cos()])", takes="vv"),
    "partial": Piece("$o = functools.partial(F.leaky_relu, negative_slope=$c)($x)"),
    "helper": Piece(
        "$o, _ = helper($x, scale=$c)",
        top=(
            "def helper(x, *, scale=1.0, **rest):\n    if not rest:\n        x = x * scale\n"
            "    return x.sin(), {'size': x.shape}"
        ),
    ),
    "try": Piece("try:\n    $o = {'a': $x.sin()}['b']\nexcept KeyError:\n    $o = $x.cos()\nfinally:\n    pass"),
    "generator": Piece("$o = sum(part.tanh() for part in ($x, $x * 2, $y) if part.shape[1] > 1)", takes="vv"),
    "assert": Piece(
        "assert $x.ndim == 2, f'{$x.ndim} dimensions'\nn_$o, d_$o = $x.shape\n$o = $x.reshape(n_$o, d_$o) / d_$o"
    ),
    "sorted": Piece(
        "parts_$o = {'b': $x[:, :1], 'a': $x[:, 1:]}\n"
        "$o = torch.cat([parts_$o[key] for key in sorted(parts_$o)], dim=1)"
    ),
    "isinstance": Piece("$o = $x.sin() if isinstance($x, Tensor) and torch.is_tensor($x) else None"),
    "grad enabled": Piece("$o = $x * 2 if torch.is_grad_enabled() else $x * 2.0"),
    "vmap": Piece(
        "$o = torch.vmap(lambda row: torch.tanh(self.$m.weight @ row) * row.norm())($x)", "self.$m = nn.Linear($w, $w)"
    ),
    "vmap of several": Piece(
        "a_$o, b_$o = torch.vmap(lambda row: (row.sort()[0], row.cos() * row.sum()))($x)\n$o = a_$o * b_$o"
    ),
    "vmap of places": Piece(
        "i_$o = torch.arange($w, device=$x.device)\n"
        "m_$o = torch.vmap(torch.vmap(lambda i, j: j <= i, (None, 0)), (0, None))(i_$o, i_$o)\n"
        "$o = $x @ m_$o.to($x.dtype)"
    ),
    "math": Piece(
        "$o = $x / math.sqrt($x.size(-1)) * self.$m.shape[0] + operator.mul($n, 2)",
        "self.$m = nn.Parameter(torch.randn(3))",
    ),
    "float of dtype": Piece("$o = $x.clamp(min=torch.finfo($x.dtype).min / 2).to($x.dtype).type_as($x) * torch.pi"),
    "scalar tensor": Piece(
        "$o = $x * torch.tensor($c, dtype=$x.dtype) + $x.new_zeros(1).fill_($c) + $x.new_full(($w,), 2.0)"
    ),
}

IN_PLACE = {
    "write fresh": Piece("$o = $x * 1.5\n$o.add_($c).mul_($n + 1)\n$o += $y", takes="vv"),
    "write a slice": Piece("$o = $x + 0\n$o[:, :2] = -0.5\n$o[:, 1] += $y[:, 0]", takes="vv"),
    "write a view": Piece(
        "$o = 2 * $x\nhalf_$o = $o.view(-1, 2, $half)[:, 1]\nhalf_$o.mul_(0.5).add_($y[:, :$half])", takes="vv"
    ),
    "write a transposed view": Piece("$o = $x.clone()\n$o.t()[1].zero_()\n$o[:, ::2].copy_($y[:, ::2])", takes="vv"),
    "write where": Piece("$o = $x * 3\n$o[$o > 0.5] = 0.5"),
    "masked in place": Piece("$o = $x + 1\n$o.masked_fill_($y > 0, $c)", takes="vv"),
    "scatter in place": Piece("$o = torch.zeros_like($x)\n$o.scatter_(1, $y.detach().argsort(1), $x)", takes="vv"),
    "fill a buffer of rows": Piece("$o = $x.new_empty($x.shape)\n$o[:, :1] = $x[:, :1]\n$o[:, 1:] = $x[:, 1:].sin()"),
    "empty like": Piece(
        "$o = torch.empty_like($x)\nfor column in range($w):\n    $o[:, column] = $x[:, column - 1] * column"
    ),
    "out of a list": Piece(
        "rows_$o = list($x.unbind(1))\nrows_$o[0] = rows_$o[-1].sin()\n$o = torch.stack(rows_$o, 1)"
    ),
    "vmap that writes": Piece(
        "w_$o = $x.clone()\n$o = torch.vmap(lambda row: (row.mul_(0.5) * 2).add_(row.sin()))(w_$o) + w_$o"
    ),
    "relu in place": Piece("$o = F.relu(self.$m($x), inplace=True)", "self.$m = nn.Linear($w, $w)"),
    "written later": Piece("$x.mul_(0.5)\n$o = $x.sin()", risky=True),
    "added later": Piece("$x += $y\n$o = $x * 0.5", takes="vv", risky=True),
    "set later": Piece("$x[:, 0] = $c\n$o = $x + 1", risky=True),
    "view written later": Piece("$x.view(-1, 2, $half)[:, 0].add_(1.0)\n$o = $x.cos()", risky=True),
    "detached": simple("$x.detach() * 0.5 + $y", "vv"),
    "no grad": Piece("with torch.no_grad():\n    still_$o = torch.tanh($x) * 2\n$o = $x * still_$o"),
    "set grad": Piece(
        "with torch.set_grad_enabled(False):\n    s_$o = $x.abs().amax(1, keepdim=True)\n$o = $x / (s_$o + 1)"
    ),
    "decorated no grad": Piece(
        "$o = $x + scale_of($x)", top="@torch.no_grad()\ndef scale_of(x):\n    return x.norm(dim=1, keepdim=True)"
    ),
    "straight through": simple("$x + ($x.round() - $x).detach()"),
    "requires grad off": simple("$x.detach().clone() * $y.sigmoid()", "vv"),
}
