"""A call's copies share what they can, keep nothing of the module alive, and take leaves as they are."""

import copy
import gc
import pickle
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purestep as ps
from purestep import optim, torch_private
from purestep.nn import hooks
from tests.module_kinds import D, FunctionModule, linear

Batch = dict[str, Tensor]


def count_rows(microbatch: Batch) -> Tensor:
    return torch.ones(len(microbatch["x"]))


def doubled_by_a_hook(module: Any, x: Tensor) -> Tensor:
    """Registers a hook on a layer, calls the layer, and removes the hook."""
    handle = module.layer.register_forward_hook(lambda layer, args, output: 2 * output)
    output: Tensor = module.layer(x)
    handle.remove()
    return output


@pytest.mark.parametrize("is_eval", [False, True])
def test_a_module_registers_hooks_in_each_call(is_eval: bool) -> None:
    module: Any = FunctionModule(doubled_by_a_hook, layer=linear())
    params, apply = ps.from_module(module)
    apply = apply.eval if is_eval else apply
    x = torch.ones(1, D)
    for _ in range(3):
        assert torch.equal(apply(params, x), 2 * module.layer(x))


def test_a_hook_that_stays_is_gone_after_the_call() -> None:
    calls: list[str] = []

    def run(module: Any, x: Tensor) -> Any:
        module.layer.register_forward_pre_hook(lambda *args: calls.append("called"))
        return module.layer(x)

    module: Any = FunctionModule(run, layer=linear())
    params, apply = ps.from_module(module)
    for _ in range(3):
        apply(params, torch.ones(1, D))
    module.layer(torch.ones(1, D))
    assert len(calls) == 3


def test_a_later_call_of_another_kind_registers_hooks() -> None:
    """Such as transformers' ``output_hidden_states=True``: all calls of a new kind can."""

    def run(module: Any, x: Tensor, doubled: bool = False) -> Any:
        return doubled_by_a_hook(module, x) if doubled else module.layer(x)

    module: Any = FunctionModule(run, layer=linear())
    params, apply = ps.from_module(module)
    x = torch.ones(1, D)
    for is_doubled in (False, False, True, True, False):
        expected = module.layer(x) * (2 if is_doubled else 1)
        assert torch.equal(apply(params, x, is_doubled), expected)


def test_hooks_that_the_first_call_did_not_register_are_refused() -> None:
    def run(module: Any, x: Tensor) -> Any:
        return module.layer(x) if len(x) == 1 else doubled_by_a_hook(module, x)

    module: Any = FunctionModule(run, layer=linear())
    params, apply = ps.from_module(module)
    apply(params, torch.ones(1, D))
    with pytest.raises(ValueError, match=r"registers a hook .* before from_module"):
        apply(params, torch.ones(2, D))
    assert len([*hooks.find_empty_dicts(module.layer)]) == 11


def test_a_layer_that_a_call_copies_takes_hooks() -> None:
    def run(module: Any, x: Tensor) -> Any:
        twin = copy.deepcopy(module.layer) if len(x) == 2 else module.layer
        if len(x) == 2:
            twin.register_forward_hook(lambda layer, args, output: 2 * output)
        return twin(x)

    module: Any = FunctionModule(run, layer=linear())
    params, apply = ps.from_module(module)
    apply(params, torch.ones(1, D))
    two = torch.ones(2, D)
    assert torch.equal(apply(params, two), 2 * module.layer(two))


def test_copies_share_the_dicts_of_hooks() -> None:
    """At all calls but the first, and but those of a module that has hooks."""
    seen: list[list[Any]] = []

    def run(module: Any, x: Tensor) -> Any:
        seen.append([])
        for value in vars(module.layer).values():
            if isinstance(value, OrderedDict):
                seen[-1].append(value)
        return module.layer(x)

    params, apply = ps.from_module(FunctionModule(run, layer=linear()))
    for _ in range(3):
        apply(params, torch.ones(1, D))
    own, shared, again = seen
    assert {type(value) for value in own} == {OrderedDict}
    assert {type(value) for value in shared} == {hooks.NoHooks}
    assert [id(value) for value in shared] == [id(value) for value in again]


@pytest.mark.parametrize(
    "make",
    [
        linear,
        lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0),
        lambda: nn.LSTM(4, 4),
    ],
)
def test_the_memory_of_a_module_that_is_gone_is_free(make: Any) -> None:
    """``from_module(Model())`` takes params once: the module's own do not stay behind."""
    module = make()
    parameters = [weakref.ref(parameter) for parameter in module.parameters()]
    width = next(module.parameters()).shape[-1]
    params, apply = ps.from_module(module)
    apply(params, torch.ones(2, 3, width))
    del module
    gc.collect()
    assert [parameter() for parameter in parameters] == [None] * len(parameters)
    apply(params, torch.ones(2, 3, width))


def test_another_process_takes_apply() -> None:
    params, apply = ps.from_module(nn.Linear(D, D))
    x = torch.ones(1, D)
    twin = pickle.loads(pickle.dumps(apply))
    assert torch.equal(twin(params, x), apply(params, x))
    assert torch.equal(twin.eval(params, x), apply(params, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_hands_its_leaves_to_the_module(dtype: torch.dtype) -> None:
    """Each is an ``nn.Parameter`` to the module, and no alias, which is one more node to go through."""
    seen: list[Any] = []

    def run(module: Any, x: Tensor) -> Any:
        seen.append(module.layer.weight)
        return module.layer(x)

    params, apply = ps.from_module(FunctionModule(run, layer=linear().to(dtype)))
    leaves: list[Tensor] = []

    def loss_fn(p: Any, m: Batch) -> Any:
        leaves.append(p["layer.weight"])
        return apply(p, m["x"]).square().sum(-1)

    group = [{"x": torch.ones(1, D, dtype=dtype)}] * 2
    ps.accumulate(loss_fn, params, group, weight_fn=count_rows)
    for leaf, weight in zip(leaves, seen, strict=True):
        assert weight is leaf
        assert isinstance(weight, nn.Parameter)
        assert weight.is_leaf
    assert leaves[0] is not leaves[1]
    assert not isinstance(params["layer.weight"], nn.Parameter)


def test_autocast_casts_a_tied_weight_once_in_a_microbatch() -> None:
    """Its cache holds casts of leaves alone, so that of an alias would be made at each use."""
    layer = nn.Linear(5, 5, bias=False)
    params, apply = ps.from_module(nn.Sequential(layer, nn.Tanh(), layer))

    def loss_fn(p: Any, m: Batch) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return apply(p, m["x"]).float().sum(-1)

    optimizer = optim.sgd(0.1)
    step = ps.make_update_step(loss_fn, optimizer, weight_fn=count_rows)
    group = [{"x": torch.ones(2, 5)}] * 3
    state = step(params, optimizer.init(params), group)[:2]
    casts: list[Any] = []

    def look(operation: Any, args: Any, kwargs: Any) -> None:
        if kwargs.get("dtype") == torch.bfloat16 and args[0].shape == (5, 5):
            casts.append(operation)

    with torch_private.watch_operations(look):
        step(*state, group)
    assert len(casts) == 3
