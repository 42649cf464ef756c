"""Offloaded activations: what is moved, how much is held at a time, and unchanged gradients.

tests/unit/engine/test_cuda.py tests the streams.
"""

from __future__ import annotations

import pytest
import torch

from cookbook.engine import offload
from cookbook.engine.offload import offloading

CPU = torch.device("cpu")
WIDTH, LAYERS = 64, 6
ROW = 4 * WIDTH * WIDTH  # bytes of one activation


@pytest.fixture
def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


@pytest.fixture
def copies(monkeypatch):
    """Bytes of every copy, in order: away positive, back negative."""
    sizes: list[int] = []

    class Counted(offload._Copier):
        def away(self, there):
            sizes.append(there.nbytes)
            return super().away(there)

        def back(self, away):
            sizes.append(-away.nbytes)
            return super().back(away)

    monkeypatch.setattr(offload, "_Copier", Counted)
    return sizes


def run(network, x, **options):
    """Value and gradients of a deep function, with what it saves offloaded."""
    network.zero_grad()
    with offloading(network.parameters(), CPU, **options):
        for layer in network:
            x = torch.tanh(layer(x)) * x  # its input is saved three times, the result of tanh twice
        loss = x.sum()
    loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in network.parameters()]


@pytest.mark.parametrize("window", [0, ROW, 5 * ROW, 1 << 30])
def test_gradients_are_the_same_to_the_bit(network, window):
    x = torch.randn(WIDTH, WIDTH)
    expected = run(network, x, least_bytes=1 << 30)
    found = run(network, x, window_bytes=window, least_bytes=0)
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(*pair) for pair in zip(found[1], expected[1], strict=True))


def test_every_storage_goes_once_and_weights_stay(network, copies):
    run(network, torch.randn(WIDTH, WIDTH), window_bytes=0, least_bytes=0)
    saved = [ROW] * (2 * LAYERS)  # the input and tanh of every layer
    assert [size for size in copies if size > 0] == saved
    assert [-size for size in copies if size < 0] == saved


def test_what_is_in_the_window_is_not_copied_back(network, copies):
    run(network, torch.randn(WIDTH, WIDTH), window_bytes=3 * ROW, least_bytes=0)
    assert sum(size < 0 for size in copies) == 2 * LAYERS - 3
    copies.clear()
    run(network, torch.randn(WIDTH, WIDTH), least_bytes=ROW + 1)
    assert copies == []  # too small to be worth it


def test_it_is_fetched_before_it_is_asked_for(network, copies):
    """During the backward pass of a layer, the window holds the next layers, up to its size."""
    fetched = []
    with offloading(network.parameters(), CPU, window_bytes=2 * ROW, least_bytes=0):
        x = torch.randn(WIDTH, WIDTH)
        for layer in network:
            x = torch.tanh(layer(x)) * x
            x.register_hook(lambda _: fetched.append(sum(size < 0 for size in copies)))
        loss = x.sum()
    loss.backward()
    assert fetched == [0, 2, 4, 6, 8, 10]  # before a layer goes backward: all of the layers behind it, less the window


def test_views_and_writes_are_told_apart():
    """Two halves of one storage, strided, and a storage that was written to between two savings."""
    x = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
    with offloading([], CPU, window_bytes=0, least_bytes=0):
        y = x * 2
        left, right = y[:, ::2], y[:, 1::2].t()
        first = (left * left).sum() + (right.exp() * right).sum()
        z = torch.zeros(8, 6, dtype=torch.float64)
        second = (x * z).sum()  # its slope by x is what z was
        z.add_(1.0)
        third = (x * z).sum()
        loss = first + second + third
    loss.backward()
    even, odd = 2 * x.detach()[:, ::2], 2 * x.detach()[:, 1::2]
    expected = torch.ones_like(x)
    expected[:, ::2] += 4 * even
    expected[:, 1::2] += 2 * odd.exp() * (1 + odd)
    assert torch.allclose(x.grad, expected, rtol=1e-12)


def test_a_graph_that_is_kept_gives_the_same_gradient_twice(network):
    x = torch.randn(WIDTH, WIDTH)
    with offloading(network.parameters(), CPU, window_bytes=ROW, least_bytes=0):
        loss = network(x).square().sum()
    first = torch.autograd.grad(loss, list(network.parameters()), retain_graph=True)
    again = torch.autograd.grad(loss, list(network.parameters()))
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))


def test_a_write_before_the_copy_is_sure_to_be_done_is_an_error():
    """autograd raises this error too, but cannot check tensors that saved-tensor hooks have replaced."""
    x = torch.ones(8, 6, requires_grad=True)
    with offloading([], CPU, least_bytes=0):
        z = torch.zeros(8, 6)
        loss = (x * z).sum()
        z.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_window_is_the_newest_passs(network, copies):
    """Two graphs are kept: the first graph gives up its window, so its backward pass loads all of its storages again."""
    x, losses = torch.randn(WIDTH, WIDTH), []
    for _ in range(2):
        with offloading(network.parameters(), CPU, window_bytes=100 * ROW, least_bytes=0):
            losses.append(network(x).square().sum())
    losses[1].backward()
    assert sum(size < 0 for size in copies) == 0
    losses[0].backward()
    assert sum(size < 0 for size in copies) == sum(size > 0 for size in copies) / 2
