"""What capture leaves alone, when it captures again, and what it refuses."""

import copy
import dataclasses
import gc
import threading
import traceback
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.variables import builtin
from torch.utils.checkpoint import checkpoint

from fxpipe.capture import CallCapture, capture
from fxpipe.errors import CaptureError, InputError
from fxpipe.ir.graph.evaluate_graph import evaluate


def run_on(model, seen):
    def run(graph, inputs):
        assert all(p.untyped_storage().nbytes() for p in model.parameters())  # the model is whole while it runs
        seen.append(graph)
        named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        states = {s.name: named[s.path] for s in graph.states if s.kind != "constant"}
        values = evaluate(graph, dict(zip([i.name for i in graph.inputs], inputs, strict=True)), states)
        return tuple(values[output.value] for output in graph.outputs)

    return run


class Calls:
    """A front and the plain model beside it; `kinds` counts the different graphs."""

    def __init__(self, model, **options):
        self.plain, self.model = copy.deepcopy(model), model
        self.seen = []
        self.call_capture = CallCapture(model, **options)

    def __call__(self, *args, **kwargs):
        expected = self.plain(*args, **kwargs)
        got = self.call_capture(args, kwargs, run_on(self.model, self.seen))
        torch.testing.assert_close(got, expected)
        return got

    @property
    def kinds(self):
        return len({id(graph) for graph in self.seen})


class Flags(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.drop, self.power = nn.Linear(4, 4), nn.Dropout(1.0), 1
        self.scale = torch.full((4,), 2.0)

    def forward(self, x, k=1, temperature=1.0, mask=None, flag=False):
        h = self.drop(self.fc(x)) * k / temperature * self.scale + x**self.power
        if mask is not None:
            h = h.masked_fill(mask, 0.0)
        return -h if flag else h


def test_every_change_of_the_call_is_seen():
    calls = Calls(Flags())
    x = torch.randn(6, 4)
    for _ in range(2):
        calls(x)
    assert calls.kinds == 1
    calls(x, flag=True)
    calls(x, mask=x > 0)
    calls(torch.randn(3, 4), mask=torch.randn(3, 4) > 0)
    assert calls.kinds == 3
    for k in range(2, 6):
        calls(x, k)
    for temperature in (0.5, 0.25, 0.125):
        calls(x, 1, temperature)
    calls(torch.randn(6, 7, 4))
    calls(torch.randn(6, 9, 4))
    calls(torch.randn(6, 11, 4))
    for power in (2, 3, 4):
        calls.plain.power = calls.model.power = power
        calls(x)
    with torch.no_grad():
        calls(x)
    with torch.inference_mode():
        calls(x)
    for module in (calls.plain, calls.model):
        module.eval()
    calls(x)
    assert calls.kinds < 20


def test_every_change_of_the_model_is_seen():
    calls = Calls(Flags().eval())
    x = torch.randn(6, 4)
    calls(x)
    for change in (
        lambda m: m.requires_grad_(False),
        lambda m: m.load_state_dict({k: torch.ones_like(v) for k, v in m.state_dict().items()}),
        lambda m: setattr(m.fc, "weight", nn.Parameter(torch.full((4, 4), 3.0))),
        lambda m: setattr(m, "scale", torch.full((4,), 5.0)),
        lambda m: setattr(m, "fc", nn.Linear(4, 4, bias=False).requires_grad_(False)),
        lambda m: m.fc.load_state_dict({"weight": torch.ones(4, 4)}),
    ):
        for model in (calls.plain, calls.model):
            torch.manual_seed(0)
            change(model)
        calls(x)
    calls.plain.double(), calls.model.double()
    calls(x.double())


def test_capture_has_no_side_effects():
    class Busy(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)
            self.calls, self.log, self.cache = 0, [], {}
            self.register_buffer("ema", torch.ones(4))

        def forward(self, x):
            self.calls += 1
            self.log.append(self.calls)
            self.cache["x"] = self.last = x
            self.ema = self.ema * 0.5
            return self.drop(self.norm(x)) + torch.rand(4)

    model, x = Busy(), torch.randn(6, 4, requires_grad=True)
    parameters, before = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    graph = capture(model, (x,))
    assert [op.draw for op in graph.ops if op.random] == [0, 1]
    assert torch.equal(random, torch.get_rng_state())
    assert (model.calls, model.log, model.cache) == (0, [], {})
    assert not hasattr(model, "last")
    assert all(p is parameters[name] and p.grad is None for name, p in model.named_parameters())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)

    seen = []
    call_capture = CallCapture(model)
    call_capture((x,), {}, run_on(model, seen))
    call_capture((x,), {}, run_on(model, seen))
    assert (model.calls, model.log) == (2, [1, 2])
    assert model.last is x
    assert model.cache["x"] is x
    assert model.ema.tolist() == [0.25] * 4
    assert model.norm.num_batches_tracked == 2


def test_what_forward_sets_on_objects_of_the_model_is_set_once():
    class Settings:
        def __init__(self):
            self.kind, self.calls, self.last = None, 0, None

    class Decides(nn.Module):
        """As models do that choose their loss at the first call, and remember the choice in their configuration."""

        def __init__(self):
            super().__init__()
            self.settings, self.fc = Settings(), nn.Linear(4, 4)

        def forward(self, x):
            if self.settings.kind is None:
                self.settings.kind = "regression"
            self.settings.calls += 1
            self.settings.last = x
            return self.fc(x) * self.settings.calls

    calls, x = Calls(Decides()), torch.randn(6, 4)
    for count in (1, 2, 3):
        calls(x)
        assert vars(calls.model.settings) == {"kind": "regression", "calls": count, "last": x}


def test_nothing_changes_when_the_model_is_refused_or_the_run_fails():
    class Refused(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.calls = nn.Linear(4, 4), 0

        def forward(self, x, fine=True):
            self.calls += 1
            h = self.fc(x)
            return h if fine else {h} if h.sum() > 0 else {x}

    model, x = Refused(), torch.randn(6, 4)
    weight, call_capture = model.fc.weight, CallCapture(model)
    with pytest.raises(
        CaptureError, match=r"(?s)test_capture_call.py:\d+.*return h if fine.*return new tensors"
    ) as caught:
        call_capture((x, False), {}, run_on(model, []))
    assert caught.value.__cause__ is None
    assert model.fc.weight is weight
    assert model.calls == 0

    def fails(graph, inputs):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        call_capture((x,), {}, fails)
    assert model.fc.weight is weight
    torch.testing.assert_close(call_capture((x,), {}, run_on(model, [])), model.fc(x))


@dataclasses.dataclass
class Holder:
    x: torch.Tensor


class Plain:
    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize("wrap", [lambda x: {"x": x}, lambda x: [x], Holder, Plain])
def test_any_structure_goes_in_and_out(wrap):
    class Wraps(nn.Module):
        def forward(self, given):
            x = given.x if hasattr(given, "x") else given["x"] if isinstance(given, dict) else given[0]
            return wrap(x * 2), given

    model, seen = Wraps(), []
    call_capture = CallCapture(model)
    for _ in range(2):
        x = torch.randn(6, 4)
        doubled, given = call_capture((wrap(x),), {}, run_on(model, seen))
        value, same = (
            item.x if hasattr(item, "x") else next(iter(item.values() if isinstance(item, dict) else item))
            for item in (doubled, given)
        )
        assert torch.equal(value, x * 2)
        assert same is x
    assert len({id(graph) for graph in seen}) == 1
    assert seen[0].inputs[0].path in ("given['x']", "given[0]", "given.x")


def test_the_same_tensor_twice_is_another_kind_of_call():
    class Two(nn.Module):
        def forward(self, x, y):
            return x * 2 + y

    calls = Calls(Two())
    x, y = torch.randn(2, 6, 4)
    calls(x, y)
    calls(x, x)
    calls(y, x)


def test_a_model_on_meta():
    with torch.device("meta"):
        model = Flags()
    model.scale = torch.ones(4)  # a real constant is no harm
    model.scale = model.scale.to("meta")
    graph = capture(model, (torch.randn(6, 4),))
    assert graph.inputs[0].type.device == "meta"
    assert str(graph.ops[-1].type) == "f32[b, 4]"
    assert capture(model, (torch.empty(6, 4, device="meta"),)).ops[-1].type == graph.ops[-1].type


def test_inputs_without_a_common_size():
    class Masked(nn.Module):
        def forward(self, x, batch):
            return x @ batch["mask"]

    x, mask = torch.randn(6, 4), torch.randn(4, 4)
    with pytest.raises(
        InputError, match=r"(?s)x: 6 in dimension 0.*batch\['mask'\]: 4.*batch_dim={\"batch\['mask'\]\": None}"
    ):
        capture(Masked(), (x, {"mask": mask}))
    graph = capture(Masked(), (x,), {"batch": {"mask": mask}}, batch_dim={"batch['mask']": None})
    assert [(i.name, i.path, i.batch_dim) for i in graph.inputs] == [
        ("x", "x", 0),
        ("batch_mask", "batch['mask']", None),
    ]
    with pytest.raises(InputError, match="batch_dim names 'msk', which is no input; the inputs are x, "):
        capture(Masked(), (x, {"mask": mask}), batch_dim={"msk": None})
    with pytest.raises(InputError, match="the batch is empty"):
        capture(Masked(), (torch.randn(0, 4), {"mask": torch.randn(0, 4)}))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'batch'"):
        capture(Masked(), (x,))


def test_another_batch_dimension():
    graph = capture(nn.LSTM(4, 4), (torch.randn(5, 6, 4),), batch_dim=1)
    assert [output.batch_dim for output in graph.outputs] == [1, 1, 1]


class Conditional(nn.Module):
    def forward(self, x):
        return x + 1 if x.shape[0] > 3 else x - 1


def test_a_model_that_looks_at_the_batch_size():
    sizes = {8: (4, 4), 6: (3, 3), 7: (4, 3)}
    seen = []
    call_capture = CallCapture(Conditional(), sizes=sizes.__getitem__)
    run = run_on(call_capture.model, seen)
    assert torch.equal(call_capture((torch.zeros(8),), {}, run), torch.ones(8))
    with pytest.raises(CaptureError, match=r"(?s)x.shape\[0\] > 3.*whole batch of 6 than for a micro-batch of 3"):
        call_capture((torch.zeros(6),), {}, run)
    with pytest.raises(
        CaptureError, match=r"(?s)test_capture_call.py:\d+.*x.shape\[0\] > 3.*micro-batch of 3 than for one of 4"
    ):
        call_capture((torch.zeros(7),), {}, run)


def test_a_batch_of_one_is_cut_like_any_other():
    calls = Calls(nn.Linear(4, 4))
    calls(torch.randn(6, 4))
    calls(torch.randn(1, 4))
    assert calls.kinds == 1


class Loop(nn.Module):
    def forward(self, x):
        return torch.stack([x[i] * i for i in range(x.shape[0])])


class Baked(nn.Module):
    def forward(self, x):
        return x.reshape(len(range(x.shape[0])), 2, 2) * 2, x.mean(1)


def test_a_model_that_counts_to_the_batch_size():
    with pytest.raises(CaptureError, match=r"(?s)test_capture_call.py:\d+\n    return torch.stack.*runs other ops"):
        capture(Loop(), (torch.randn(6, 4),))
    seen = []
    call_capture = CallCapture(Baked(), sizes={8: (4, 4), 6: (3, 3), 7: (4, 3), 9: (4, 3, 2)}.__getitem__)
    for rows in (8, 6, 7, 8):
        x = torch.randn(rows, 4)

        def in_halves(graph, inputs):
            parts = [
                run_on(call_capture.model, seen)(graph, half)
                for half in zip(*(i.tensor_split(2) for i in inputs), strict=True)
            ]
            return tuple(torch.cat(values) for values in zip(*parts, strict=True))

        torch.testing.assert_close(call_capture((x,), {}, in_halves), call_capture.model(x))
    assert [str(op.type) for op in seen[0].ops] == ["f32[b, 2, 2]", "f32[b, 2, 2]", "f32[b]"]
    with pytest.raises(CaptureError, match=r"(?s)len\(range\(x.shape\[0\]\)\).*uses the batch size as a Python int"):
        call_capture((torch.randn(9, 4),), {}, in_halves)


class Body(nn.Module):
    """A model whose forward is `body`."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.fc = nn.Linear(4, 4)
        self.constant = torch.zeros(4)

    def forward(self, x):
        return self.body(self, x)


def body_item(self, x):
    return x * float(x.detach().numpy().sum())


def body_constant(self, x):
    self.constant += 1
    return x + self.constant


REFUSED = {
    body_constant: r"self.constant \+= 1\nwrites into constant.*register_buffer\('constant'",
}


@pytest.mark.parametrize("body", REFUSED, ids=lambda body: body.__name__)
def test_refused_with_the_line(body, caplog):
    with pytest.raises(CaptureError, match=r"(?s)test_capture_call.py:\d+\n    .*" + REFUSED[body]):
        capture(Body(body), (torch.randn(6, 4),))


class SizeBecomesANumber(nn.Module):
    """The batch size is an input of the graph, and later on torch makes a number of it."""

    def __init__(self):
        super().__init__()
        self.fc, self.p = nn.Linear(1, 1), nn.Parameter(torch.randn(1, 2))

    def forward(self, *args, idx):
        _, z = args
        most = z.amax(-1, keepdim=True)
        y = checkpoint(self.fc, torch.special.erf(most), use_reentrant=False)
        torch.take_along_dim(most.flatten(1), idx[:, :2] % 2 * 0, 1)
        y = y @ self.p
        out = y.new_empty(y.shape)
        out[:, :1], out[:, 1:] = y[:, :1], y[:, 1:].sin()
        return out


def test_a_size_that_becomes_a_number():
    model = SizeBecomesANumber()
    x, z, idx = torch.randn(6, 6), torch.randn(6, 6), torch.randint(0, 5, (6, 3))
    torch.testing.assert_close(CallCapture(model)((x, z), {"idx": idx}, run_on(model, [])), model(x, z, idx=idx))


def test_all_pairs_of_a_batch_cannot_be_joined_from_unequal_pieces():
    class Pairs(nn.Module):
        def forward(self, x):
            return x @ x.t()

    call_capture = CallCapture(Pairs(), reduce={"matmul": "cat"}, sizes=lambda batch: (3, batch - 3))
    assert call_capture((torch.ones(6, 4),), {}, lambda graph, inputs: inputs).shape == (6, 4)
    with pytest.raises(CaptureError, match=r"matmul, f32\[b, b\], cannot be joined.*the sizes 3, 2"):
        call_capture((torch.ones(5, 4),), {}, lambda graph, inputs: inputs)


def test_what_a_model_sets_up_in_its_first_call():
    lock = threading.Lock()

    class Hooked(nn.Module):
        """As libraries do that collect the outputs of inner modules by hooks."""

        def __init__(self):
            super().__init__()
            self.fc, self.collected, self.calls = nn.Linear(4, 4), [], 0

        def forward(self, x):
            self.calls += 1
            if not hasattr(self, "ready"):
                with lock:
                    self.fc.register_forward_hook(lambda module, args, out: self.collected.append(out))
                self.ready = True
            self.collected.clear()
            return self.fc(x), self.collected[0]

    calls, x = Calls(Hooked()), torch.randn(6, 4)
    for count in (1, 2):
        calls(x)
        assert (calls.model.calls, calls.model.ready, len(calls.model.fc._forward_hooks)) == (count, True, 1)


def test_a_first_call_sets_up_hooks_and_flags_and_nothing_else():
    lock = threading.Lock()

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            if not hasattr(self, "ready"):
                with lock:
                    self.ready, self.seen, self.last = True, 0, x
                    self.register_buffer("scale", torch.ones(4))
            self.seen = getattr(self, "seen", 0) + 1
            return self.fc(x)

    model = Counts()
    calls, x = Calls(model), torch.randn(6, 4)
    for count in (1, 2):
        calls(x)
        assert (model.seen, model.ready, hasattr(model, "last"), hasattr(model, "scale")) == (count, True, False, False)


@pytest.mark.skipif(not hasattr(builtin, "SetAttrBuiltinVariable"), reason="this torch keeps it elsewhere")
def test_a_gradient_that_nobody_gets():
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            h = x[:, None]
            h.requires_grad = True
            return self.fc(h) if h.requires_grad else h

    Calls(Asks())(torch.randn(6, 4))


def test_a_hook_that_asks_for_gradients_of_what_a_frozen_layer_returns():
    """As libraries do before checkpoints: the value goes on through all layers."""

    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.fc, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.embed.requires_grad_(False)
            self.embed.register_forward_hook(lambda module, given, made: made.requires_grad_(True))

        def forward(self, ids):
            h = self.embed(ids)
            h = checkpoint(self.fc, h, use_reentrant=False) if h.requires_grad else h
            return self.head(h), h

    calls, ids = Calls(Frozen()), torch.randint(9, (6, 4))
    for side in (calls.plain(ids), calls(ids)):
        side[0].square().sum().backward()
    for one, other in zip(calls.model.parameters(), calls.plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad)


def test_functions_that_dynamo_passes_over_are_read():
    class Scripted(nn.Module):
        """As libraries write that can be scripted too."""

        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x, skip=None):
            x = self.fc(x)
            return x + skip if torch.jit.isinstance(skip, torch.Tensor) else x

    calls = Calls(Scripted())
    calls(torch.ones(6, 4), torch.ones(6, 4))
    calls(torch.ones(6, 4))


def test_two_fronts_of_one_class_share_nothing():
    for rows in (3, 5, 7):
        graph = capture(Flags(), (torch.randn(6, rows, 4),))
        assert graph.inputs[0].type.shape == ("b", rows, 4)


def test_a_dimension_that_varies_gets_a_name():
    calls = Calls(nn.Linear(4, 4))
    calls(torch.randn(6, 5, 4))
    calls(torch.randn(6, 6, 4))  # equal to the batch, but not the batch
    calls(torch.randn(6, 7, 4))
    assert calls.kinds == 2
    graph = calls.seen[-1]
    assert graph.inputs[0].type.shape == ("b", "seq", 4)
    assert [(s.name, s.dim) for s in graph.sizes] == [("b", 0), ("seq", 1)]


def test_a_size_is_called_what_the_model_calls_it():
    class Positions(nn.Module):
        def forward(self, ids, image):
            _, length = ids.shape
            return ids * torch.arange(length), image.relu()

    calls = Calls(Positions())
    for size in (5, 6, 7):
        calls(torch.ones(4, size, dtype=torch.int64), torch.randn(4, 3, size + 4, 8))
    assert [size.name for size in calls.seen[-1].sizes] == ["b", "length", "height"]


def test_loss_of_a_function():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x, target):
            y = self.fc(x)
            return y, F.cross_entropy(y, target)

    x, target = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    graph = capture(WithLoss(), (x, target))
    assert [(o.batch_dim, o.reduce) for o in graph.outputs] == [(0, None), (None, "sum")]
    assert graph.totals is not None  # how many labels the whole batch has
    graph = capture(WithLoss(), (x, target), reduce="mean")
    assert [(o.batch_dim, o.reduce) for o in graph.outputs] == [(0, None), (None, "mean")]


def test_a_front_that_is_dropped_is_freed_with_its_model():
    model = nn.Linear(4, 4)
    call_capture = CallCapture(model)
    call_capture.capture((torch.randn(6, 4),), {})
    left = weakref.ref(call_capture), weakref.ref(model)
    del call_capture, model
    gc.collect()
    assert [ref() for ref in left] == [None, None]


def test_which_kernel_a_convolution_takes_for_a_batch_is_its_own_affair():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    call_capture = CallCapture(model, sizes=lambda batch: (16, 15))  # from 16 on, another order in memory
    assert [str(size.name) for size in call_capture.capture((torch.randn(31, 3, 4, 4),), {}).sizes] == ["b"]


def test_an_error_has_no_frames_with_tensors_without_memory():
    """pytest and debuggers print the arguments of frames; to print such a tensor ends the process."""

    class Hooked(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            y.register_hook(lambda gradient: gradient * 2)
            return y

    with pytest.raises(CaptureError) as found:
        capture(Hooked(2, 2), (torch.ones(4, 2),))
    error = found.value
    frames = []
    while error is not None:
        frames += [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        error = error.__cause__ or error.__context__
    assert frames[-1] == "_captured"
    assert not {"_pass", "_routed"} & set(frames)
