"""Rewrites of graphs for CPUs: each alone, and all of them in what is compiled."""

import re
import timeit
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import purestep as ps
from purestep.compiling.cpu import (
    MIN_USERS_PER_VALUE,
    drop_summed_dims,
    hoist_scalars,
    inductor_options,
    rewrite_graph,
    split_addmm,
)
from purestep.compiling.nodes import skip_views
from purestep.compiling.products import (
    NARROW,
    WIDE,
    find_limits,
    onednn_matmul,
    sum_small_products,
    use_onednn,
)
from support import torch_private
from tests.memory import CountOperations
from tests.sharded_checkpoints import group_of_one

Mode = Literal["fake", "symbolic"]
Rewrite = Callable[[torch.fx.Graph], None]

STEP = torch.tensor(3)
LEAF = torch.linspace(-1, 1, 4 * MIN_USERS_PER_VALUE)
KEPT = "aten.as_strided.default"
"""The operator that keeps a number, so that it is computed once."""
SIDE = 264  # SIDE ** 3 > NARROW.min_onednn


def operators_after(
    rewrite: Rewrite, function: Callable[..., Any], *args: Any, mode: Mode = "fake"
) -> list[str]:
    """Rewrites a function's graph, checks that it computes the same, lists its operators."""
    decompositions = torch_private.get_decompositions()
    module = make_fx(function, decompositions, mode)(*args)
    rewrite(module.graph)
    module.graph.lint()
    module.recompile()

    actual = module(*args)
    expected = function(*args)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    return [str(node.target) for node in nodes]


# Numbers that are computed once


def divide_by_power(step: Tensor, leaf: Tensor) -> Tensor:
    power = 0.9 ** step.to(torch.float64)
    return leaf / (1 - power).to(leaf.dtype)


def use_power_twice(step: Tensor, leaf: Tensor) -> tuple[Tensor, Tensor]:
    power = 0.9**step
    return leaf * power, leaf * (1 - power)


def use_each_power(steps: Tensor, leaf: Tensor) -> list[Tensor]:
    powers = (0.9**steps).unbind()
    return [leaf * power for power in powers]


def scale_by_difference(step: Tensor, leaf: Tensor) -> Tensor:
    return leaf * (1 - step)


def return_power(step: Tensor, leaf: Tensor) -> tuple[Tensor, Tensor]:
    return 0.9**step, leaf


class Powers(NamedTuple):
    """A function of a step and a leaf, and how many numbers of it are kept."""

    num_kept: int
    function: Callable[..., Any]
    step: Tensor = STEP
    leaf: Tensor = LEAF
    mode: Mode = "fake"


MANY_NETWORKS = Powers(
    1, torch.vmap(divide_by_power), torch.arange(1, 5), LEAF.repeat(4, 1)
)
POWERS = {
    "where many begin to use it": Powers(1, divide_by_power),
    "for each of many networks": MANY_NETWORKS,
    "where many use it twice": Powers(1, use_power_twice),
    "where the size is not known yet": Powers(
        1, divide_by_power, leaf=LEAF[:3], mode="symbolic"
    ),
    "not for hardly more than one": Powers(
        0, divide_by_power, leaf=LEAF[: MIN_USERS_PER_VALUE - 1]
    ),
    "not for as many as it has": Powers(0, divide_by_power, step=LEAF.abs()),
    "not if it costs little": Powers(0, scale_by_difference),
    "not if many do not use it": Powers(0, return_power),
    "not if each part has many": Powers(0, use_each_power, step=torch.ones(2)),
    "not for networks of unknown size": MANY_NETWORKS._replace(
        num_kept=0, mode="symbolic"
    ),
}


def operators_computed_once(case: Powers) -> list[str]:
    return operators_after(
        hoist_scalars, case.function, case.step, case.leaf, mode=case.mode
    )


@pytest.mark.parametrize("name", POWERS)
def test_a_costly_number_is_kept_once(name: str) -> None:
    case = POWERS[name]
    operators = operators_computed_once(case)
    assert operators.count(KEPT) == case.num_kept


def test_what_is_kept_is_what_many_elements_use() -> None:
    """The power and what is made of it stay together."""
    operators = operators_computed_once(Powers(1, divide_by_power))
    assert operators.index(KEPT) == operators.index("aten.div.Tensor") - 1


def test_large_products_go_to_onednn_where_it_is_faster() -> None:
    x = torch.ones(SIDE, SIDE)
    operators = operators_after(rewrite_graph, torch.mm, x, x)
    (operator,) = operators
    has_limits = find_limits(torch.cpu.get_capabilities()) is not None
    assert ("purestep.product" in operator) == has_limits


def costly(x: Tensor) -> Tensor:
    return (-x).exp() + 0.5


def use_views(few: Tensor, many: Tensor) -> tuple[Tensor, ...]:
    """Combines many elements with views of a few, in every order."""
    element = costly(few)[1, 2]
    column = costly(few).t()[:, 1:].reshape(3, 1, 1, 1)
    row_of_view = costly(few[1:].t())[..., None, None]
    scaled_row = row_of_view * costly(few)[0, 1]
    sum_of_expanded = costly(few.t().expand(3, 2)).sum()
    cosine_of_slice = costly(few)[1:, 1:].cos()[0, 1]
    power = costly(few)[0, 0] ** 2
    maxima = costly(many.amax((2, 3)))[..., None, None]
    return (
        many * element,
        many * column,
        many + scaled_row,
        many + sum_of_expanded + cosine_of_slice,
        many * power,
        many / power,
        many * maxima,
    )


def test_compiled_of_views() -> None:
    """Whatever view of the few the many see, and in whatever order of memory the few lie."""
    numbers = torch.linspace(0, 1, 6)
    rows_first = numbers.reshape(2, 3)
    columns_first = numbers.reshape(3, 2).t()
    many = torch.linspace(-1, 1, 6 * 8 * 8).reshape(3, 2, 8, 8)
    compiled = ps.compile(use_views, options={"cpp_wrapper": False})

    for few in (rows_first, columns_first):
        torch.testing.assert_close(compiled(few, many), use_views(few, many))


def test_a_compiled_step_of_many_networks_takes_powers_once() -> None:
    """As many as there are in the formula, in none of the loops over elements."""

    def loss_fn(params: list[Tensor], x: Tensor) -> Tensor:
        products = [leaf.sum() * x for leaf in params]
        return sum(products, torch.zeros(()))

    def weight_fn(x: Tensor) -> Tensor:
        return x.new_ones(())

    optimizer = ps.optim.adamw(0.1)
    update_step = ps.make_update_step(loss_fn, optimizer, weight_fn=weight_fn)
    step = torch.vmap(lambda params, state, x: update_step(params, state, [x]))
    params = [torch.ones(8, 64), torch.ones(8, 16, 16)]
    arguments = (params, torch.vmap(optimizer.init)(params), torch.ones(8))

    compiled = ps.compile(step, fullgraph=True)
    result, code = torch_private.run_and_get_code(compiled, *arguments)

    powers = re.findall(r"std::pow\(|\.pow\(", code)
    assert len(powers) == 2
    torch.testing.assert_close(result[0], step(*arguments)[0])


# Products of matrices


def integers(*shape: int, seed: int = 0) -> Tensor:
    """Draws integers so small that every sum of products is exact, in whatever order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(torch.float32)


def layouts(rows: int, columns: int, seed: int) -> list[Tensor]:
    """Draws matrices of one shape, in each way in which they may lie in memory."""
    flat = integers(rows, columns + 9, seed=seed).flatten()
    by_rows = integers(rows, columns, seed=seed)
    by_columns = integers(columns, rows, seed=seed).t()
    with_gaps = integers(rows, 2 * columns, seed=seed)[:, ::2]
    one_row = integers(1, columns, seed=seed).expand(rows, columns)
    one_column = integers(rows, 1, seed=seed).expand(rows, columns)
    windows = flat.unfold(0, columns, 1)[:rows]
    overlapping = flat.as_strided((rows, columns), (7, 3))
    return [
        by_rows,
        by_columns,
        with_gaps,
        one_row,
        one_column,
        windows,
        overlapping,
    ]


def mlp(params: Any, x: Tensor) -> Tensor:
    hidden = torch.nn.functional.linear(x, params["w"], params["bias"])
    return hidden.relu() @ params["v"] + x


def rewrite_products(graph: torch.fx.Graph) -> None:
    split_addmm(graph)
    sum_small_products(graph, NARROW.max_looped)
    use_onednn(graph, NARROW.min_onednn)


def compile_with_products(
    function: Callable[..., Any], **settings: Any
) -> Callable[..., Any]:
    """Compiles with these products on whatever processor this is."""
    options: Any = {"post_grad_custom_post_pass": rewrite_products, "cpp_wrapper": True}
    return torch.compile(function, options=options, **settings)


def check_product(a: Tensor, b: Tensor) -> None:
    result = onednn_matmul(a, b)
    assert torch.equal(result, a @ b)
    assert result.is_contiguous()


def test_products_of_every_layout() -> None:
    lefts = layouts(SIDE, SIDE + 16, seed=0)
    rights = layouts(SIDE + 16, SIDE - 8, seed=1)
    assert SIDE * rights[0].numel() >= NARROW.min_onednn

    for left in lefts:
        check_product(left, rights[0])
    for right in rights:
        check_product(lefts[0], right)


@pytest.mark.parametrize(
    ("m", "k", "n"),
    [
        (0, 4, 5),
        (3, 0, 5),
        (3, 4, 0),
        (1, 1, 1),
        (2, 2**12, NARROW.min_onednn // 2**13),
    ],
)
def test_products_of_every_size(m: int, k: int, n: int) -> None:
    check_product(integers(m, k), integers(k, n))


@pytest.mark.parametrize("is_large", [True, False])
def test_few_multiplications_stay_with_mkl(is_large: bool) -> None:
    """A graph cannot tell if it does not know its sizes."""
    a, b = integers(3, 4), integers(4, 5)
    with CountOperations() as operations:
        onednn_matmul(a, b, 3 * 4 * 5 if is_large else 3 * 4 * 5 + 1)
    assert ("aten.mm.default" in operations.names) == (not is_large)


def test_limits_are_those_of_the_processor() -> None:
    assert NARROW.max_looped < WIDE.max_looped < WIDE.min_onednn < NARROW.min_onednn
    assert find_limits({}) == NARROW
    assert find_limits({"cpu_name": "Intel Xeon", "avx512_vp2intersect": True}) is None


def test_wrappers_in_cpp_are_for_one_process() -> None:
    assert inductor_options()["cpp_wrapper"] != torch.accelerator.is_available()
    with group_of_one():
        assert not inductor_options()["cpp_wrapper"]


def test_products_of_gaps_take_the_time_of_products() -> None:
    """Without a copy, oneDNN takes a thousand times as long."""
    a = integers(SIDE, SIDE)
    times = []
    for b in layouts(SIDE, SIDE, seed=1):
        repeated = timeit.repeat(partial(onednn_matmul, a, b), number=1)
        times.append(min(repeated))
    by_rows, *others = times
    assert max(others) < 100 * by_rows


OURS = "purestep.product.default"
THEIRS = "aten.mm.default"
ADDED = "aten.add.Tensor"


def operators_with_products(function: Callable[..., Any], *args: Any) -> list[str]:
    return operators_after(rewrite_products, function, *args)


def test_products_that_repay_are_replaced() -> None:
    x = integers(SIDE, SIDE, seed=0)
    y = integers(SIDE, SIDE, seed=1)
    z = integers(SIDE, SIDE, seed=2)

    assert operators_with_products(torch.mm, x, y) == [OURS]
    assert operators_with_products(torch.addmm, z, x, y) == [OURS, ADDED]
    assert operators_with_products(torch.addmm, z[0], x, y) == [OURS, ADDED]
    transposed = operators_with_products(lambda x, y: x.t() @ y, x, y)
    assert transposed[-2:] == ["aten.clone.default", OURS]


def test_other_products_are_not_replaced() -> None:
    """They are small, or of another dtype, or scaled."""
    x = integers(SIDE, SIDE, seed=0)
    y = integers(SIDE, SIDE, seed=1)
    z = integers(SIDE, SIDE, seed=2)

    assert operators_with_products(torch.mm, x[:8], y) == [THEIRS]
    assert operators_with_products(torch.mm, x.double(), y.double()) == [THEIRS]
    half = operators_with_products(torch.mm, x.bfloat16(), y.bfloat16())
    assert OURS not in half
    wide = [z.double(), x.double(), y.double()]
    assert operators_with_products(torch.addmm, *wide) == [THEIRS, ADDED]
    longs = [z.long(), x.long(), y.long()]
    assert operators_with_products(torch.addmm, *longs) == ["aten.addmm.default"]
    for scales in ({"beta": 2}, {"beta": 2, "alpha": 3}):
        scaled = partial(torch.addmm, **scales)
        assert operators_with_products(scaled, z, x, y) == ["aten.addmm.default"]


SUMMED = "aten.sum.dim_IntList"


def operators_of_loop(products_per_pass: int) -> list[str]:
    parts = ["aten.slice.Tensor"] * 2 + ["aten.unsqueeze.default"] * 2
    products = [*parts, "aten.mul.Tensor"] * products_per_pass
    return [*products, *[ADDED] * (products_per_pass - 1), SUMMED]


def test_small_products_become_loops() -> None:
    x = integers(16, 64, seed=0)
    y = integers(64, 64, seed=1)
    assert x.shape[0] * y.numel() == NARROW.max_looped

    looped = operators_of_loop(4)
    assert operators_with_products(torch.mm, x, y) == looped
    assert operators_with_products(torch.addmm, y[0], x, y) == [*looped, ADDED]
    transposed = operators_with_products(lambda x: x.t() @ x, x)
    assert transposed[1:] == operators_of_loop(1)
    copied = operators_with_products(torch.mm, x, integers(64, 64, seed=1).t())
    assert copied == ["aten.clone.default", "aten.as_strided.default", *looped]


def test_small_products_become_loops_where_onednn_is_faster() -> None:
    x = integers(4, 4)
    operators = operators_after(rewrite_graph, torch.mm, x, x)
    has_limits = find_limits(torch.cpu.get_capabilities()) is not None
    assert (SUMMED in operators) == has_limits


@pytest.mark.parametrize(
    ("size", "columns", "products_per_pass"),
    [
        (0, 5, 1),
        (4, 5, 1),
        (28, 5, 1),
        (32, 5, 4),
        (32, 1, 1),
        (33, 5, 1),
        (34, 5, 2),
        (36, 5, 4),
    ],
)
def test_a_pass_adds_products_that_divide_the_sum(
    size: int, columns: int, products_per_pass: int
) -> None:
    x = integers(3, size, seed=0)
    y = integers(size, columns, seed=1)
    operators = operators_with_products(torch.mm, x, y)
    assert operators == operators_of_loop(products_per_pass)


def test_products_that_no_loop_repays_stay() -> None:
    """They are larger, transposed, of another dtype, or of a size that is not known."""
    x = integers(16, 64, seed=0)
    y = integers(64, 64, seed=1)

    larger = operators_with_products(torch.mm, integers(17, 64), y)
    transposed = operators_with_products(
        torch.mm, integers(8, 65), integers(64, 65, seed=1).t()
    )
    wide = operators_with_products(torch.mm, x.double(), y.double())
    loops = partial(sum_small_products, max_multiplications=NARROW.max_looped)
    unknown = operators_after(loops, torch.mm, x, y[:, :32], mode="symbolic")
    for operators in (larger, transposed, wide, unknown):
        assert THEIRS in operators
        assert SUMMED not in operators


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_summed_dimensions_that_are_reshaped_away_are_dropped(
    dtype: torch.dtype | None,
) -> None:
    def gradient_of_bias(x: Tensor) -> Tensor:
        return x.sum(0, keepdim=True, dtype=dtype).reshape(5)

    operators = operators_after(drop_summed_dims, gradient_of_bias, integers(3, 5))
    assert operators == [SUMMED]


def test_summed_dimensions_of_sizes_that_only_the_data_knows_stay() -> None:
    def sum_chosen(x: Tensor, chosen: Tensor) -> Tensor:
        return x[chosen].t().sum(0, keepdim=True).reshape(-1, 2)

    x = integers(6, 5)
    chosen = torch.arange(6) % 3 > 0
    with torch_private.compile_data_dependent_sizes():
        compiled = torch.compile(
            sum_chosen, options={"post_grad_custom_post_pass": drop_summed_dims}
        )
        assert torch.equal(compiled(x, chosen), sum_chosen(x, chosen))


def test_summed_dimensions_that_are_read_stay() -> None:
    def keep(x: Tensor) -> Tensor:
        return x.sum(0, keepdim=True)

    def use_both(x: Tensor) -> tuple[Tensor, Tensor]:
        summed = x.sum(0, keepdim=True)
        return summed.reshape(6), summed * 2

    def reshape_otherwise(x: Tensor) -> Tensor:
        return x.sum(0, keepdim=True).reshape(2, 3)

    def sum_all(x: Tensor) -> Tensor:
        return x.sum([], keepdim=True).reshape(1, 1)

    for function in (keep, use_both, reshape_otherwise, sum_all):
        before = operators_after(lambda graph: None, function, integers(3, 6))
        assert operators_after(drop_summed_dims, function, integers(3, 6)) == before


def test_loops_read_what_is_stored() -> None:
    """Otherwise each of 16 columns would compute all the exponentials anew."""
    x = integers(4, 8, seed=0)
    y = integers(8, 16, seed=1)

    def multiply_powers(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        powers = x.exp2()
        return powers @ y, powers.view(2, 16)[:, :8] @ y

    operators = operators_with_products(multiply_powers, x, y)
    assert operators.count(KEPT) == 1
    assert operators.index(KEPT) < operators.index("aten.mul.Tensor")
    read_as_is = operators_with_products(torch.mm, x, y)
    assert KEPT not in read_as_is


def test_a_matrix_and_its_transpose_are_stored_once() -> None:
    """Whichever comes first: sets of nodes have another order in each trace."""

    def multiply(x: Tensor) -> Tensor:
        powers = x.exp2()
        return powers.t() @ powers

    x = integers(4, 4, seed=0)
    for _ in range(20):
        operators = operators_with_products(multiply, x)
        assert operators.count(KEPT) == 1

    def square(x: Tensor) -> Tensor:
        powers = x.exp2()
        return powers @ powers

    assert operators_with_products(square, x).count(KEPT) == 1


def test_compiled_loops_of_every_layout_and_size() -> None:
    def multiply(pairs: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        return [left.relu() @ right for left, right in pairs]

    lefts = layouts(5, 7, seed=0)
    rights = layouts(7, 19, seed=1)
    pairs = [(left, rights[0]) for left in lefts]
    pairs += [(lefts[0], right) for right in rights]
    for m, k, n in ((0, 4, 5), (3, 0, 5), (3, 4, 0), (1, 9, 1), (2, 300, 33)):
        pairs.append((integers(m, k), integers(k, n)))

    compiled = compile_with_products(multiply, dynamic=False)
    for actual, expected in zip(compiled(pairs), multiply(pairs), strict=True):
        assert torch.equal(actual, expected)


def test_compiled_products_with_gradients() -> None:
    """Forward and backward, of a size that is not known."""
    params = {
        "bias": integers(SIDE, seed=1).requires_grad_(),
        "v": integers(SIDE, SIDE, seed=1).requires_grad_(),
        "w": integers(SIDE, SIDE, seed=1).requires_grad_(),
    }
    leaves = list(params.values())
    compiled = compile_with_products(mlp, dynamic=True)

    for rows in (3, SIDE, SIDE + 9):
        x = integers(rows, SIDE, seed=rows)
        actual = compiled(params, x)
        expected = mlp(params, x)
        assert torch.equal(actual, expected)
        our_grads = torch.autograd.grad(actual.sum(), leaves)
        their_grads = torch.autograd.grad(expected.sum(), leaves)
        for ours, theirs in zip(our_grads, their_grads, strict=True):
            assert torch.equal(ours, theirs)
    global_pass = torch_private.get_post_grad_pass()
    assert global_pass is None, "options of the compiler stay as they are"


def test_compiled_with_sizes_that_only_the_data_knows() -> None:
    def select_rows(x: Tensor, chosen: Tensor, w: Tensor) -> Tensor:
        return (x[chosen] @ w).sum(0)

    x = integers(SIDE, SIDE, seed=0).requires_grad_()
    w = integers(SIDE, SIDE, seed=1).requires_grad_()
    chosen = torch.arange(SIDE) % 3 > 0

    with torch_private.compile_data_dependent_sizes():
        output = compile_with_products(select_rows)(x, chosen, w)

    expected = select_rows(x, chosen, w)
    our_grads = torch.autograd.grad(output.sum(), (x, w))
    their_grads = torch.autograd.grad(expected.sum(), (x, w))
    for ours, theirs in zip(our_grads, their_grads, strict=True):
        assert torch.equal(ours, theirs)


# Where inductor loses gradients


def loss_of_lookup(w: Tensor, x: Tensor) -> Tensor:
    """Its gradient at indices was read before it was written."""
    y = x[:, :3] @ w[:3, :3]
    looked_up = y.square()[:, torch.arange(3)]
    return looked_up.cumsum(1).sum(1) + y.sort(1)[0][:, 1] + y.cummax(1)[0].sum(1)


def loss_of_columns(w: Tensor, x: Tensor) -> Tensor:
    """The gradient of the sum is one number, which was written over."""
    y = (x @ w).clone()
    y[:, torch.tensor([1, 4])] = (x @ w)[:, 2:4].sin()
    return y.sum(1)


def loss_of_mask(w: Tensor, x: Tensor) -> Tensor:
    """Reads y, also after a copy of it was written to; it read what had been written."""
    y = x @ w
    masked = y.clone()
    masked[y > 0] = 0.25
    nearest = functional.interpolate(y[:, None], size=4)[:, 0, torch.arange(6) % 4]
    return masked.sum(1) + nearest.square().sum(1)


def loss_of_diagonal(w: Tensor, x: Tensor) -> Tensor:
    """Writes to a diagonal: in the gradient, zeros were read before the write."""
    y = functional.interpolate((x @ w)[:, None], size=9, mode="linear")[:, 0, :6]
    products = torch.einsum("bi, bj -> bij", y, y.sin()).diagonal(dim1=1, dim2=2)
    products = products.diagonal_scatter(products.diagonal().sin())
    return products.sum(1) + y.amax(1)


def loss_of_greatest(w: Tensor, x: Tensor) -> Tensor:
    """Compares sines, which were rounded by vectors in one loop and one by one in another."""
    return (w[0].sin() * x[:, :1]).amax(1)


def loss_of_ties(w: Tensor, x: Tensor) -> Tensor:
    """Compares two views of one value: arctangents, of which none was equal to itself."""
    y = (x @ w).atan()
    num_ties = (y[:, None] == y[:, :, None]).sum(-1)
    return (y / (1 + num_ties)).sum(1)


LOST = [
    loss_of_lookup,
    loss_of_columns,
    loss_of_mask,
    loss_of_diagonal,
    loss_of_greatest,
    loss_of_ties,
]


@pytest.mark.filterwarnings("ignore:.*torch._prims_common.check:FutureWarning")
@pytest.mark.parametrize("loss_fn", LOST)
def test_compiled_gradients_are_those_of_an_eager_step(loss_fn: Any) -> None:
    sgd = ps.optim.sgd(1.0)
    settings: Any = {
        "loss_fn": loss_fn,
        "optimizer": sgd,
        "weight_fn": lambda x: torch.ones(len(x)),
    }
    w = torch.linspace(-2, 3, 24).view(4, 6).cos()
    state = w, sgd.init(w)
    group = [torch.linspace(-2, 3, 20).view(5, 4).sin()]
    actual, *_ = ps.make_update_step(**settings, compile=True)(*state, group)
    expected, *_ = ps.make_update_step(**settings)(*state, group)
    torch.testing.assert_close(actual, expected)


def test_a_piece_of_a_split_reads_the_memory_of_what_is_split() -> None:
    """A compiled loop copies it, as any view of an input, before it returns it."""

    def list_pieces(x: Tensor) -> list[Tensor]:
        return [*x.split(2), *x.unbind(), x[:2], x.sin()]

    graph = make_fx(list_pieces, tracing_mode="fake")(torch.ones(4)).graph
    (results,) = graph.output_node().args
    *views, sine = [skip_views(result) for result in results]
    assert len(views) == 7
    assert {view.op for view in views} == {"placeholder"}
    assert sine.op == "call_function"


def test_what_cpp_wrapper_cannot_wrap_is_compiled_without_it() -> None:
    """Once, and silently, with the same filter of guards; an error that comes again is raised."""
    num_calls = 0
    num_filtered = 0

    def keep_all(guards: Any) -> list[bool]:
        nonlocal num_filtered
        num_filtered += 1
        return [True] * len(guards)

    def fail(calls: int, graph: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls <= calls:
            raise NotImplementedError("a loop")

    for calls in (1, 2):
        num_calls = 0
        options = {
            "post_grad_custom_post_pass": partial(fail, calls),
            "cpp_wrapper": True,
            "guard_filter_fn": keep_all,
        }
        doubled = ps.compile(lambda x: 2 * x, fullgraph=True, options=options)
        if calls == 1:
            assert torch.equal(doubled(torch.ones(3)), torch.full((3,), 2.0))
            assert num_calls == 2
            assert num_filtered > 0
        else:
            with pytest.raises(Exception, match="a loop"):
                doubled(torch.ones(3))
    assert options["cpp_wrapper"]
