"""Ranks find each other, and what they send by TCP comes in order, however much it is and whoever waits."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore

from fxpipe.engines.transports.message_format import Size, read, seal
from fxpipe.engines.transports.tcp_peer import LETTER, SMALL, VALUE, TcpPeer, address_of, connect, serve

LIMIT = timedelta(seconds=20)
SIZE: Size = torch.float64, (3, 2)
MUCH = 2**24  # bytes: more than the system takes at once


@pytest.fixture(params=[0.0, 1e-3], ids=["sleeps", "spins"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[TcpPeer, TcpPeer]]:
    one, other = meet(2, request.param)
    yield one[1], other[0]
    for peer in (one[1], other[0]):
        peer.connection.close()


def meet(count: int, spin: float = 0.0) -> list[dict[int, TcpPeer]]:
    """What each of so many ranks finds, which are threads here."""
    store = HashStore()
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda rank: connect(store, rank, count, LIMIT, spin), range(count)))


def hear(peer: TcpPeer, limit: float = 20.0) -> bytes:
    place = peer.next(LETTER)
    peer.wait(lambda: place in peer.found, limit)
    return bytes(peer.found.pop(place))


def write_on(peer: TcpPeer) -> None:
    """The first letters may be sent before the system knows that the other one is gone."""
    for _ in range(100):
        peer.write(b"more")
        time.sleep(0.05)


def test_complex_numbers_lie_at_multiples_of_their_size(pair: tuple[TcpPeer, TcpPeer]) -> None:
    one, other = pair
    size: Size = torch.complex128, (3, 4)
    value, frame = torch.randn(4, 3, dtype=torch.complex128).T, one.frame(size)
    assert frame is not None
    buffer = frame.tensor(size)
    assert buffer.data_ptr() % buffer.element_size() == 0
    seal(value, False, size, buffer)
    one.send(frame.data)
    place = other.next(VALUE)
    other.wait(lambda: place in other.found, 20)
    came = torch.frombuffer(other.found.pop(place), dtype=size[0])
    assert came.data_ptr() % came.element_size() == 0
    assert torch.equal(read(came, size, None), value)


def test_all_find_each_other() -> None:
    found = meet(3)
    for rank, others in enumerate(found):
        assert sorted(others) == [other for other in range(3) if other != rank]
        for other, peer in others.items():
            peer.write(f"from {rank} to {other}".encode())
    for rank, others in enumerate(found):
        for other, peer in others.items():
            assert hear(peer).decode() == f"from {other} to {rank}"


def test_values_and_letters_are_numbered_apart(pair: tuple[TcpPeer, TcpPeer]) -> None:
    here, there = pair
    values = [torch.randn(3, 2, dtype=torch.float64) for _ in range(3)]
    for number, value in enumerate(values):
        here.write(b"letter %d" % number)
        frame = here.frame(SIZE)
        assert frame is not None
        seal(value, number == 1, SIZE, frame.tensor(SIZE))
        here.send(frame.data)
    places = [there.next(VALUE) for _ in values]
    for number in (2, 0, 1):  # values are not taken in the order in which they come
        there.wait(lambda place=places[number]: place in there.found, 20)
        found = read(torch.frombuffer(there.found.pop(places[number]), dtype=torch.float64), SIZE, None)
        torch.testing.assert_close(found.detach(), values[number], rtol=0, atol=0)
        assert found.requires_grad == (number == 1)
    there.next(LETTER)  # who was to hear it was interrupted
    assert [hear(there), hear(there)] == [b"letter 1", b"letter 2"]


def test_large_values_go_another_way(pair: tuple[TcpPeer, TcpPeer]) -> None:
    assert pair[0].frame((torch.uint8, (SMALL,))) is None
    assert pair[0].frame((torch.uint8, (SMALL // 2,))) is not None


def test_who_sends_much_does_not_wait(pair: tuple[TcpPeer, TcpPeer]) -> None:
    """Both send more than the system takes, before either reads; it comes while they do other things."""
    data = torch.randint(256, (MUCH,), dtype=torch.uint8).numpy().tobytes()
    for peer in pair:
        peer.write(data)
        peer.write(b"after it")
        assert not peer.sent()
    for peer in pair:
        assert hear(peer) == data
        assert hear(peer) == b"after it"
    for peer in pair:
        peer.wait(peer.sent, 20)


def test_who_waits_is_woken(pair: tuple[TcpPeer, TcpPeer]) -> None:
    here, there = pair

    def answer() -> None:
        for _ in range(30):
            there.write(b"to " + hear(there))

    thread = threading.Thread(target=answer)
    thread.start()
    for number in range(30):
        if number % 10 == 0:
            time.sleep(0.01)  # the other one sleeps
        here.write(b"question %d" % number)
        assert hear(here) == b"to question %d" % number
    thread.join()


def test_nothing_comes(pair: tuple[TcpPeer, TcpPeer]) -> None:
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="timed out"):
        hear(pair[0], 0.05)
    assert 0.05 <= time.monotonic() - began < 5


def test_the_other_closes(pair: tuple[TcpPeer, TcpPeer]) -> None:
    here, there = pair
    there.write(b"last words")
    there.close("2 is gone")
    assert hear(here) == b"last words"
    with pytest.raises(RuntimeError, match="closed its connection"):
        hear(here)
    assert here.closed == "2 is gone"


def test_the_other_ends(pair: tuple[TcpPeer, TcpPeer]) -> None:
    here, there = pair
    there.write(b"last words")
    here.write(bytes(MUCH))  # which the other one never reads
    there.connection.shutdown(socket.SHUT_RDWR)
    there.connection.close()
    with pytest.raises(RuntimeError, match="closed its connection"):
        here.wait(lambda: False, 20)
    with pytest.raises(RuntimeError, match="closed its connection"):
        write_on(here)


def test_an_interrupt_in_the_middle_of_a_message(
    pair: tuple[TcpPeer, TcpPeer], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = pair

    def interrupt(_: TcpPeer) -> None:
        raise KeyboardInterrupt

    there.write(b"half read")
    with monkeypatch.context() as patch:
        patch.setattr(TcpPeer, "_take", interrupt)
        with pytest.raises(KeyboardInterrupt):
            hear(here)
    with pytest.raises(RuntimeError, match="interrupt has come in the middle"):
        hear(here)
    with pytest.raises(RuntimeError, match="interrupt has come in the middle"):
        here.write(b"no more")


def test_strangers_are_not_let_in() -> None:
    store = HashStore()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(connect, store, 0, 2, LIMIT, 0.0)
        _, host, port, _ = store.get("tcp/0").decode().split()
        for said in (b"", bytes(20), bytes(40)):
            with socket.create_connection((host, int(port)), 20) as stranger:
                stranger.sendall(said)
        second = connect(store, 1, 2, LIMIT, 0.0)
        first.result()[1].write(b"a rank")
        assert hear(second[0]) == b"a rank"


def test_one_that_cannot_be_reached() -> None:
    store = HashStore()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    store.set("tcp/0", f"elsewhere 127.0.0.1 {port} {'00' * 16}")
    with pytest.raises(OSError, match=f"rank 0 at 127.0.0.1, port {port}: "):
        connect(store, 1, 2, LIMIT, 0.0)


def test_the_network_card(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address_of("lo") == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with serve(1) as server:
        assert server.getsockname()[0] == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none7")
    with pytest.raises(OSError, match="the network card 'none7' of GLOO_SOCKET_IFNAME has no IPv4 address"):
        serve(1)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(socket, "gethostname", lambda: "no.such.host.invalid")
    with serve(1) as server:
        assert server.getsockname()[0] == "127.0.0.1"
