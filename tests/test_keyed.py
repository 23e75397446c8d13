"""Tests ``apply(params, ..., key=keys)``: every dropout of an unmodified module, by hand.

Also what a recomputation draws, and which modules are refused.
"""

import pickle
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn, vmap
from torch.func import grad
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import purestep as ps
from purestep.nn.attention import compute_attention
from purestep.random import bernoulli, fold_in, key as make_key, split, with_keys
from support.programs import run_program
from support.strategies import assert_same
from support.torch_private import attention_in_steps
from tests.model_families import (
    make_examples,
    make_model,
    with_dropout,
    with_large_weights,
)
from tests.module_kinds import FunctionModule, trace

KEYS = split(make_key(5), 3)
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(3, 4, 6, generator=GENERATOR, dtype=torch.float64)


def assert_close(actual: Any, expected: Any) -> None:
    """Compares within a thousand roundings of float64."""
    rounding = 1024 * 2.0**-53
    torch.testing.assert_close(actual, expected, rtol=rounding, atol=rounding)


Layer = Callable[[Tensor], Any]


def as_module(function: Layer) -> Any:
    """Makes params, one of value 1, and ``apply`` of a module that is this function."""
    one = nn.Parameter(torch.ones(()).double())

    def run(module: Any, x: Tensor) -> Any:
        return function(module.one * x)

    return ps.from_module(FunctionModule(run, one=one))


def call_with_keys(function: Layer, x: Tensor = X, key: Any = KEYS) -> Any:
    """Calls a module that is this function with keys."""
    params, apply = as_module(function)
    return apply(params, x, key=key)


def call_compiled(function: Layer, x: Tensor = X, key: Any = KEYS) -> Any:
    """Calls a module that is this function with keys, as one graph."""
    params, apply = as_module(function)
    return trace(apply)(params, x, key=key)


def draw_mask(number: int, shape: tuple[int, ...], p: float = 0.5) -> Tensor:
    """Draws what the dropout of this number lets pass."""
    keys = fold_in(KEYS, number)
    return ~bernoulli(keys, p, shape)


def drop_by_mask(x: Tensor, number: int = 0) -> Tensor:
    """Drops elements at a rate of 0.5, as the dropout of this number does."""
    mask = draw_mask(number, x.shape[1:])
    return torch.where(mask, 2 * x, 0)


def drop_in_place(x: Tensor) -> Tensor:
    nn.Dropout(inplace=True)(x)
    return x


def drop_and_compare(x: Tensor) -> Tensor:
    doubled = 2 * x
    passes = functional.dropout(x) == doubled
    return torch.where(passes, doubled, 0)


ELEMENT_DROPOUTS: list[Layer] = [
    functional.dropout,
    drop_and_compare,
    drop_in_place,
    lambda x: functional.dropout(x, 0.5, True, True),
    lambda x: functional.dropout(x, p=0.5, inplace=True),
]
CHANNEL_DROPOUTS: list[tuple[Layer, tuple[int, ...]]] = [
    (nn.Dropout1d(), (6,)),
    (functional.dropout2d, (2, 3)),
    (functional.dropout3d, (1, 2, 3)),
]


@pytest.mark.parametrize("function", ELEMENT_DROPOUTS)
def test_elements(function: Layer, fresh_compiler: None) -> None:
    """Each call draws other numbers; compiled, too."""

    def call_twice(x: Tensor) -> list[Tensor]:
        return [function(x + 0), function(x + 0)]

    first, second = call_with_keys(call_twice)

    assert_same(first, drop_by_mask(X, number=0))
    assert_same(second, drop_by_mask(X, number=1))
    if function is drop_and_compare:
        compiled = call_compiled(call_twice)
        assert_same(compiled, [first, second])


@pytest.mark.parametrize(("function", "channel_shape"), CHANNEL_DROPOUTS)
def test_channels(
    function: Layer, channel_shape: tuple[int, ...], fresh_compiler: None
) -> None:
    """Each call draws other numbers, one for each channel; compiled, too."""
    x = X.view(3, 4, *channel_shape)

    def call_twice(x: Tensor) -> list[Tensor]:
        return [function(x + 0), function(x + 0)]

    results = call_with_keys(call_twice, x)

    for number, result in enumerate(results):
        mask = draw_mask(number, (4,))
        for _ in channel_shape:
            mask = mask.unsqueeze(-1)
        expected = torch.where(mask, 2 * x, 0)
        assert_same(result, expected)
    if function is functional.dropout2d:
        assert_same(call_compiled(call_twice, x), results)


ALPHA_DROPOUTS: list[tuple[Any, tuple[int, ...]]] = [
    (functional.alpha_dropout, (4, 6)),
    (functional.feature_alpha_dropout, (4, 1)),
]


@pytest.mark.parametrize(("function", "mask_shape"), ALPHA_DROPOUTS)
@pytest.mark.parametrize("p", [0.25, 1.0])
def test_alpha_dropout_is_torchs(
    p: float, function: Any, mask_shape: tuple[int, ...]
) -> None:
    """Sets what is dropped to the lower limit of ``selu``.

    Then restores mean and deviation, as torch does.
    """
    limit = 1.7580993408473766
    scale = 0.0
    if p < 1:
        square = limit**2 * p + 1
        variance = square * (1 - p)
        scale = variance**-0.5

    dropped = call_with_keys(partial(function, p=p, training=True))

    drawn_shape = tuple(size for size in mask_shape if size > 1)
    mask = draw_mask(0, drawn_shape, p).to(X.dtype)
    mask = mask.view(3, *mask_shape)
    scaled_limit = limit * scale
    scaled = X * mask * scale
    shift = (mask - 1) * scaled_limit + scaled_limit * p
    assert_close(dropped, scaled + shift)


def test_dropout_that_does_not_train_draws_nothing() -> None:
    """Neither in evaluation nor at a rate of 0; such a call takes no number."""

    def function(x: Tensor) -> Tensor:
        x = functional.dropout(x, 0.5, training=False)
        x = functional.alpha_dropout(x, 0.5)
        x = functional.dropout(x, 0.0)
        x = functional.rrelu(x + 9) - 9
        return functional.dropout(x)

    assert_close(call_with_keys(function), drop_by_mask(X))
    unchanged = call_compiled(lambda x: functional.alpha_dropout(x, 0.5))
    assert_same(unchanged, X)


def test_evaluation_and_calls_without_keys_are_unchanged() -> None:
    linear = nn.Linear(6, 2).double()
    module = nn.Sequential(linear, nn.Dropout())
    params, apply = ps.from_module(module)

    evaluated = apply.eval(params, X, key=KEYS)
    torch.manual_seed(3)
    without_keys = apply(params, X)

    assert_same(evaluated, apply.eval(params, X))
    torch.manual_seed(3)
    assert_same(without_keys, module(X))


attend = functional.scaled_dot_product_attention
MASK = torch.ones(4, 4, dtype=torch.bool)
MASK[0, 1] = False
# The second query attends to nothing.
MASK[1] = False
ADDED_MASK = torch.randn(3, 1, 4, 4).double()
ATTENTION: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"scale": 3.0},
    {"attn_mask": MASK},
    {"attn_mask": ADDED_MASK},
    {"enable_gqa": True},
]


@pytest.mark.parametrize("settings", ATTENTION)
def test_attention(settings: dict[str, Any]) -> None:
    """Drops elements of torch's own weights.

    A query that attends to nothing gets zeros, and its gradient is not NaN.
    """
    heads = [X, X + 1, X + 2, X + 3]
    x = torch.stack(heads, dim=1)
    key_heads = 2 if "enable_gqa" in settings else 4
    # Each value is a unit vector, so that the output is the weights.
    identity = torch.eye(4, dtype=torch.float64)
    units = identity.expand(3, key_heads, 4, 4)

    def function(x: Tensor, p: float = 0.5) -> Tensor:
        query = x[..., :3]
        key = x[:, :key_heads, :, 3:]
        return attend(query, key, units, dropout_p=p, **settings)

    params, apply = as_module(function)

    def loss(params: Any) -> Any:
        return sum_squares(apply, params, x)

    dropped = apply(params, x, key=KEYS)
    grads = grad(loss)(params)

    weights = function(x, p=0.0)
    expected = drop_by_mask(weights)
    assert not expected.isnan().any()
    assert_close(dropped, expected)
    for leaf in grads.values():
        assert leaf.isfinite().all()


def attend_with_added_integers(x: Tensor) -> Tensor:
    mask = MASK.long()
    return attend(x, x, x, attn_mask=mask, dropout_p=0.5)


def attend_with_two_heads_to_four(x: Tensor) -> Tensor:
    key = x[:, :, None]
    query = key[:, :2]
    return attend(query, key, key, dropout_p=0.5, enable_gqa=True)


REFUSED_ATTENTION: list[tuple[Layer, str]] = [
    (
        attend_with_added_integers,
        r"attn_mask is torch\.int64: pass attn_mask\.bool",
    ),
    (
        attend_with_two_heads_to_four,
        r"2 heads of query and 4 heads of key: ",
    ),
]


@pytest.mark.parametrize(("function", "message"), REFUSED_ATTENTION)
def test_attention_that_torch_refuses(function: Layer, message: str) -> None:
    with pytest.raises(RuntimeError):
        function(X)
    with pytest.raises(ValueError, match=message):
        call_with_keys(function)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention(
    need_weights: bool, batch_first: bool, fresh_compiler: None
) -> None:
    """Drops weights of torch's layer, whichever dimension holds the batch; in one graph, too."""
    layer = nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=batch_first)
    params, apply = ps.from_module(layer.double())
    x = X if batch_first else X.transpose(0, 1)
    inputs = (x, x, x)

    output, _ = apply(params, *inputs, need_weights=need_weights, key=KEYS)
    evaluated, _ = apply.eval(params, *inputs, need_weights=need_weights, key=KEYS)
    compiled = trace(apply)(params, *inputs, need_weights=need_weights, key=KEYS)
    assert_same(compiled[0], output)

    in_weight = params["in_proj_weight"]
    projected = functional.linear(X, in_weight, params["in_proj_bias"])
    by_head = projected.view(3, 4, 3, 2, 3)
    query, key, value = by_head.permute(2, 0, 3, 1, 4)
    scores = query @ key.mT / 3**0.5
    dropped = drop_by_mask(scores.softmax(-1))
    mixed = (dropped @ value).transpose(1, 2)
    concatenated = mixed.reshape(3, 4, 6)
    out_weight = params["out_proj.weight"]
    expected = functional.linear(concatenated, out_weight, params["out_proj.bias"])
    if not batch_first:
        expected = expected.transpose(0, 1)
    assert_close(output, expected)
    assert not torch.equal(evaluated, output)


def test_a_trace_without_keys_draws_from_the_global_generator(
    fresh_compiler: None,
) -> None:
    """Only with keys is a compiler's own draw refused."""
    params, apply = as_module(lambda x: x + torch.rand(()))
    trace(apply)(params, X)


TRACE_FIRST = """
import pickle, sys, torch
import purestep as ps

torch.set_num_threads(1)
params, apply = pickle.load(open(sys.argv[1], "rb"))
keys = ps.random.split(ps.random.key(5), 3)
x = torch.ones(3, 4, 6)
run = torch.compile(lambda: apply(params, x, x, x, key=keys)[0], backend="eager", fullgraph=True)
assert torch.equal(run(), apply(params, x, x, x, key=keys)[0])
"""


def test_attention_of_a_pickled_module_whose_first_call_is_traced(
    tmp_path: Path,
) -> None:
    """A compiler cannot copy torch's function, so that is done before."""
    layer = nn.MultiheadAttention(6, 2, dropout=0.5, batch_first=True)
    path = tmp_path / "layer"
    path.write_bytes(pickle.dumps(ps.from_module(layer)))
    run = run_program(["-c", TRACE_FIRST, str(path)], tmp_path)
    assert run.returncode == 0, run.stderr


def test_attention_that_drops_nothing_is_torchs() -> None:
    def function(x: Tensor) -> Tensor:
        return attend(x, x.flip(1), x, is_causal=True)

    assert_same(call_with_keys(function), function(X))


Run = Callable[..., Any]


def run_once(function: Run, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


run_checkpointed = partial(checkpoint, use_reentrant=False)


def run_by_remat(function: Run, *args: Any) -> Any:
    return ps.remat(function)(*args)


class Noisy(nn.Module):
    """Drops where it may be computed again: in a method, a module, and one in another."""

    def __init__(self, recompute: Run = run_once) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(6, 6).double()
        self.b = nn.Linear(6, 6).double()
        self.dropout = nn.Dropout(0.5)
        self.recompute = recompute

    def inner(self, x: Tensor) -> Tensor:
        return functional.dropout(self.a(x)).tanh()

    def outer(self, x: Tensor) -> Tensor:
        x = self.recompute(self.inner, x.tanh())
        return functional.dropout(self.b(x)).tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.a(x))
        x = self.recompute(self.outer, x)
        x = self.recompute(self.dropout, x).tanh()
        return functional.dropout(self.recompute(self.inner, x))


def sum_squares(apply: Any, params: Any, x: Tensor = X, key: Any = KEYS) -> Any:
    output = apply(params, x, key=key)
    return output.square().sum()


def compute_grads(apply: Any, params: Any) -> list[Tensor]:
    """Computes the gradients of the squares' sum by autograd."""
    copies = {}
    for name, leaf in params.items():
        copies[name] = leaf.clone().requires_grad_()
    total = sum_squares(apply, copies)
    grads = torch.autograd.grad(total, list(copies.values()))
    return list(grads)


@pytest.mark.parametrize("recompute", [run_checkpointed, run_by_remat])
def test_recomputation_draws_the_same(recompute: Any) -> None:
    """To the bit: nested, and where the function is not a module's call.

    The global generator stays where it is.
    """
    params, plain = ps.from_module(Noisy())
    _, inside = ps.from_module(Noisy(recompute))

    def around(params: Any, x: Tensor, key: Tensor) -> Any:
        def function(params: Any, x: Tensor, key: Tensor) -> Any:
            return plain(params, x, key=key)

        return recompute(function, params, x, key)

    rng_state = torch.get_rng_state()
    expected = compute_grads(plain, params)
    for apply in (inside, around):
        assert_same(compute_grads(apply, params), expected)
    assert_same(rng_state, torch.get_rng_state())


def test_recomputation_under_grad_draws_the_same() -> None:
    params, plain = ps.from_module(Noisy())
    _, recomputed = ps.from_module(Noisy(run_by_remat))

    def sum_of(apply: Any) -> Callable[..., Any]:
        return lambda params: apply(params, X, key=KEYS).sum()

    grads = grad(sum_of(recomputed))(params)

    expected = grad(sum_of(plain))(params)
    assert_same(grads, expected)


def test_a_checkpoint_that_begins_with_another_is_refused() -> None:
    """Only a tensor by position tells which of the two a dropout is in.

    Up to torch 2.11, every checkpoint begins by making a tensor, which tells it.
    """

    def outer(recompute: Run, x: Tensor) -> Tensor:
        x = recompute(functional.dropout, input=x)
        x = functional.dropout(x.tanh())
        return functional.dropout(x.tanh())

    def nested(recompute: Run, x: Tensor) -> Tensor:
        return recompute(partial(outer, recompute), x)

    def grads_of(function: Run, recompute: Run) -> list[Tensor]:
        params, apply = as_module(partial(function, recompute))
        return compute_grads(apply, params)

    def begins_without_draws(x: Tensor) -> Tensor:
        return functional.dropout(run_checkpointed(torch.tanh, input=x))

    if torch.__version__ < "2.12":
        grads = grads_of(nested, run_checkpointed)
        assert_same(grads, grads_of(nested, run_once))
    else:
        message = "with key=, pass tensors to checkpoints by position"
        with pytest.raises(ValueError, match=message):
            grads_of(nested, run_checkpointed)
    grads = grads_of(outer, run_checkpointed)
    assert_same(grads, grads_of(outer, run_once))
    call_with_keys(lambda x: run_checkpointed(begins_without_draws, x))


class CausalAttention(nn.Module):
    """Attends to earlier rows of one text, or of several."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        return functional.scaled_dot_product_attention(
            self.scale * x, x, x, dropout_p=0.5, is_causal=True
        )


def test_a_mask_beside_causal_attention_is_refused() -> None:
    """As torch does where nothing is dropped."""
    x = torch.eye(3)[None]
    for rate in (0.5, 0.0):
        with pytest.raises((ValueError, RuntimeError), match="attn_mask"):
            compute_attention(lambda weights, p: weights, x, x, x, x > 0, rate, True)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(2, 4), (4, 2)])
def test_causal_attention_of_other_keys(num_queries: int, num_keys: int) -> None:
    """Queries and keys are counted from the first on, as torch does."""
    query = torch.randn(1, num_queries, 3).double()
    key = torch.randn(1, num_keys, 3).double()
    actual = compute_attention(
        lambda weights, p: weights, query, key, key, None, 0.5, True
    )
    assert_close(actual, attend(query, key, key, is_causal=True))


def test_dropped_attention_is_in_float32_under_autocast() -> None:
    """As torch's fused kernels are, which drop nothing here."""
    torch.manual_seed(0)
    query = 3 * torch.randn(1, 8, 16).bfloat16()
    key = 3 * query.flip(1)
    value = query.sin()
    seen = []

    def keep_all(weights: Tensor, p: float) -> Tensor:
        seen.append(weights.dtype)
        return weights

    attend_all = partial(compute_attention, keep_all, query, key, value, dropout_p=0.5)
    expected = attend_all()
    with torch.autocast("cpu", torch.bfloat16):
        actual = attend_all()
    assert_same(actual, expected)
    assert seen == [torch.float32] * 2


def test_causal_attention_of_one_text_under_vmap() -> None:
    """Each query sees the keys up to its own, not the first one alone."""
    texts = torch.randn(4, 5, 3, dtype=torch.float64)
    keys = ps.random.split(ps.random.key(0), 4)
    params, apply = ps.from_module(CausalAttention())
    together = apply(params, texts, key=keys)
    one_by_one = vmap(lambda x, key: apply(params, x, key=key))(texts, keys)
    torch.testing.assert_close(one_by_one, together, rtol=0, atol=1e-12)


def test_the_same_under_transforms(fresh_compiler: None) -> None:
    """``grad``, and ``vmap`` of one key for each row."""
    params, apply = ps.from_module(Noisy())

    loss_grad = grad(partial(sum_squares, apply))

    grads = loss_grad(params, X, KEYS)
    per_row = vmap(loss_grad, (None, 0, 0))(params, X, KEYS)

    expected = compute_grads(apply, params)
    for actual, leaf in zip(grads.values(), expected, strict=True):
        assert_same(actual, leaf)
    for name, leaf in per_row.items():
        assert_close(leaf.sum(0), grads[name])


def test_a_compiler_refuses_draws_within_a_checkpoint(fresh_compiler: None) -> None:
    def function(x: Tensor) -> Any:
        return run_checkpointed(functional.dropout, x)

    with pytest.raises(Exception, match="draws without keys within a checkpoint"):
        call_compiled(function)


OTHER_GENERATORS = "numpy's or Python's generator has drawn"


def draw_with_a_generator(x: Tensor) -> Tensor:
    generator = torch.Generator()
    return x + torch.rand([], generator=generator)


def draw_into_a_tensor(x: Tensor) -> Tensor:
    return x * torch.rand(3, 1, 1, out=torch.empty(3, 1, 1))


def draw_bernoulli_with_a_generator(x: Tensor) -> Tensor:
    drawn = torch.empty(3, 1, 1)
    return x * drawn.bernoulli_(0.5, generator=torch.Generator())


def draw_bernoulli(x: Tensor) -> Tensor:
    drawn = torch.empty_like(x)
    return x * drawn.bernoulli_()


def draw_multinomial(x: Tensor) -> Tensor:
    probabilities = x.detach().abs()[0]
    return torch.multinomial(probabilities, 2)


WITHOUT_KEYS: list[tuple[str, Any]] = [
    ("rand", lambda x: x + torch.rand(3, 4, 6)),
    ("rand", draw_with_a_generator),
    ("rand", draw_into_a_tensor),
    ("bernoulli_", draw_bernoulli),
    ("bernoulli_", draw_bernoulli_with_a_generator),
    ("normal_", lambda x: x + nn.init.normal_(torch.empty(6))),
    ("multinomial", draw_multinomial),
    ("rrelu_with_noise", nn.RReLU()),
    ("exponential_", functional.gumbel_softmax),
    ("native_dropout", lambda x: torch.native_dropout(x, 0.5, True)),
    ("bernoulli_", lambda x: attention_in_steps(x, x, x, None, 0.5)),
    (OTHER_GENERATORS, lambda x: x * random.random()),
    (OTHER_GENERATORS, lambda x: x * numpy.random.rand()),
]


@pytest.mark.parametrize(("name", "function"), WITHOUT_KEYS)
def test_draws_without_keys_are_refused_by_name(name: str, function: Any) -> None:
    message = f"^{name}.* (that|which) no key reaches"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            call_with_keys(function)


def test_one_number_for_all_rows_is_refused_after_a_call_with_one_row() -> None:
    params, apply = as_module(lambda x: x * torch.rand(1))
    one_row = X[:1]
    apply(params, one_row, key=KEYS[:1])

    message = r"^rand draws random numbers that no key reaches"
    with pytest.raises(ValueError, match=message):
        apply(params, X, key=KEYS)


RECURRENT = [nn.LSTM, nn.GRU, nn.RNN]


@pytest.mark.parametrize("layer", RECURRENT)
def test_recurrent_kernels_that_do_not_drop(layer: Any) -> None:
    module = layer(6, 6, 2, dropout=0.0, batch_first=True)
    params, apply = ps.from_module(module.double())

    output, _ = apply(params, X, key=KEYS)
    evaluated, _ = apply.eval(params, X, key=KEYS)

    without_keys, _ = apply.eval(params, X)
    assert_same(output, without_keys)
    assert_same(evaluated, without_keys)


@pytest.mark.parametrize("layer", RECURRENT)
def test_recurrent_kernels_are_refused_where_they_drop(layer: Any) -> None:
    module = layer(6, 6, 2, dropout=0.5, batch_first=True)
    params, apply = ps.from_module(module.double())

    evaluated, _ = apply.eval(params, X, key=KEYS)

    without_keys, _ = apply.eval(params, X)
    assert_same(evaluated, without_keys)
    with pytest.raises(ValueError, match="a recurrent layer with dropout"):
        apply(params, X, key=KEYS)


def shape_of_one_for_each_row(x: Tensor) -> list[int]:
    others = [1 for _ in x.shape[1:]]
    return [len(x), *others]


def drop_path_as_timm(x: Tensor, keep: float) -> Tensor:
    drawn = x.new_empty(shape_of_one_for_each_row(x)).bernoulli_(keep)
    return x * drawn.div_(keep)


def drop_path_as_swin(x: Tensor, keep: float) -> Tensor:
    shape = shape_of_one_for_each_row(x)
    drawn = keep + torch.rand(shape, dtype=x.dtype, device=x.device)
    return x.div(keep) * drawn.floor_()


@pytest.mark.parametrize("drop_path", [drop_path_as_timm, drop_path_as_swin])
def test_paths_are_dropped_by_example(drop_path: Any, fresh_compiler: None) -> None:
    """As libraries draw them: one number for each example, by its key.

    Eager, compiled, and each example alone.
    """
    keys = split(make_key(1), 64)
    x = X[:1].expand(64, 4, 6)

    def drop_twice(x: Tensor) -> Tensor:
        x = drop_path(x, 0.75)
        return drop_path(x, 0.875)

    def call_with_one(x: Tensor, key: Tensor) -> Any:
        return call_with_keys(drop_twice, x[None], key[None])

    output = call_with_keys(drop_twice, x, keys)
    one_by_one = [call_with_one(x[0], key) for key in keys]
    mapped = vmap(call_with_one)(x, keys)

    is_dropped = (output == 0).all(2).all(1)
    passes = (output != 0).all(2).all(1)
    assert (is_dropped | passes).all()
    p = 0.75 * 0.875
    deviation = (p * (1 - p) / 64) ** 0.5
    mean = passes.double().mean()
    assert abs(mean - p) < 4 * deviation
    assert_same(output, torch.cat(one_by_one))
    assert_same(output, mapped.flatten(0, 1))
    if drop_path is drop_path_as_swin and torch.__version__ < "2.12":
        message = r"compiler of torch 2\.11.* hides torch.rand from key="
        with pytest.raises(Exception, match=message):
            call_compiled(drop_twice, x, keys)
    else:
        assert_same(output, call_compiled(drop_twice, x, keys))
    with pytest.raises(ValueError, match="random numbers that no key reaches"):
        call_with_keys(lambda x: drop_path(x[0], 0.5))


def test_ways_to_draw_one_number_by_example() -> None:
    def bernoulli_by_default(x: Tensor) -> Tensor:
        drawn = x.new_ones(3, 1)
        return drawn.bernoulli_()

    def bernoulli_by_p(x: Tensor) -> Tensor:
        drawn = x.new_ones(3, 1)
        return drawn.bernoulli_(0.5)

    by_default = call_with_keys(bernoulli_by_default)
    assert_same(by_default, call_with_keys(bernoulli_by_p))

    by_int = call_with_keys(lambda x: torch.rand(3))
    by_size = call_with_keys(lambda x: torch.rand(size=(3,)))
    assert_same(by_int, by_size)


def test_tokens_of_all_examples_in_one_dimension() -> None:
    """As the feed-forward layers of OPT have them, which take keys of tokens."""

    def drop_flattened(x: Tensor) -> Tensor:
        dropped = functional.dropout(x.flatten(0, 1))
        return dropped.view_as(x)

    message = r"key=ps\.random\.token_keys\(keys\[:, None\], mask, pos"
    with pytest.raises(ValueError, match=message):
        call_with_keys(drop_flattened)

    positions = torch.arange(4).expand(3, 4)
    segments = torch.ones_like(positions)
    keys = KEYS.unsqueeze(1)
    token_keys = ps.random.token_keys(keys, segments, positions)
    dropped = call_with_keys(drop_flattened, key=token_keys)

    assert_same(dropped, call_with_keys(functional.dropout))
    with pytest.raises(ValueError, match="dropout1d drops channels"):
        call_with_keys(functional.dropout1d, key=token_keys)


def test_examples_that_are_not_first_are_refused() -> None:
    message = r"dropout in the module .* first dimension is not"
    with pytest.raises(ValueError, match=message):
        call_with_keys(functional.dropout, X.transpose(0, 1))
    with pytest.raises(ValueError, match=message):
        call_with_keys(functional.dropout, X[:1])
    with pytest.raises(ValueError, match=message):
        call_with_keys(functional.dropout, X[0])
    with pytest.raises(TypeError, match=r"key= takes keys of ps.random.* by position"):
        call_with_keys(functional.dropout, key=torch.ones(3))
    call_with_keys(functional.dropout, X[:, :3])


@pytest.mark.parametrize("attention_dropout", [0.5, 0.0])
def test_attention_whose_examples_are_second_is_refused(
    attention_dropout: float,
) -> None:
    """Also where there are as many tokens as rows."""
    layer = nn.TransformerEncoderLayer(6, 2, 8, 0.5).double()
    layer.self_attn.dropout = attention_dropout

    def run_transposed(module: Any, x: Tensor) -> Any:
        output = module.layer(x.transpose(0, 1))
        return output.transpose(0, 1)

    params, apply = ps.from_module(FunctionModule(run_transposed, layer=layer))

    with pytest.raises(ValueError, match="first dimension may be not"):
        apply(params, X[:, :3], key=KEYS)
    with pytest.raises(ValueError, match="first dimension is not"):
        apply(params, X, key=KEYS)
    if attention_dropout == 0.0:
        apply(params, X[:1, :1], key=KEYS[:1])


@pytest.mark.parametrize(
    ("family", "attention"), [("GPT-2", "eager"), ("Llama", "sdpa")]
)
def test_hugging_face_models_draw_the_same_alone_padded_and_packed(
    family: str, attention: str
) -> None:
    """With all dropouts on, to rounding: in float32, in which Llama computes norms."""
    module = with_dropout(with_large_weights(make_model(family, attention)), 0.25)
    apply: Any
    params, apply = ps.from_module(module)

    def sum_losses(microbatch: Any) -> Any:
        key = microbatch["key"]
        segments = microbatch.get("segments", microbatch["attention_mask"])
        inputs: dict[str, Any] = {"use_cache": False}
        if "positions" in microbatch:
            positions = microbatch["positions"]
            key = ps.random.token_keys(key, segments, positions)
            inputs["position_ids"] = positions
        inputs["attention_mask"] = ps.segment_mask(segments, torch.float64)
        output = apply(params, microbatch["input_ids"], key=key, **inputs)
        losses = ps.losses.cross_entropy(output.logits, microbatch["labels"])
        return losses.sum()

    def sum_packed(texts: Any, max_tokens: int) -> Any:
        group = ps.pack(texts, max_tokens=max_tokens)
        return sum(sum_losses(microbatch) for microbatch in group)

    texts = with_keys(make_examples(family), make_key(9))
    alone = sum(sum_packed([text], max_tokens=10) for text in texts)
    padded = sum_packed(texts[::-1], max_tokens=24)
    packed = sum_losses(ps.pack_documents(texts, row_tokens=12))
    with_other_keys = with_keys(make_examples(family), make_key(10))
    different = sum_packed(with_other_keys, max_tokens=100)

    assert abs(padded / alone - 1) < 1e-6
    assert abs(packed / alone - 1) < 1e-6
    assert abs(different / alone - 1) > 1e-4
