"""A stage's forward in pieces: what goes where, what is handed on, and that lines keep their numbers."""

from __future__ import annotations

import ast
import textwrap

import pytest

from fxpipe.codegen.stage.compile_regions import cut
from fxpipe.codegen.text.op_text import EmitError


def pieces(text: str, held: str = "", eager: str = "") -> str:
    """The functions as text."""
    forward = ast.parse(textwrap.dedent(text)).body[0]
    assert isinstance(forward, ast.FunctionDef)
    return "\n".join(map(ast.unparse, cut(forward, held.split(), eager.split())))


def test_a_straight_line_is_one_piece() -> None:
    text = """
        def forward(self, x: Tensor) -> Tensor:
            x = F.linear(x, self.fc.weight)
            return F.relu(x)
    """
    assert pieces(text, "fc.weight") == textwrap.dedent("""\
        def piece_3(x, own_fc_weight):
            x = F.linear(x, own_fc_weight)
            return F.relu(x)
        def forward(self, x):
            return piece_3(x, self.fc.weight)""")


def test_draws_stay() -> None:
    text = """
        def forward(self, x, draw):
            h = f(x)
            y = g(x, h)
            with draw(0):
                h = F.dropout(h)
            del x
            return h + y
    """
    assert pieces(text) == textwrap.dedent("""\
        def piece_3(x):
            h = f(x)
            y = g(x, h)
            return (h, y)
        def piece_7(h, y):
            pass
            return h + y
        def forward(self, x, draw):
            h, y = piece_3(x)
            with draw(0):
                h = F.dropout(h)
            return piece_7(h, y)""")


def test_gradients_are_not_added_up() -> None:
    text = """
        def weight_gradient(self, kept: list[Any], sums: list[Tensor | None]) -> list[Any]:
            x, dy = kept
            dw = accumulate_mm(sums[1], dy.t(), x)
            db = accumulate(sums[0], dy.sum(0))
            return [db, dw]
    """
    assert pieces(text, "", "accumulate accumulate_mm") == textwrap.dedent("""\
        def piece_4(dy, x):
            dw = torch.mm(dy.t(), x)
            db = dy.sum(0)
            return [db, dw]
        def weight_gradient(self, kept, sums):
            x, dy = kept
            return piece_4(dy, x)""")


def test_what_forward_has_kept_is_unpacked_outside() -> None:
    text = """
        def backward(self, kept: list[Any], dy: Tensor) -> tuple[list[Any], list[Any]]:
            (x, draw) = kept
            kept.clear()
            dweight = f(dy, x)
            return [None], [dweight]
    """
    assert pieces(text) == textwrap.dedent("""\
        def piece_5(dy, x):
            dweight = f(dy, x)
            return ([None], [dweight])
        def backward(self, kept, dy):
            x, draw = kept
            kept.clear()
            return piece_5(dy, x)""")


def test_what_only_a_piece_needed_is_let_go() -> None:
    text = """
        def forward(self, x, y, draw):
            h = f(x)
            with draw(0):
                h = g(h, y)
            y += h
            return y
    """
    assert "h = piece_3(x)\n    del x\n    with draw(0)" in pieces(text)
    assert "return piece_6(h, y)" in pieces(text)


def test_a_draw_in_a_region_cuts_the_region() -> None:
    text = """
        def forward(self, x, draw):
            with torch.no_grad():
                h = f(x)
                with draw(0):
                    h = F.dropout(h)
                h = g(h)
            return h
    """
    assert pieces(text).endswith(
        textwrap.dedent("""\
        def forward(self, x, draw):
            with torch.no_grad():
                h = piece_4(x)
                del x
                with draw(0):
                    h = F.dropout(h)
                h = piece_7(h)
            return h""")
    )


def test_what_the_stage_holds_is_an_argument() -> None:
    text = """
        def forward(self, x):
            self[1].count.add_(1)
            conv = self.blocks[0].conv
            x = F.conv2d(x, conv.weight, conv.bias)
            return x.to(self.device) + self.pos + self["device"]
    """
    held = "1.count blocks.0.conv.weight blocks.0.conv.bias pos device .device"
    own = "own_1_count, own_blocks_0_conv_weight, own_blocks_0_conv_bias, own_device, own_pos, own_device_"
    found = pieces(text, held)
    assert f"def piece_3(x, {own}):\n    own_1_count.add_(1)" in found
    assert "return piece_3(x, self[1].count, self.blocks[0].conv.weight, self.blocks[0].conv.bias, " in found
    assert "self.device, self.pos, self['device'])" in found


def test_a_variable_for_a_module_is_known_in_all_pieces() -> None:
    text = """
        def forward(self, x):
            x = f(x)
            norm = self.blocks[0].norm
            x = count(x, norm.mean)
            return g(x, norm.weight)
    """
    found = pieces(text, "blocks.0.norm.mean blocks.0.norm.weight", eager="count")
    assert "x = count(x, self.blocks[0].norm.mean)" in found
    assert "return piece_6(x, self.blocks[0].norm.weight)" in found


def test_submodules_called_whole_stay() -> None:
    text = """
        def forward(self, x):
            x = f(x)
            x = self.experts[0].router(x)
            x = self.gate.with_tensors({"weight": self.first.weight})(x)
            return g(x)
    """
    found = pieces(text, "first.weight experts.0.router.weight", eager="experts.0.router gate")
    assert "x = piece_3(x)\n    x = self.experts[0].router(x)\n    x = self.gate.with_tensors(" in found
    assert found.endswith("return piece_6(x)")


def test_functions_of_the_runtime_stay() -> None:
    found = pieces("def forward(self, x):\n    x = f(x)\n    x = count(x)\n    return g(x)", eager="count")
    assert "x = piece_2(x)\n    x = count(x)\n    return piece_4(x)" in found


def test_nothing_to_compute_is_no_piece() -> None:
    assert pieces("def forward(self, x, y):\n    z = x\n    return z, y").startswith("def forward")


def test_branches_are_refused() -> None:
    with pytest.raises(EmitError, match="line 2 branches"):
        pieces("def forward(self, x):\n    if x.sum() > 0:\n        x = -x\n    return x")
