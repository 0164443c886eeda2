"""Calls of other lengths: which sizes are symbols from the first capture on, and that results are right for all."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxpipe
from fxpipe.capture import CallCapture
from fxpipe.errors import CaptureError
from tests.capture.test_capture_call import Calls

WORDS, LONGEST = 11, 9


class Words(nn.Module):
    """Learned positions, cut to the length."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.places = nn.Parameter(torch.randn(LONGEST, 8))

    def forward(self, ids):
        return self.out(torch.tanh(self.embed(ids) + self.places[: ids.shape[1]]))


class Masked(Words):
    def forward(self, ids, mask):
        x, length = self.embed(ids), ids.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool).tril() & mask[:, None, :]
        return self.out(F.scaled_dot_product_attention(x, x, x.roll(1, 1), attn_mask=seen))


class Recurrent(Words):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(8, 8, batch_first=True)

    def forward(self, ids):
        return self.out(self.rnn(self.embed(ids))[0])


class Shifted(Words):
    """Each word is beside the next one."""

    def forward(self, ids):
        return self.out(torch.tanh(self.embed(ids) * self.embed(F.pad(ids, (0, 1))[:, 1:])))


class Branches(Words):
    """Computes something else for long sentences."""

    def forward(self, ids):
        x = self.embed(ids)
        return self.out(x * 2 if ids.shape[1] > 6 else x)


class Unrolled(Words):
    """Its ops are as many as the words."""

    def forward(self, ids):
        x = self.embed(ids)
        state, states = x[:, 0], []
        for place in range(ids.shape[1]):
            state = torch.tanh(state + x[:, place])
            states.append(state)
        return self.out(torch.stack(states, 1))


class Whole(Words):
    """Knows one length only."""

    def forward(self, ids):
        return self.out(self.embed(ids) + self.places)


def loss(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def step(model, pipe, plain, ids):
    """One step of a pipe, whose loss and gradients are those of the plain model. Returns the graph."""
    given = (ids, torch.rand(ids.shape).log() < -0.1) if isinstance(model, Masked) else (ids,)
    if isinstance(model, Masked):
        given[1][:, 0] = True
    target = ids.roll(1)
    for part in (model, plain):
        part.zero_grad()
    got = pipe.step(*given, target=target, loss_fn=loss)
    expected = loss(plain(*given), target)
    expected.backward()
    torch.testing.assert_close(got, expected.detach(), rtol=0, atol=1e-12)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) is (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-12)
    return pipe.build.graph


@pytest.mark.parametrize(
    ("kind", "lengths", "captures"),
    [
        (Words, (5, 8, 3, LONGEST), 1),
        pytest.param(Masked, (5, 8, 3), 1, marks=pytest.mark.slow),
        (Recurrent, (5, 8, 3), 1),
        (Branches, (5, 8, 3, 9), 2),
        pytest.param(Unrolled, (3, 4, 3), 2, marks=pytest.mark.slow),
        (Whole, (LONGEST, LONGEST), 1),
        (Words, (5, 1, 4), 2),  # a size of one is a number
    ],
)
def test_a_step_is_right_for_each_length(kind, lengths, captures):
    torch.manual_seed(0)
    model = kind().double()
    plain = copy.deepcopy(model)
    graphs = []
    pipe = fxpipe.compile(model, devices=2, chunks=2)
    for length in lengths:
        graphs.append(step(model, pipe, plain, torch.randint(WORDS, (6, length))))
    pipe.close()
    assert len(set(map(id, graphs))) == captures


@pytest.mark.parametrize(
    ("kind", "lengths", "captures", "stages"),
    [
        (Words, (5, 8, 3, LONGEST), 1, 2),
        (Masked, (5, 8, 3), 1, 2),
        (Shifted, (5, 8, 3), 1, 2),
        (Branches, (5, 8, 3, 9), 2, 2),
        # code for the first length; then it is a symbol, and an LSTM uses it as an int
        pytest.param(Recurrent, (5, 8, 3), 2, 1, marks=pytest.mark.slow),
    ],
)
def test_backward_as_code_is_right_for_each_length(kind, lengths, captures, stages):
    torch.manual_seed(0)
    model = kind().double()
    plain = copy.deepcopy(model)
    graphs, codes = [], []
    pipe = fxpipe.compile(model, devices=2, chunks=2, backward="code", schedule="1f1b")
    for length in lengths:
        graphs.append(step(model, pipe, plain, torch.randint(WORDS, (6, length))))
        codes.append(sum(stage.backward is not None for stage in pipe.build.program.stages))
    pipe.close()
    assert len(set(map(id, graphs))) == captures
    assert (codes[0], codes[-1]) == (2, stages)


@pytest.mark.parametrize("backward", ["autograd", "code"])
def test_a_package_of_a_model_that_knows_one_length(backward, tmp_path):
    torch.manual_seed(0)
    model, ids = Whole(), torch.randint(WORDS, (6, LONGEST))
    pipe = fxpipe.compile(model, devices=2, chunks=2, backward=backward)
    wanted = pipe.step(ids, target=ids, loss_fn=loss)
    pipe.save(tmp_path)
    pipe.close()
    saved = fxpipe.load(tmp_path, model)
    torch.testing.assert_close(saved.step(ids, target=ids), wanted)
    with pytest.raises(fxpipe.errors.InputError, match=f"saved for int64.b, {LONGEST}"):
        saved.step(ids[:, 1:], target=ids[:, 1:])
    saved.close()


def test_sizes_of_whole_numbers_are_symbols_at_once():
    graphs = {how: CallCapture(Words(), dynamic=how).capture((torch.ones(6, 5).long(),), {}) for how in (True, False)}
    assert graphs[True].inputs[0].type.shape == ("b", "seq")
    assert graphs[False].inputs[0].type.shape == ("b", 5)
    features = CallCapture(nn.Linear(4, 4), dynamic=True).capture((torch.ones(6, 5, 4),), {})
    assert features.inputs[0].type.shape == ("b", 5, 4)


def test_without_dynamic_the_second_length_makes_it_a_symbol():
    calls = Calls(Words())
    for length in (5, 6, 7):
        calls(torch.ones(6, length).long())
    assert calls.kinds == 2


@torch.library.custom_op("fxpipe_lengths::doubled", mutates_args=())
def doubled(ids: torch.Tensor) -> torch.Tensor:
    return ids * 2


@doubled.register_fake
def _(ids):
    if type(ids.shape[1]) is not int:
        raise TypeError("the length has to be a number")
    return torch.empty_like(ids)


class Numbers(Words):
    """Calls an op that takes no symbols."""

    def forward(self, ids):
        return self.out(self.embed(doubled(ids) % WORDS))


def test_where_symbols_are_refused_sizes_are_numbers():
    calls = Calls(Numbers(), dynamic=True)
    calls(torch.ones(6, 5).long())
    (graph,) = calls.seen
    assert graph.inputs[0].type.shape == ("b", 5)
    assert graph.ops[0].target is doubled._opoverload  # nothing is kept whole


class Decaying(torch.autograd.Function):
    """Loops over the words, so that its graph is of one length."""

    @staticmethod
    def forward(ctx, x):
        return Decaying.summed([x[:, t] for t in range(x.shape[1])])

    @staticmethod
    def backward(ctx, grad):
        return Decaying.summed([grad[:, t] for t in reversed(range(grad.shape[1]))]).flip(1)

    @staticmethod
    def summed(words):
        sums = [words[0]]
        for word in words[1:]:
            sums.append(sums[-1] / 2 + word)
        return torch.stack(sums, 1)


class Decayed(Words):
    def forward(self, ids):
        places = torch.arange(ids.shape[1])
        return self.out(Decaying.apply(self.embed(ids) + places[:, None]))


def test_a_length_that_a_function_has_made_a_number_is_no_size():
    calls = Calls(Decayed(), dynamic=True)
    for length in (5, 6, 5):
        calls(torch.ones(6, length).long())
        graph = calls.seen[-1]
        assert graph.inputs[0].type.shape == ("b", length)
        assert [size.name for size in graph.sizes] == ["b"]
    assert calls.kinds == 2


def test_a_refused_call_says_the_same_and_leaves_the_next_one_its_symbols():
    class Checked(Words):
        def forward(self, ids, width=8):
            return super().forward(ids) @ torch.ones(width, 2)

    said = []
    for dynamic in (True, False):
        calls = CallCapture(Checked(), dynamic=dynamic)
        with pytest.raises((CaptureError, RuntimeError)) as refused:
            calls.capture((torch.ones(6, 5).long(),), {})
        said.append((type(refused.value), str(refused.value)))
        graph = calls.capture((torch.ones(6, 5).long(), WORDS), {})
        assert graph.inputs[0].type.shape == ("b", "seq" if dynamic else 5)
    assert said[0] == said[1]
