"""Modules under a compiler: one graph where it can be, and right in pieces."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref

import pytest
import torch

import purestep as ps
from tests.modules import MODULES, Broken, assert_equal, close, data, made, train

COMPILED = {*MODULES} - {"self-referring", "hooked", "patched"}
"""But objects that lead back to the module in their own ways, and hooks."""


@pytest.mark.parametrize("name", sorted(COMPILED))
def test_compiled_it_is_one_graph(name: str) -> None:
    """And the module is as it was, though a compiler swaps tensors in a skeleton that it keeps."""
    torch.compiler.reset()
    module, x = made(name), data()
    params, apply = ps.from_module(module)
    before = [id(p) for p in module.parameters()]
    compiled = torch.compile(lambda p, x: apply(p, x), backend="eager", fullgraph=True)
    for scale in (1, 2):
        there = {name: scale * p for name, p in params.items()}
        assert torch.equal(compiled(there, x), apply(there, x))
    assert [id(p) for p in module.parameters()] == before
    last = weakref.ref(there.pop(next(iter(params))))
    gc.collect()
    assert last() is None  # It is not kept there either.


@pytest.mark.parametrize("name", ["tied", "checkpointed"])
def test_steps_compiled_and_donated(name: str) -> None:
    torch.compiler.reset()
    params, apply = ps.from_module(made(name))
    plain = train(apply, params)
    assert_equal(train(apply, params, donate=True), plain)
    assert close(train(apply, params, compile=True), plain)
    if name == "tied":  # torch.func, which is in the whole step's graph, knows no checkpoints.
        assert close(train(apply, params, whole=True, donate=True), plain)
    assert_equal(plain, train(apply, params))


def test_without_a_graph_it_is_right() -> None:
    """Where a compiler gives up, nothing is swapped: checkpoints and threads find their own params."""
    torch.compiler.reset()
    params, apply = ps.from_module(Broken().double())
    with pytest.warns(UserWarning, match="cannot make one graph"):
        eager = train(apply, params, compile=True)
    assert close(eager, train(apply, params))


def test_threads_do_not_meet_in_compiled_pieces() -> None:
    torch.compiler.reset()
    params, apply = ps.from_module(Broken().double())
    compiled = torch.compile(lambda p, x: apply(p, x), backend="eager")
    compiled(params, data())
    wrong: list[int] = []

    def run(rank: int) -> None:
        mine = {name: p * rank for name, p in params.items()}
        right = apply(mine, data())
        wrong.extend(rank for _ in range(100) if not torch.equal(compiled(mine, data()), right))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_hooks_on_the_backward_pass_are_not_compiled() -> None:
    torch.compiler.reset()
    module = made("hooked")
    params, apply = ps.from_module(module)
    plain = train(apply, params)
    whole = torch.compile(lambda p, x: apply(p, x), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="leaves hooks on a module's backward pass out"):
        whole(params, data())
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        compiled = train(apply, params, compile=True)
    assert close(compiled, plain)
    with pytest.raises(RuntimeError, match="setup_context"):  # torch's own words
        torch.func.grad(lambda p: apply(p, data()).sum())(params)
