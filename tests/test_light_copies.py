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


def doubled_in_a_copy(module: Any, x: Tensor) -> Tensor:
    """Registers a hook on a copy of a layer."""
    twin = copy.deepcopy(module.layer)
    twin.register_forward_hook(lambda layer, args, output: 2 * output)
    return twin(x)


@pytest.mark.parametrize("run", [doubled_by_a_hook, doubled_in_a_copy])
@pytest.mark.parametrize(
    "transfer",
    [copy.copy, copy.deepcopy, lambda apply: pickle.loads(pickle.dumps(apply))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_copies_of_apply_register_hooks_for_one_call(run: Any, transfer: Any) -> None:
    module: Any = FunctionModule(run, layer=linear())
    params, apply = ps.from_module(module)
    x = torch.ones(1, D)
    expected = 2 * module.layer(x)
    assert torch.equal(apply(params, x), expected)
    for other in (transfer(apply), transfer(apply.eval), apply):
        for _ in range(3):
            assert torch.equal(other(params, x), expected)


def test_a_module_registers_hooks_in_calls_of_many_kinds() -> None:
    def run(module: Any, x: Tensor, kind: str) -> Any:
        return doubled_by_a_hook(module, x) if kind == "20" else module.layer(x)

    module: Any = FunctionModule(run, layer=linear())
    params, apply = ps.from_module(module)
    x = torch.ones(1, D)
    for kind in range(22):
        apply(params, x, str(kind))
    assert torch.equal(apply(params, x, "20"), 2 * module.layer(x))


class Recorder(nn.Module):
    """Fills a dict whose name is like those of torch's dicts of hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.my_hooks: OrderedDict[str, Any] = OrderedDict()

    def forward(self, x: Tensor) -> Any:
        self.my_hooks["seen"] = x
        return self.layer(x) * len(self.my_hooks)


class Watcher(nn.Module):
    """Looks at a layer's hooks through another reference to their dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.hooks = [vars(self.layer)["_forward_hooks"]]

    def forward(self, x: Tensor) -> Any:
        handle = self.layer.register_forward_hook(lambda *args: None)
        number = len(self.hooks[0])
        handle.remove()
        return self.layer(x) * number


@pytest.mark.parametrize("make", [Recorder, Watcher])
def test_dicts_that_are_more_than_hooks_are_copied(make: Any) -> None:
    module = make()
    params, apply = ps.from_module(module)
    x = torch.ones(1, D)
    for _ in range(3):
        assert torch.equal(apply(params, x), module.layer(x))
    assert not vars(module.layer)["_forward_hooks"]


class Base:
    """Takes an argument, which ``call_super_init`` hands on."""

    def __init__(self, size: int = 0, *, name: str) -> None:
        self.name = name


class Named(nn.Module, Base):
    """Says how to pickle itself, for which it has to be complete."""

    call_super_init = True

    def __init__(self) -> None:
        super().__init__(name="named")
        self.layer = linear()

    def __getstate__(self) -> Any:
        return {**vars(self), "layer": self.layer}

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


def test_a_module_with_another_base_is_split_and_pickled() -> None:
    params, apply = ps.from_module(Named())
    x = torch.ones(1, D)
    twin = pickle.loads(pickle.dumps(apply))
    assert torch.equal(twin(params, x), apply(params, x))


@pytest.mark.parametrize("alias", [Tensor.detach, Tensor.t, lambda weight: weight.data])
@pytest.mark.parametrize("transfer", [lambda apply: apply, copy.copy])
def test_a_call_with_an_alias_of_a_module_that_is_gone_is_refused(
    alias: Any, transfer: Any
) -> None:
    layer = linear()
    kept = alias(layer.weight)
    module: Any = FunctionModule(lambda module, x: module.layer(x) @ kept, layer=layer)
    params, apply = ps.from_module(module)
    del layer, module
    with pytest.raises(ValueError, match=r"computes with layer\.weight of the module"):
        transfer(apply)(params, torch.ones(1, D))
    with pytest.raises(ValueError, match=r"computes with layer\.weight of the module"):
        apply(params, torch.ones(1, D))


def test_a_module_is_converted_by_swapping_after_it_was_split() -> None:
    """As torch converts modules on DTensors: no weak reference to a parameter may be left."""
    module = linear()
    params, apply = ps.from_module(module)
    setting = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(setting)
    assert module.weight.dtype == torch.float64
    assert apply(params, torch.ones(1, D)).dtype == torch.float32


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
    holder = nn.Linear(D, D)

    def loss_fn(p: Any, m: Batch) -> Any:
        leaves.append(p["layer.weight"])
        # To the loss itself it is a tensor, as under a compiler.
        assert not isinstance(p["layer.weight"], nn.Parameter)
        with pytest.raises(TypeError, match="cannot assign"):
            holder.weight = p["layer.weight"]
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
