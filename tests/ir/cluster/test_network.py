"""Rates of transfers and all-reduces on small networks, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fxpipe.ir.cluster.cluster import Cluster, Device, Link, Switch, link
from fxpipe.ir.cluster.network import Rate, all_reduce, behind_ports, ring, split_concat
from fxpipe.ir.cluster.published_clusters import dapple_a, k80s
from fxpipe.planning.operators.message_links import links

ONE = Device("0", 1, 1, 1, "a")


def devices(text: str) -> tuple[Device, ...]:
    """A device for each letter, which is its server."""
    return tuple(replace(ONE, label=str(i), server=server) for i, server in enumerate(text))


TWO_BY_TWO = Cluster(
    devices("aabb"),
    switches=(
        Switch("a", ("0", "1"), 100.0, 0.1),
        Switch("b", ("2", "3"), 100.0, 0.1),
        Switch("network", ("a", "b"), 10.0, 1.0),
    ),
)


def test_between_servers_all_share_the_card():
    assert split_concat(TWO_BY_TWO, (0,), (2,)) == Rate(1.0, 0.1)
    assert split_concat(TWO_BY_TWO, (0, 1), (2, 3)) == Rate(1.0, 0.1)  # two pairs, one card


def test_within_a_server_each_device_has_its_port():
    assert split_concat(TWO_BY_TWO, (0,), (1,)) == Rate(0.1, 0.01)
    wide = Cluster(devices("aaaa"), switches=(Switch("a", ("0", "1", "2", "3"), 100.0, 0.0),))
    assert split_concat(wide, (0, 1), (2, 3)) == Rate(0.0, 0.005)
    assert split_concat(wide, (0,), (1, 2, 3)) == Rate(0.0, pytest.approx(0.01))  # the sender is the narrow place


def test_a_mixed_transfer_takes_the_slower_way():
    """0 and 1 send to 2 and, in their own server, to nobody: 0 -> 1 is one half, 0 -> 2 the other."""
    assert split_concat(TWO_BY_TWO, (0,), (1, 2)) == Rate(1.0, 0.05)


def test_what_stays_does_not_move():
    assert split_concat(TWO_BY_TWO, (0,), (0,)) == Rate(0.0, 0.0)


def test_no_bytes_take_no_time():
    assert Rate(1.0, 1.0).seconds(0) == 0
    assert Rate(1.0, 1.0).seconds(2) == 3


def test_rings():
    assert all_reduce(TWO_BY_TWO, (1,)) == Rate(0.0, 0.0)
    assert all_reduce(TWO_BY_TWO, (0, 1)) == Rate(0.2, pytest.approx(0.01))
    assert all_reduce(TWO_BY_TWO, (0, 1, 2)) == Rate(4.0, pytest.approx(4 / 3 / 10))
    faster = replace(
        TWO_BY_TWO, switches=(*TWO_BY_TWO.switches[:2], Switch("network", ("a", "b"), 10, 1, all_reduce=30))
    )
    assert ring(faster, (0, 2)) == (30, 1)
    assert split_concat(faster, (0,), (2,)).per_byte == 0.1


def test_asymmetric_ports():
    slow = Cluster(devices("ab"), switches=(Switch("network", ("a", "b"), 100.0, 0.0, into=20.0),))
    assert split_concat(slow, (0,), (1,)).per_byte == pytest.approx(1 / 20)


def test_traffic_through_a_switch_takes_its_ports_too():
    """A K80's pair shares a port upwards: two that send from one pair are half as fast as from two pairs."""
    cluster = k80s(nodes=2)
    near, far = split_concat(cluster, (0, 1), (2, 3)), split_concat(cluster, (0, 2), (4, 6))
    assert near.per_byte == pytest.approx(1 / 12e9)
    assert far.per_byte == pytest.approx(1 / 7e9)  # the node's card
    assert split_concat(cluster, (0,), (1,)).per_byte == pytest.approx(1 / 12e9)


def test_links_without_switches():
    cluster = Cluster(devices("aabb"), (Link(("a", "a"), 100, 0), Link(("b", "b"), 100, 0), Link(("a", "b"), 10, 1)))
    for senders, receivers in [((0, 1), (2, 3)), ((0,), (1,)), ((0,), (1, 2)), ((0, 2), (1, 3))]:
        assert split_concat(cluster, senders, receivers).per_byte == pytest.approx(
            split_concat(TWO_BY_TWO, senders, receivers).per_byte
        )


def test_the_narrowest_place_is_the_link_of_a_pair():
    assert link(dapple_a(), "V100:0", "V100:1").bandwidth == 130e9
    assert link(dapple_a(), "V100:0", "V100:8").bandwidth == 3.125e9
    assert link(k80s(), "K80:0", "K80:63").bandwidth == 7e9


CARDS = Cluster(
    devices("aabb"),
    switches=(*TWO_BY_TWO.switches[:2], Switch("network", ("a", "b"), 10.0, 1.0, card=5.0)),
)


def test_each_device_has_a_network_card_of_its_own():
    assert link(CARDS, "0", "2").bandwidth == 5.0
    assert split_concat(CARDS, (0,), (2,)) == Rate(1.0, 0.2)
    assert split_concat(CARDS, (0, 1), (2, 3)) == Rate(1.0, 0.1)  # two pairs, two cards
    assert ring(CARDS, (0, 2)) == (5.0, 1.0)
    assert ring(CARDS, (0, 1, 2, 3)) == (10.0, 1.0)  # two rings, one over each card
    assert ring(CARDS, (0, 1, 2)) == (5.0, 1.0)  # b has one device in it
    assert ring(CARDS, (0, 2), behind_ports(CARDS, range(4))) == (10.0, 1.0)


def test_messages_of_operators_wait_for_their_own_card():
    wires = links(CARDS)
    assert wires.number[0][2] == wires.number[0][3] != wires.number[1][2]
    assert wires.bandwidth[0][2] == 5.0
    shared = links(TWO_BY_TWO)
    assert shared.number[0][2] == shared.number[1][2]
