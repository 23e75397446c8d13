"""``from_module``: the module's own outputs and gradients, to the bit, the module as it was; what is refused by name."""

import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import purestep as ps
from tests import module_kinds
from tests.module_kinds import (
    D,
    FunctionModule,
    Params,
    assert_equal,
    draw_inputs,
    grads,
    is_close,
    linear,
    make_module,
    squared_losses,
    train_three_steps,
)


def identities_in(module: nn.Module) -> list[Any]:
    """Lists the identity of each attribute, and of the entries of its dict or list."""
    identities: list[Any] = []
    for key, value in vars(module).items():
        identities.append((key, id(value)))
        if isinstance(value, dict):
            entries: Any = value.items()
        elif isinstance(value, list):
            entries = enumerate(value)
        else:
            entries = []
        identities += [(name, id(entry)) for name, entry in entries]
    return identities


def look(module: nn.Module) -> list[Any]:
    """Lists all that can be seen of a module, by identity, and its values."""
    values = [tensor.tolist() for tensor in module.state_dict().values()]
    return values + [identities_in(submodule) for submodule in module.modules()]


@pytest.mark.parametrize("name", module_kinds.MODULES)
def test_gradients_are_the_modules_own(name: str) -> None:
    module = make_module(name)
    x = draw_inputs()
    before = look(module)
    params, apply = ps.from_module(module)

    ours = grads(apply, params, x)

    assert look(module) == before
    assert all(p.grad is None for p in module.parameters())
    for param in params.values():
        assert not param.requires_grad
        assert type(param) is Tensor
    assert_equal(ours, module_kinds.backward(module, x))


NO_BATCH_RULES = ("LSTM", "attention", "parametrized")
"""Modules with operations for which torch has no rules under vmap and jvp."""


@pytest.mark.parametrize("name", ["self-referring", "tied", *NO_BATCH_RULES])
def test_transforms(name: str) -> None:
    module = make_module(name)
    x = draw_inputs()
    params, apply = ps.from_module(module)

    def loss(p: Any) -> Tensor:
        return squared_losses(apply(p, x)).sum()

    grad = torch.func.grad(loss)
    slopes = grad(params)
    expected = module_kinds.backward(module, x)
    assert is_close(slopes, {n: g for n, g in expected.items() if n in params})
    if name in NO_BATCH_RULES:
        return

    stacked = {name: torch.stack([p, 2 * p]) for name, p in params.items()}
    batched = torch.vmap(grad)(stacked)
    for index in (0, 1):
        member = {name: p[index] for name, p in stacked.items()}
        member_slopes = {name: g[index] for name, g in batched.items()}
        assert is_close(member_slopes, grad(member))

    tangent = torch.func.jvp(loss, (params,), (params,))[1]
    products = [(g * params[name]).sum() for name, g in slopes.items()]
    assert is_close({"": tangent}, {"": torch.stack(products).sum()})


def names_of_params(module: nn.Module, trainable: Any = None) -> list[str]:
    params, _ = ps.from_module(module, trainable=trainable)
    return list(params)


def test_tied_params_are_one() -> None:
    module = make_module("tied")
    assert names_of_params(module) == ["a.weight", "a.bias", "c.bias"]
    assert names_of_params(module, "c.weight") == ["a.weight"]
    message = r"trainable='\*\.wight' .* a\.weight, a\.bias, "
    with pytest.raises(ValueError, match=message):
        ps.from_module(module, trainable="*.wight")


def test_trainable_chooses_params() -> None:
    module = make_module("checkpointed")
    trained = ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert names_of_params(module) == trained
    biases = ["a.bias", "b.bias", "frozen.bias"]
    assert names_of_params(module, "*.bias") == biases


def test_params_that_are_not_chosen_stay_the_modules() -> None:
    module = make_module("checkpointed")

    def is_matrix_of_b(name: str, p: Tensor) -> bool:
        return p.ndim == 2 and "b" in name

    params, apply = ps.from_module(module, trainable=is_matrix_of_b)
    assert list(params) == ["b.weight"]

    def apply_to_products(p: Any, x: Tensor) -> Any:
        """Passes tensors that autograd has computed, no leaves."""
        return apply({name: 1 * leaf for name, leaf in p.items()}, x)

    expected = module_kinds.backward(module, draw_inputs())["b.weight"]
    for fn in (apply, apply_to_products):
        assert torch.equal(grads(fn, params, draw_inputs())["b.weight"], expected)


def test_evaluation() -> None:
    module = nn.Sequential(linear(), nn.BatchNorm1d(6), nn.Dropout(0.5)).double()
    module[1].eval()
    params, apply = ps.from_module(module)

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return squared_losses(apply.eval(p, x))

    output = apply.eval(params, draw_inputs())
    evaluate = ps.make_eval_step(loss_fn, weight_fn=module_kinds.ones)
    loss = evaluate(params, [draw_inputs()]).loss

    with torch.no_grad():
        expected = module.eval()(draw_inputs())
    assert torch.equal(output, expected)
    assert torch.equal(loss, squared_losses(expected).sum() / 4)
    assert apply.eval.eval is apply.eval


def test_params_are_written_back() -> None:
    module = make_module("tied")
    params, apply = ps.from_module(module)
    doubled = {name: 2 * p for name, p in params.items()}
    pointers = [p.data_ptr() for p in module.parameters()]

    ps.to_module(doubled, module)
    assert torch.equal(module(draw_inputs()), apply(doubled, draw_inputs()))

    ps.to_module({"c.bias": params["c.bias"]}, module)
    assert torch.equal(module.c.bias, params["c.bias"])
    assert torch.equal(module.a.weight, doubled["a.weight"])
    assert [p.data_ptr() for p in module.parameters()] == pointers


def test_params_that_do_not_fit_are_not_written() -> None:
    module = make_module("tied")
    params, _ = ps.from_module(module)
    doubled = {name: 2 * p for name, p in params.items()}
    too_short = params["c.bias"][:1]

    with pytest.raises(ValueError, match="has other, which this module has not"):
        ps.to_module({"other": draw_inputs()}, module)
    message = r"c\.bias is .* of shape \(1,\), and the module's is tor"
    with pytest.raises(ValueError, match=message):
        ps.to_module({**doubled, "c.bias": too_short}, module)
    assert torch.equal(module.a.bias, params["a.bias"])


def test_params_on_meta_are_not_written() -> None:
    module = linear()
    params, _ = ps.from_module(module)
    weight = torch.ones_like(params["weight"])
    bias = params["bias"].to("meta")
    with pytest.raises(ValueError, match="bias is on the meta device"):
        ps.to_module(
            {"weight": weight, "bias": bias},
            module,
        )
    assert torch.equal(module.weight, params["weight"])

    module.to("meta")
    message = r"weight of the module is on the meta device.* module\.to_empty"
    with pytest.raises(ValueError, match=message):
        ps.to_module({"weight": weight}, module)


SHARD = ps.Shard(torch.ones(D), ps.VmapAxis(1), (D,))
NOT_WRITTEN: list[tuple[Any, type[Exception], str]] = [
    (
        3.0,
        TypeError,
        "is 3.0, no tensor",
    ),
    (
        None,
        TypeError,
        "is None, no tensor",
    ),
    (
        SHARD,
        ValueError,
        "is a shard over",
    ),
]


@pytest.mark.parametrize(("value", "error", "message"), NOT_WRITTEN)
def test_values_that_are_no_tensors_are_not_written(
    value: Any,
    error: type[Exception],
    message: str,
) -> None:
    module = nn.BatchNorm1d(D).eval()
    with pytest.raises(error, match=f"bias.* {message}"):
        ps.to_module({"bias": value}, module)
    buffers = {"running_mean": value}
    with pytest.raises(error, match=f"running_mean.* {message}"):
        ps.to_module({}, module, buffers=buffers)


def test_params_and_buffers_are_written_by_any_of_their_names() -> None:
    module = make_module("tied")
    params, _ = ps.from_module(module)
    module.a.register_buffer("n", torch.zeros(1))
    module.d = module.a
    ps.to_module({name: 2 * p for name, p in params.items()}, module)

    bias = {"d.bias": params["a.bias"]}
    ps.to_module(bias, module, buffers={"d.n": torch.ones(1)})

    assert torch.equal(module.a.n + module.a.bias, 1 + params["a.bias"])


def grads_of_two_calls(name: str) -> Params:
    """Differentiates a product of two calls, with a third call before the backward pass."""
    params, apply = ps.from_module(make_module(name))
    one = {name: p.clone().requires_grad_() for name, p in params.items()}
    two = {name: (2 * p).requires_grad_() for name, p in params.items()}
    first = squared_losses(apply(one, draw_inputs())).sum()
    second = squared_losses(apply(two, draw_inputs())).sum()

    apply({name: 3 * p for name, p in one.items()}, draw_inputs())
    (first * second).backward()

    result: Params = {}
    for index, leaves in enumerate((one, two)):
        for name, leaf in leaves.items():
            assert leaf.grad is not None
            result[f"{name} {index}"] = leaf.grad
    return result


def test_checkpoints_compute_again_with_the_params_of_their_call() -> None:
    """Also when ``apply`` is called with others before the backward pass."""
    checkpointed = grads_of_two_calls("checkpointed")
    kept = grads_of_two_calls("kept")
    assert_equal(checkpointed, kept)


@pytest.mark.parametrize(
    "name",
    [
        "collections",
        "tied",
        "parametrized",
        "attention",
        "keeping",
        "helped",
        "decorated",
        "checkpointed",
    ],
)
def test_a_compiled_module_is_one_graph(name: str, fresh_compiler: None) -> None:
    """But for hooks and objects that lead back to the module. It keeps neither params nor module."""
    module = make_module(name)
    x = draw_inputs()
    params, apply = ps.from_module(module)
    before = [id(p) for p in module.parameters()]
    compiled = module_kinds.trace(apply)

    for scale in (1, 2):
        scaled = {name: scale * p for name, p in params.items()}
        assert torch.equal(compiled(scaled, x), apply(scaled, x))

    assert [id(p) for p in module.parameters()] == before
    first_name = next(iter(params))
    first_param = weakref.ref(scaled.pop(first_name))
    gc.collect()
    assert first_param() is None


@pytest.mark.parametrize("name", ["tied", "decorated", "checkpointed"])
def test_steps_compiled_and_donated(name: str, fresh_compiler: None) -> None:
    """Leaves the module as it is."""
    params, apply = ps.from_module(make_module(name))
    plain = train_three_steps(apply, params)
    assert_equal(train_three_steps(apply, params, donate=True), plain)

    compiled = train_three_steps(
        apply, params, compile=module_kinds.AOT_EAGER, donate=True
    )

    assert is_close(compiled, plain)
    assert_equal(train_three_steps(apply, params), plain)


def test_hooks_on_the_backward_pass_are_not_compiled(fresh_compiler: None) -> None:
    params, apply = ps.from_module(make_module("hooked"))
    plain = train_three_steps(apply, params)

    message = "leaves hooks on a module's backward pass out"
    with pytest.raises(Exception, match=message):
        module_kinds.trace(apply)(params, draw_inputs())
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        compiled = train_three_steps(apply, params, compile=module_kinds.AOT_EAGER)
    assert is_close(compiled, plain)


# Modules and params that are refused


class FSDPModule:
    """Has the name of the class that ``fully_shard`` puts before a module's own."""


Sharded = type("Sharded", (FSDPModule, nn.Linear), {})
Slotted = type("Slotted", (nn.Linear,), {"__slots__": ("at",)})
SlottedActivation = type("SlottedActivation", (nn.ReLU,), {"__slots__": ("at",)})


def hooked(register: str = "register_hook") -> nn.Module:
    module = linear()
    getattr(module.weight, register)(lambda _: None)
    return module


def aliased() -> nn.Module:
    first = linear()
    second = linear()
    second.weight.data = first.weight.data[:D]
    return nn.Sequential(first, second)


def buffered() -> nn.Module:
    """Makes a buffer of a parameter."""
    module = linear()
    module.register_buffer("alias", module.weight)
    return module


def overlapping() -> nn.Module:
    """Makes parameters of which each has numbers of the other."""
    six = torch.zeros(6)
    return nn.ParameterList([six[:4], six[2:]])


def viewed() -> nn.Module:
    module = linear()
    module.kept = [module.weight.t()]
    return module


def with_param(tensor: Tensor) -> nn.Module:
    """Makes a module with this parameter ``at``, which requires grad if it is complex."""
    param = nn.Parameter(tensor, requires_grad=tensor.is_complex())
    return FunctionModule(print, a=linear(), at=param)


class Refused(NamedTuple):
    """A module that ``from_module`` refuses, and with which error."""

    make: Callable[[], Any]
    error: type[Exception]
    message: str
    trainable: Any = None


REFUSED = [
    Refused(
        lambda: nn.Sequential(nn.DataParallel(linear())),
        TypeError,
        r"Sequential\.0 is a DataParallel.* module\.module",
    ),
    Refused(
        lambda: Sharded(D, D),
        TypeError,
        r"Sharded is a FSDPModule, no plain module: pass a module that fully_shard",
    ),
    Refused(
        lambda: torch.compile(linear()),
        TypeError,
        r"is a OptimizedModule.* compile=True",
    ),
    Refused(
        lambda: Slotted(D, D),
        TypeError,
        r"^Slotted has __slots__",
    ),
    Refused(
        lambda: nn.Sequential(linear(), SlottedActivation()),
        TypeError,
        r"^Sequential\.1 has __slots__",
    ),
    Refused(
        lambda: {"w": torch.ones(1)},
        TypeError,
        r"takes an nn\.Module, got dict",
    ),
    Refused(
        hooked,
        TypeError,
        r"^weight has a hook on its gradient, .* Transform",
    ),
    Refused(
        lambda: hooked("register_post_accumulate_grad_hook"),
        TypeError,
        r"^weight has a hook on its gradient, .* Transform",
    ),
    Refused(
        aliased,
        ValueError,
        r"^[01]\.weight, which trains, shares memory with [01]\.weight, .* one Parameter",
    ),
    Refused(
        aliased,
        ValueError,
        r"^0\.weight, which trains, shares memory with 1\.weight, .* one Parameter",
        trainable="0.weight",
    ),
    Refused(
        overlapping,
        ValueError,
        r"^0, which trains, shares memory with 1, .* one Parameter",
    ),
    Refused(
        viewed,
        ValueError,
        r"^weight, which trains, shares memory with kept\[0\], .* compute kept\[0\] in forward",
    ),
    Refused(
        buffered,
        ValueError,
        r"^the buffer alias is the parameter weight, which trains: ",
    ),
    Refused(
        lambda: with_param(torch.ones(3, dtype=torch.complex64)),
        TypeError,
        r"chooses at, which is torch\.complex64 .* torch\.view_as_real\(p\)",
    ),
    Refused(
        lambda: with_param(torch.arange(3)),
        TypeError,
        r"chooses at, which is torch\.int64 .* leave it out",
        trainable="*",
    ),
    Refused(
        lambda: nn.LazyLinear(D),
        ValueError,
        r"^weight has no shape yet: call the lazy module",
    ),
    Refused(
        lambda: nn.BatchNorm1d(D, device="meta"),
        ValueError,
        r"^running_mean has no values on the meta device",
    ),
    Refused(
        linear,
        TypeError,
        r"^trainable=\['weight'\] must be a pattern",
        trainable=["weight"],
    ),
]


@pytest.mark.parametrize("case", REFUSED)
def test_refused_modules_and_params(case: Refused) -> None:
    with pytest.raises(case.error, match=case.message):
        ps.from_module(case.make(), trainable=case.trainable)


def test_memory_that_frozen_params_share_is_allowed() -> None:
    """As of RNNs on a GPU."""
    assert names_of_params(aliased(), "*.bias") == ["0.bias", "1.bias"]


def test_hooks_that_no_call_reaches_are_allowed() -> None:
    """Though they lead to the module."""
    module = linear()
    both = torch.randn(D + 1, D)
    module.weight.data = both[:D]
    module.bias.data = both[D]
    module.seen = {module}
    module.register_state_dict_pre_hook(lambda *_: module.seen.clear())

    params, apply = ps.from_module(module)

    assert torch.equal(apply(params, both), module(both))


def test_spectral_norm_is_allowed_in_evaluations() -> None:
    """Its weight is one of its parameters until a call."""
    module = nn.utils.spectral_norm(linear())
    x = torch.randn(D + 1, D)
    params, apply = ps.from_module(module)
    assert torch.equal(apply.eval(params, x), module.eval()(x))


def test_tensors_beside_a_param_that_ends_in_orig_keep_their_names() -> None:
    """They are registered, unlike a weight that ``spectral_norm`` computes."""
    module = linear()
    module.weight.requires_grad_(False)
    module.weight_orig = nn.Parameter(torch.ones(1))
    module.scale_orig = nn.Parameter(torch.ones(1))
    module.register_buffer("scale", torch.ones(1))

    params, apply = ps.from_module(module)

    assert list(params) == ["bias", "weight_orig", "scale_orig"]
    assert list(apply.frozen) == ["weight"]
    buffers = dict(module.named_buffers())
    _, after = apply(params, torch.ones(D), buffers=buffers)
    assert list(after) == ["scale"]


# Calls that are refused


def test_calls_with_other_params_or_buffers_are_refused() -> None:
    x = draw_inputs()
    params, apply = ps.from_module(module_kinds.make_batch_normed().eval())
    too_few = {"0.bias": params["0.bias"]}
    too_many = {**params, "other": x}
    no_params = cast(Any, x)

    message = r"params lacks 0\.weight, 1\.weight, 1\.bias: "
    with pytest.raises(ValueError, match=message):
        apply(too_few, x)
    message = r"params has other, which this module has not"
    with pytest.raises(ValueError, match=message):
        apply(too_many, x)
    message = r"params is a Tensor, no mapping by name: .*as in apply\(params, \.\.\.\)"
    with pytest.raises(TypeError, match=message):
        apply(no_params)
    no_buffers: Any = []
    with pytest.raises(TypeError, match="buffers is a list, no mapping by name"):
        apply(params, x, buffers=no_buffers)
    with pytest.raises(TypeError, match="frozen is a list, no mapping by name"):
        apply(params, x, frozen=no_buffers)
    message = r"buffers has other, which this module has not"
    with pytest.raises(ValueError, match=message):
        apply(params, x, buffers={"other": x})


def test_buffers_that_are_updated_must_be_passed() -> None:
    params, apply = ps.from_module(module_kinds.make_batch_normed())
    message = r"buffers lacks 1\.running_mean, .*buffers=dict\(module\.named_buffers"
    with pytest.raises(ValueError, match=message):
        apply(params, draw_inputs())


def test_spectral_norm_that_is_updated_is_refused() -> None:
    module = parametrizations.spectral_norm(linear().double())
    params, apply = ps.from_module(module)
    message = r"writes to parametrizations\.weight\.0\._u"
    with pytest.raises(ValueError, match=message):
        apply(params, draw_inputs())


def test_checkpoints_under_a_transform_are_refused() -> None:
    """In torch's own words."""
    params, apply = ps.from_module(make_module("checkpointed"))
    grad = torch.func.grad(lambda p: apply(p, draw_inputs()).sum())
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        grad(params)
