"""Packages: written, loaded, edited, loaded again; refused where they do not fit."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpipe.codegen.package.load_package import bind, load_package, unload, worker_device
from fxpipe.codegen.package.package_files import _wrapped, constants, package, save, write
from fxpipe.errors import PackageError
from fxpipe.ir.graph.graph import Input, Output, Ref, State, Struct
from fxpipe.ir.graph.value_types import ObjectType, TensorType
from fxpipe.ir.plan.plan import Plan, StagePlan
from fxpipe.ir.plan.plan import load as load_plan
from fxpipe.ir.program.program import Program

# Stands for the generated scheduler: holds the stages.
SCHEDULER = '''"""A scheduler that only holds the stages."""


class Scheduler:
    devices = ("cpu:0", "cpu:1")
    replicas = ()

    def __init__(self, stages, whole, last):
        self.stages = stages
'''


class Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, width), nn.Linear(width, 4)])
        self.register_buffer("offset", torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](x)
        return self.layers[1](torch.relu(h)) + self.offset


@dataclass
class Output2:
    y: Any
    more: Any = None


Pair = namedtuple("Pair", "first second")


@pytest.fixture
def program(tools: SimpleNamespace) -> Program:
    made: Program = tools.cut(tools.graph_of(Net(), torch.rand(2, 4)), 2)
    return made


def plan_of(program: Program) -> Plan:
    stages = (StagePlan(tuple(op.name for op in stage.ops), stage.device, "never") for stage in program.stages)
    return Plan(program.graph.model, tuple(stages), 4)


def files_of(program: Program) -> dict[str, str]:
    return package(program, plan_of(program), SCHEDULER)


def with_graph(program: Program, **changes: Any) -> Program:
    return replace(program, graph=replace(program.graph, **changes))


def test_files(program: Program, golden: Callable[[str, str], None], tools: SimpleNamespace, tmp_path: Path) -> None:
    files = files_of(program)
    assert list(files) == ["__init__.py", "stage0.py", "stage1.py", "scheduler.py", "plan.json"]
    assert load_plan(files["plan.json"]) == plan_of(program)
    write(files, tmp_path)
    tools.lint(*tmp_path.glob("*.py"))
    golden("codegen/package/__init__.py", files["__init__.py"])


def test_runs_with_the_models_own_tensors(program: Program, tools: SimpleNamespace, tmp_path: Path) -> None:
    save(program, files_of(program), tmp_path)
    module, model = load_package(tmp_path), Net()
    stages = bind(module, model).stages
    assert stages[0].layers[0].weight is model.layers[0].weight
    assert stages[1].offset is model.offset
    x = torch.rand(3, 4)
    assert module.inputs(x) == (x,)
    result = module.result(*tools.run_stages(program, stages, x))
    assert torch.equal(result, model(x))


def test_an_edit_takes_effect_in_the_next_load(program: Program, tools: SimpleNamespace, tmp_path: Path) -> None:
    write(files_of(program), tmp_path)
    model, x = Net(), torch.rand(3, 4)
    first = load_package(tmp_path)
    file = tmp_path / "stage0.py"
    before = file.stat()
    text = file.read_text()
    file.write_text(text.replace("torch.relu(", "torch.tanh("))  # as long as before, and in the same second
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    second = load_package(tmp_path)
    pipes = [bind(module, model).stages for module in (first, second)]
    (old,), (new,) = (tools.run_stages(program, stages, x) for stages in pipes)
    assert torch.equal(old, model(x))
    assert torch.equal(new, model.layers[1](torch.tanh(model.layers[0](x))) + model.offset)
    assert not (tmp_path / "__pycache__").exists()


def test_bytecode_that_a_plain_import_left_is_not_used(program: Program, tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "plainly_imported"
    write(files_of(program), folder)
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__("plainly_imported")
    assert (folder / "__pycache__").exists() or sys.dont_write_bytecode
    file = folder / "__init__.py"
    before = file.stat()
    file.write_text(file.read_text().replace("CHUNKS = 4", "CHUNKS = 5"))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert load_package(folder).CHUNKS == 5


def test_tracebacks_show_the_file(program: Program, tmp_path: Path) -> None:
    write(files_of(program), tmp_path)
    stage = bind(load_package(tmp_path), Net()).stages[0]
    with pytest.raises(RuntimeError) as caught:
        stage(torch.rand(3, 5))
    frame = traceback.extract_tb(caught.tb)[-1]
    assert frame.filename == str((tmp_path / "stage0.py").resolve())
    assert "F.linear(x, self.layers[0].weight" in (frame.line or "")
    assert "F.linear" in linecache.getline(frame.filename, frame.lineno or 0)


def test_packages_live_side_by_side(program: Program, tmp_path: Path) -> None:
    modules = []
    for name in ("a", "b"):
        write(files_of(program), tmp_path / name)
        modules.append(load_package(tmp_path / name))
    first, second = modules
    assert first.Stage0 is not second.Stage0
    assert sys.modules[first.__name__ + ".stage0"].Stage0 is first.Stage0
    unload(first)
    assert not any(name.startswith(first.__name__ + ".") for name in sys.modules)
    assert sys.modules[second.__name__] is second


def test_a_broken_edit_is_named_and_leaves_nothing(program: Program, tmp_path: Path) -> None:
    write(files_of(program), tmp_path)
    (tmp_path / "stage1.py").write_text("def (\n")
    loaded = set(sys.modules)
    with pytest.raises(PackageError, match=r"stage1\.py:1 cannot be imported, SyntaxError") as caught:
        load_package(tmp_path)
    assert isinstance(caught.value.__cause__, SyntaxError)
    assert set(sys.modules) == loaded


def test_not_a_package(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="is not a package that fxpipe has saved"):
        load_package(tmp_path)


def test_a_model_that_does_not_fit_is_refused_untouched(program: Program, tmp_path: Path) -> None:
    write(files_of(program), tmp_path)
    module, model = load_package(tmp_path), Net(width=5)
    model.offset = model.offset.double()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(PackageError) as caught:
        bind(module, model)
    assert str(caught.value) == (
        "the package was made for Net; this Net does not fit:\n"
        "  layers.0.weight: float32[5, 4], expected float32[4, 4]\n"
        "  layers.0.bias: float32[5], expected float32[4]\n"
        "  layers.1.weight: float32[4, 5], expected float32[4, 4]\n"
        "  offset: float64[4], expected float32[4]"
    )
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with pytest.raises(PackageError, match=r"this Linear does not fit:\n  layers\.0\.weight: missing"):
        bind(module, nn.Linear(2, 2))
    with pytest.raises(PackageError, match="it is on the meta device"):
        bind(module, Net().to("meta"))


def test_a_long_call_is_shown_in_lines() -> None:
    names = ", ".join(f"argument_{n}={{'a': 1}}" for n in range(8))
    lines = _wrapped(f"    result = pipe({names})")
    assert lines[0] == "    result = pipe("
    assert lines[-1] == "    )"
    assert " ".join(line.strip() for line in lines[1:-1]) == names + ","
    assert max(map(len, lines)) <= 110


def test_shorter_packages_replace_longer_ones(program: Program, tmp_path: Path) -> None:
    write(files_of(program), tmp_path)
    (tmp_path / "stage7.py").write_text("")
    (tmp_path / "stages.py").write_text("mine")
    write(files_of(program), tmp_path)
    assert not (tmp_path / "stage7.py").exists()
    assert (tmp_path / "stages.py").exists()


def test_workers() -> None:
    assert worker_device("cpu:3") == torch.device("cpu")
    assert worker_device("cuda:1") == torch.device("cuda:1")


# Constants ------------------------------------------------------------------------------------------------------------


def with_constant(program: Program, value: Any) -> Program:
    """The model's `offset` is no buffer but something else that it holds on to."""
    kind = TensorType("f32", (4,), "cpu") if isinstance(value, Tensor) else ObjectType("object")
    states = tuple(
        State("offset", "offset", "constant", kind, value=value) if state.name == "offset" else state
        for state in program.graph.states
    )
    return with_graph(program, states=states)


def test_constants_are_saved_beside(program: Program, tools: SimpleNamespace, tmp_path: Path) -> None:
    made = with_constant(program, torch.full((4,), 3.0))
    save(made, files_of(made), tmp_path)
    module, model, x = load_package(tmp_path), Net(), torch.rand(2, 4)
    (found,) = tools.run_stages(made, bind(module, model).stages, x)
    torch.testing.assert_close(found, model(x) - model.offset + 3)
    (live,) = tools.run_stages(made, bind(module, model, constants(made)).stages, x)
    assert torch.equal(found, live)
    (tmp_path / "constants.pt").unlink()
    with pytest.raises(PackageError, match=r"lacks its constant 'offset', which constants\.pt should have"):
        bind(module, model)
    save(program, files_of(program), tmp_path)
    assert not (tmp_path / "constants.pt").exists()


def test_other_constants_are_refused_before_anything_is_written(program: Program, tmp_path: Path) -> None:
    made = with_constant(program, nn.Linear(2, 2))
    with pytest.raises(PackageError, match=r"the constant 'offset' is a Linear.* it is used at net\.py:1"):
        save(made, files_of(made), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_only_this_process_can_import_is_refused(program: Program, tmp_path: Path) -> None:
    files = files_of(program) | {"stage0.py": "import __main__\n"}
    with pytest.raises(PackageError, match=r"stage0\.py uses functions or classes of the script that runs now"):
        save(program, files, tmp_path)


# The model's call -----------------------------------------------------------------------------------------------------


def faced(program: Program, tmp_path: Path, call: tuple[Any, Any], paths: dict[str, str], result: Any) -> Any:
    """The package of a graph with other inputs, call and result; only `inputs` and `result` matter."""
    kind = TensorType("f32", ("b", 4), "cpu")
    inputs = tuple(Input(name, path, kind, 0) for name, path in paths.items())
    outputs = (Output("add", 0), Output("x", 0))
    files = files_of(with_graph(program, inputs=inputs, call=call, result=result, outputs=outputs))
    write(files, tmp_path)
    return load_package(tmp_path), files["__init__.py"]


def test_nested_calls(program: Program, tools: SimpleNamespace, tmp_path: Path) -> None:
    call = (
        ({"ids": Ref("ids"), "mask": Ref("mask")}, [Ref("x"), (Ref("z"), None)], "mean"),
        {"scale": 2.0, "pair": Struct(Pair, (("first", Ref("first")), ("second", None))), "causal": True},
    )
    paths = {
        "ids": "batch['ids']", "mask": "batch['mask']", "x": "parts[0]", "z": "parts[1][0]", "first": "pair.first",
    }  # fmt: skip
    result = {"y": Ref("add"), "more": [Struct(Output2, (("y", Ref("x")), ("more", (1, Ref("add")))))]}
    module, text = faced(program, tmp_path, call, paths, result)
    tools.lint(tmp_path / "__init__.py")
    assert 'def inputs(batch, parts, argument_2="mean", *, scale=2.0, pair, causal=True):' in text

    batch = {"ids": 1, "mask": 2}
    assert module.inputs(batch, [3, (4, None)], pair=Pair(5, None)) == (1, 2, 3, 4, 5)
    assert module.inputs(batch, [3, (4, None)], "mean", scale=2.0, pair=Pair(5, None)) == (1, 2, 3, 4, 5)
    assert module.inputs({"mask": 2, "ids": 1}, [3, (4, None)], pair=Pair(5, None)) == (1, 2, 3, 4, 5)
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        (({"ids": 1}, [3, (4, None)]), {}, "the keys \"ids\", \"mask\" in batch"),
        ((batch, [3]), {}, "2 items in parts"),
        ((batch, [3, (4, 5)]), {}, r"parts\[1\]\[1\]=None"),
        ((batch, [3, (4, None)], "sum"), {}, 'argument_2="mean"'),
        ((batch, [3, (4, None)]), {"scale": 3.0}, r"scale=2\.0"),
        ((batch, [3, (4, None)]), {"causal": False}, "causal=True"),
    ]  # fmt: skip
    for args, kwargs, message in wrong:
        with pytest.raises(ValueError, match=f"this package was made for calls with {message}"):
            module.inputs(*args, **{"pair": Pair(5, None), **kwargs})

    assert module.result(1, 2) == {"y": 1, "more": [Output2(y=2, more=(1, 1))]}


NASTY = ['"""', "\\", "x\n        import os", "# noqa", "'''", '"); raise SystemExit; ("', "\x00", "\u202e", "{0}"]


@pytest.mark.parametrize("text", NASTY)
def test_nothing_of_the_user_breaks_out(text: str, program: Program, tools: SimpleNamespace, tmp_path: Path) -> None:
    states = tuple(replace(state, path=text + state.path) for state in program.graph.states)
    made = with_graph(program, model=text, states=states)
    module, _ = faced(made, tmp_path, (({text: Ref("x")}, text), {}), {"x": f"batch[{text!r}]"}, {text: Ref("add")})
    tools.lint(tmp_path / "__init__.py")
    assert text == module.MODEL
    assert module.TENSORS[0][0] == states[0].path
    assert module.inputs({text: 1}, text) == (1,)
    assert module.result(1, 2) == {text: 1}


def test_arguments_keep_the_models_names(program: Program, tmp_path: Path) -> None:
    module, text = faced(program, tmp_path, ((Ref("input"), Ref("a")), {}), {"a": "a", "input": "input"}, Ref("add"))
    assert module.inputs(a=2, input=1) == (2, 1)
    assert "result = pipe(input, a)" in text
    assert module.result(1, 2) == 1


def test_names_of_positional_arguments_can_be_given(program: Program) -> None:
    made = with_graph(program, call=((Ref("x"), None), {}), arguments=("image", "mask"))
    text = package(made, plan_of(made), SCHEDULER)["__init__.py"]
    assert "def inputs(image, mask=None):" in text


def test_a_result_that_cannot_be_written_fails_when_it_is_asked_for(program: Program, tmp_path: Path) -> None:
    @dataclass
    class Local:
        y: Any

    module, _ = faced(program, tmp_path, ((Ref("x"),), {}), {"x": "x"}, Struct(Local, (("y", Ref("add")),)))
    with pytest.raises(NotImplementedError, match=r"Local .* cannot be imported by its name"):
        module.result(1, 2)


def test_eleven_stages_are_imported_in_order(tools: SimpleNamespace, tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Tanh() for _ in range(12)))
    made = tools.cut(tools.graph_of(model, torch.rand(2, 4)), *range(1, 12))
    write(files_of(made), tmp_path)
    tools.lint(tmp_path / "__init__.py")
