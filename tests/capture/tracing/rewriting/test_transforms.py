"""A transform sees the traced graph with the model's own names and tensors; what is wrong with its result is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from fxpipe.capture import CallCapture
from fxpipe.errors import PlanError
from tests.helpers.marks import mostly_slow
from tests.helpers.models import MODELS, Case
from tests.helpers.transparency import build, inputs
from tests.whole.test_transparency import BATCHES, graph_of

Change = Callable[[fx.GraphModule], object]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.relu(self.fc(x))).reshape(x.shape[0], 2, 2)


def capture(*transforms: Change) -> str:
    x = torch.randn(6, 4)
    return str(CallCapture(Net(), transforms=transforms).capture((x,), {}))  # type: ignore[arg-type]


def node(module: fx.GraphModule, name: str) -> fx.Node:
    return next(one for one in module.graph.nodes if one.name == name)


def test_what_it_sees() -> None:
    seen: list[fx.GraphModule] = []
    capture(lambda module: seen.append(module) or module)
    (module,) = seen
    kinds = [(one.op, str(one.target)) for one in module.graph.nodes]
    assert [target for op, target in kinds if op == "placeholder"] == ["x"]
    assert {"fc.weight", "fc.bias", "norm.running_mean"} <= {target for op, target in kinds if op == "get_attr"}
    assert ("call_method", "size") in kinds
    assert isinstance(module.get_parameter("fc.weight"), nn.Parameter)
    assert node(module, "relu").meta["val"].shape[1] == 4
    assert "F.relu(self.fc(x))" in node(module, "relu").meta["stack_trace"]
    assert module.train()(torch.randn(3, 4))[0].shape == (3, 2, 2)


def again(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph, traced anew: without what capture knows of its nodes."""
    return fx.Transformer(module).transform()


# One in each three, and those whose inputs or outputs are nests.
NAMES = list(dict.fromkeys(["containers", "nested outputs", "dict output", "optional inputs", *list(MODELS)[::3]]))


@pytest.mark.parametrize("name", mostly_slow(NAMES, lambda name: name == "containers"))
def test_one_that_changes_nothing(name: str) -> None:
    case: Case = MODELS[name]
    how = {"batch_dim": case.options.get("batch_dim", 0), "reduce": case.options.get("reduce")}
    args, kwargs = inputs(case, BATCHES[0])
    found = CallCapture(build(case), **how, transforms=(lambda module: module,)).capture(args, kwargs)  # type: ignore[arg-type]
    assert str(found) == str(graph_of(name))


def test_one_that_traces_anew() -> None:
    types = [[line.split("  @")[0] for line in text.splitlines()] for text in (capture(), capture(again))]
    assert types[0] == types[1]


def test_a_constant_of_its_own() -> None:
    def scale(module: fx.GraphModule) -> fx.GraphModule:
        module.register_buffer("scale", torch.full((4,), 2.0))
        relu = node(module, "relu")
        with module.graph.inserting_after(relu):
            held = module.graph.get_attr("scale")
        with module.graph.inserting_after(held):
            scaled = module.graph.call_function(torch.mul, (relu, held))
        relu.replace_all_uses_with(scaled, lambda user: user is not scaled)
        return module

    text = capture(scale)
    assert "constant   scale: f32[4]" in text
    assert "mul = mul(relu, scale): f32[b, 4]  @ test_transforms.py" in text


def lose_bias(module: fx.GraphModule) -> fx.GraphModule:
    linear = node(module, "linear")
    linear.args = linear.args[:2]
    return module


def in_half(module: fx.GraphModule) -> fx.GraphModule:
    (output,) = module.graph.find_nodes(op="output")
    with module.graph.inserting_before(output):
        half = module.graph.call_method("half", (output.args[0][0],))  # type: ignore[index, arg-type]
    output.args = ((half,),)
    return module


def detach(module: fx.GraphModule) -> fx.GraphModule:
    (output,) = module.graph.find_nodes(op="output")
    with module.graph.inserting_before(output):
        cut = module.graph.call_method("detach", (output.args[0][0],))  # type: ignore[index, arg-type]
    output.args = ((cut,),)
    return module


def twice(module: fx.GraphModule) -> fx.GraphModule:
    (output,) = module.graph.find_nodes(op="output")
    output.args = ((*output.args[0], *output.args[0]),)  # type: ignore[misc]
    return module


def another_input(module: fx.GraphModule) -> fx.GraphModule:
    with module.graph.inserting_before(node(module, "x")):
        module.graph.placeholder("y")
    return module


def a_module(module: fx.GraphModule) -> fx.GraphModule:
    module.add_module("act", nn.ReLU())
    relu = node(module, "relu")
    with module.graph.inserting_after(relu):
        relu.replace_all_uses_with(module.graph.call_module("act", (relu.args[0],)))
    return module


def a_parameter(module: fx.GraphModule) -> fx.GraphModule:
    module.register_parameter("mine", nn.Parameter(torch.ones(4)))
    linear = node(module, "linear")
    with module.graph.inserting_before(linear):
        linear.args = (*linear.args[:2], module.graph.get_attr("mine"))
    return module


def another_weight(module: fx.GraphModule) -> fx.GraphModule:
    module.get_submodule("fc").weight = nn.Parameter(torch.ones(4, 4))  # type: ignore[assignment]
    return module


def no_counter(module: fx.GraphModule) -> fx.GraphModule:
    module.graph.erase_node(node(module, "add_"))
    return module


def does_not_run(module: fx.GraphModule) -> fx.GraphModule:
    linear = node(module, "linear")
    linear.args = (linear.args[1], linear.args[0], linear.args[2])
    return module


def in_place(module: fx.GraphModule) -> None:
    module.graph.eliminate_dead_code()


def failing(module: fx.GraphModule) -> fx.GraphModule:
    raise KeyError("conv")


@pytest.mark.parametrize(
    ("transform", "says"),
    [
        (lose_bias, "does not read the parameter fc.bias, which would get no gradient"),
        (in_half, r"makes output 0 f16\[\?, 2, 2\] with a gradient, and it is f32\[\?, 2, 2\] with a gradient"),
        (detach, r"makes output 0 f32\[\?, 2, 2\] without a gradient, and it is f32\[\?, 2, 2\] with a gradient"),
        (twice, "returns 2 outputs, and the captured graph 1 output"),
        (another_input, "has the inputs y, x, not x"),
        (a_module, "calls the module act, which is not the model's; write a call of a function"),
        (a_parameter, "adds the parameter mine, which no optimizer would know of"),
        (another_weight, "replaces fc.weight, which is the model's; add a buffer of another name"),
        (no_counter, "leaves out what writes norm.num_batches_tracked in place"),
        (does_not_run, "returns a graph that does not run: "),
        (in_place, "returns NoneType; return the GraphModule"),
        (failing, "raises KeyError: 'conv'"),
    ],
)
def test_a_wrong_one_is_refused_by_name(transform: Change, says: str) -> None:
    with pytest.raises(PlanError, match=rf"^transforms: {transform.__name__} \(test_transforms.py:\d+\) {says}"):
        capture(lambda module: module, transform)
