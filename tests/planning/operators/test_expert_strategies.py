"""The experts' strategies, and the space that is searched."""

from random import Random

import pytest

from fxpipe.ir.operators.operators import OperatorGraph
from fxpipe.ir.operators.strategy import check, cut
from fxpipe.planning.operators.expert_strategies import (
    data_parallel,
    depth_parallel,
    expert,
    krizhevsky,
    model_parallel,
    scattered,
)
from fxpipe.planning.operators.models.operator_kinds import convolution, image, pooling
from fxpipe.planning.operators.strategy_space import configs
from tests.helpers.operator_graphs import branches, lenet, rnnlm, translation

MAKERS = [data_parallel, depth_parallel, expert, krizhevsky, model_parallel]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("graph", [branches(), lenet(), rnnlm(), translation()], ids=lambda graph: graph.name)
def test_every_strategy_fits_its_graph(make, graph):
    for devices in (1, 2, 3, 4, 6, 16):
        check(graph, make(graph, devices), devices)
        check(graph, scattered(graph, devices, Random(devices)), devices)


def words(graph, strategy):
    return {
        o.name: f"{cut(o, config)} on {' '.join(map(str, config.devices))}"
        for o, config in zip(graph, strategy.configs, strict=True)
        if o.kind != "input"
    }


def test_krizhevsky_cuts_convolutions_by_sample_and_the_rest_by_parameter():
    found = words(lenet(), krizhevsky(lenet(), 2))
    assert found["conv1"] == found["pool2"] == found["flat"] == "sample/2 on 0 1"
    assert found["fc1"] == found["fc3"] == "channel/2 on 0 1"


def test_each_layer_of_a_recurrent_network_has_its_devices():
    found = words(rnnlm(), depth_parallel(rnnlm(), 4))
    assert found["embed_0"] == found["embed_1"] == "whole on 0"
    assert found["lstm1_0"] == found["lstm1_1"] == "whole on 2"
    found = words(rnnlm(), depth_parallel(rnnlm(), 8))
    assert found["softmax_1"] == "sample/2 on 6 7"


def test_model_parallel_gives_each_device_a_run():
    strategy = model_parallel(lenet(), 2)
    devices = [config.devices[0] for config in strategy.configs]
    assert devices == sorted(devices)
    assert set(devices) == {0, 1}


def test_data_parallel_takes_as_many_devices_as_there_are_samples():
    graph = lenet(batch=2)
    assert words(graph, data_parallel(graph, 4))["conv1"] == "sample/2 on 0 1"


def test_the_space_of_an_operator():
    x = image("image", 64, 3, 8, 8)
    conv = convolution("conv", x, 8, 3, padding=1)
    assert len(configs(conv, 4)) == 4 * 1 + 3 * 4 + 1 * 10
    assert len(configs(conv, 4, "S")) == 4 + 3 + 1  # sample only
    assert len(configs(pooling("pool", x, 2), 4)) == 25  # three channels are not cut into four
    assert len(configs(x, 4)) == 1
    assert len(set(configs(conv, 6))) == len(configs(conv, 6))


def test_a_search_of_nothing_is_refused():
    graph = OperatorGraph("none", ())
    assert data_parallel(graph, 2).configs == ()
