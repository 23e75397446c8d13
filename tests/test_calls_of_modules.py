"""Each call of ``apply`` is one of its own: nothing of it stays in the module, in the next call or in memory."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import purestep as ps
from tests.modules import D, Params, assert_equal, close, data, grads, made, train
from tests.torch_internals import forward_hooks


@pytest.mark.parametrize("name", ["self-referring", "checkpointed", "tied"])
def test_threads_do_not_meet(name: str) -> None:
    """Ranks with params of their own, all at once through one ``apply``."""
    params, apply = ps.from_module(made(name))
    ranks = [{name: p * (1 + rank) for name, p in params.items()} for rank in range(4)]
    wanted = [grads(apply, mine, data()) for mine in ranks]
    axis = ps.testing.ThreadAxis(4)
    for _ in range(10):
        for given, right in zip(
            axis.map(lambda p: grads(apply, p, data()))(ranks), wanted, strict=True
        ):
            assert_equal(given, right)


def test_nothing_is_kept_of_a_call() -> None:
    """Neither its params nor its module, once the output is gone: no cycle is left for the garbage collector."""
    params, apply = ps.from_module(made("checkpointed"))
    mine = {name: p.clone().requires_grad_() for name, p in params.items()}
    output = apply(mine, data())
    last = weakref.ref(mine["a.weight"])
    mine.clear()
    assert last() is not None
    output.sum().backward()
    del output
    assert last() is None


class Recording(nn.Module):
    """Registers its hook where it is first called, as transformers does for ``output_hidden_states``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.recording, self.calls = nn.Linear(D, D), False, 0

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        if not self.recording:
            self.a.register_forward_hook(self.count, with_kwargs=True)
            self.recording = True
        return self.a(x), self.calls

    def count(self, *_: Any) -> None:
        self.calls += 1


def test_hooks_that_a_call_registers_do_not_stay() -> None:
    module = Recording().double()
    params, apply = ps.from_module(module)
    assert [apply(params, data())[1] for _ in range(3)] == [1, 1, 1]
    assert module.calls == forward_hooks(module) == 0


class Counting(nn.Module):
    """What it gives depends on how often it has been called."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.calls, self.log = nn.Linear(D, D), 0, [1]
        self.nested, self.tensor = {"a": [1]}, torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.log.append(1)
        self.nested["a"].append(1)
        self.tensor = self.tensor + 1
        self.seen = getattr(self, "seen", 0) + 1
        times = self.calls * len(self.log) * len(self.nested["a"]) * self.tensor * self.seen
        output: Tensor = self.a(x) * times
        return output


@pytest.mark.parametrize("settings", [{}, {"compile": True}, {"whole": True}], ids=str)
def test_what_a_call_leaves_behind_is_not_there_in_the_next(settings: Any) -> None:
    torch.compiler.reset()
    module = Counting().double()
    params, apply = ps.from_module(module)
    x = data()

    def four(p: Params, x: Tensor) -> Tensor:
        return functional.linear(x, p["a.weight"], p["a.bias"]) * 8

    assert close(train(apply, params, **settings), train(four, params))
    assert torch.equal(apply(params, x), apply(params, x))
    assert (module.calls, module.log, module.nested) == (0, [1], {"a": [1]})
    assert module.tensor == 1
    assert not hasattr(module, "seen")


class Writing(nn.Module):
    def __init__(self, registered: bool) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)
        count = torch.ones(())
        if registered:
            self.register_buffer("count", count)
        else:
            self.count = count

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.a(x) * self.count.add_(1)
        return output


@pytest.mark.parametrize("settings", [{}, {"compile": True}], ids=str)
@pytest.mark.parametrize(("registered", "kind"), [(True, "buffer"), (False, "tensor")])
def test_a_module_that_writes_to_its_tensors(registered: bool, kind: str, settings: Any) -> None:
    """Is refused before it has done so."""
    torch.compiler.reset()
    module = Writing(registered).double()
    params, apply = ps.from_module(module)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"writes to its {kind} count: "):
            train(apply, params, **settings)
    with pytest.raises(ValueError, match="writes to its buffer or other tensor"):
        torch.func.grad(lambda p: apply(p, data()).sum())(params)
    assert module.count == 1


class Config:
    def __init__(self) -> None:
        self.widths = [D, D]


class Configured(nn.Module):
    """Shares a list with an object that is not the module's, and has hooks that no call runs."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.widths = self.config.widths
        self.a = nn.Linear(self.widths[0], self.widths[1])
        self.register_load_state_dict_pre_hook(self.hook)
        self.register_load_state_dict_post_hook(self.hook)
        self.register_state_dict_pre_hook(self.hook)

    def hook(self, *_: Any) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        self.widths.append(1)
        output: Tensor = self.a(x) * len(self.widths)
        return output


def test_containers_that_others_hold_too() -> None:
    module = Configured().double()
    params, apply = ps.from_module(module)
    first = apply(params, data())
    assert torch.equal(apply(params, data()), first)
    assert module.widths == [D, D]
    assert torch.equal(module(data()), first)
