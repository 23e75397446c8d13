"""What is rewritten in graphs for CPUs: each rewrite alone, and all of them in what is compiled."""

import re
import timeit
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import purestep as ps
from purestep.compiling.cpu import (
    LEAST,
    MANY,
    hoist_scalars,
    options,
    product,
    split_addmm,
    use_onednn,
)
from tests import torch_private
from tests.held_by_ranks import group_of_one

STEP = torch.tensor(3)
LEAF = torch.linspace(-1, 1, 4 * MANY)
KEPT = "aten.as_strided.default"
SIDE = 192  # SIDE ** 3 > LEAST


def corrected(step: Tensor, leaf: Tensor) -> Tensor:
    return leaf / (1 - 0.9 ** step.to(torch.float64)).to(leaf.dtype)


def twice(step: Tensor, leaf: Tensor) -> tuple[Tensor, Tensor]:
    power = 0.9**step
    return leaf * power, leaf * (1 - power)


def halves(step: Tensor, leaf: Tensor) -> list[Tensor]:
    return [leaf * half for half in (0.9**step).unbind()]


NETWORKS = torch.vmap(corrected), torch.arange(1, 5), LEAF.repeat(4, 1)
TIMES_KEPT: dict[str, tuple[int, Any]] = {
    "where many begin to use it": (1, (corrected, STEP, LEAF)),
    "for each of many networks": (1, NETWORKS),
    "where many use it twice": (1, (twice, STEP, LEAF)),
    "where the size is not known yet": (1, (corrected, STEP, LEAF[:3], "symbolic")),
    "not for hardly more than one": (0, (corrected, STEP, LEAF[: MANY - 1])),
    "not for as many as it has": (0, (corrected, LEAF.abs(), LEAF)),
    "not if it costs little": (0, (lambda step, leaf: leaf * (1 - step), STEP, LEAF)),
    "not if many do not use it": (
        0,
        (lambda step, leaf: (0.9**step, leaf), STEP, LEAF),
    ),
    "not if each part has many": (0, (halves, torch.ones(2), LEAF)),
    "not for networks of unknown size": (0, (*NETWORKS, "symbolic")),
}


def operators_after(
    rewrite: Callable[[torch.fx.Graph], None],
    function: Callable[..., Any],
    *args: Any,
    mode: Literal["fake", "symbolic"] = "fake",
) -> list[str]:
    """The operators of a function's graph once it is rewritten; it must still compute the same."""
    graph = make_fx(function, torch_private.decompositions_of_the_compiler(), mode)(
        *args
    )
    rewrite(graph.graph)
    graph.graph.lint()
    graph.recompile()
    torch.testing.assert_close(
        graph(*args), function(*args), rtol=0, atol=0, equal_nan=True
    )
    return [
        str(node.target) for node in graph.graph.nodes if node.op == "call_function"
    ]


def operators(
    function: Any, step: Tensor, leaf: Tensor, mode: Any = "fake"
) -> list[str]:
    return operators_after(hoist_scalars, function, step, leaf, mode=mode)


@pytest.mark.parametrize("case", TIMES_KEPT)
def test_a_costly_number_is_kept_once(case: str) -> None:
    times, given = TIMES_KEPT[case]
    assert operators(*given).count(KEPT) == times


def test_what_is_kept_is_what_the_many_see() -> None:
    """The power and what is made of it stay together."""
    found = operators(corrected, STEP, LEAF)
    assert found.index(KEPT) == found.index("aten.div.Tensor") - 1


def few_of(x: Tensor) -> Tensor:
    return (-x).exp() + 0.5


def views(few: Tensor, many: Tensor) -> tuple[Tensor, ...]:
    """Views of a few that many see, in every order."""
    power = few_of(few)[0, 0] ** 2
    return (
        many * few_of(few)[1, 2],
        many * few_of(few).t()[:, 1:].reshape(3, 1, 1, 1),
        many + few_of(few[1:].t())[..., None, None] * few_of(few)[0, 1],
        many + few_of(few.t().expand(3, 2)).sum() + few_of(few)[1:, 1:].cos()[0, 1],
        many * power,
        many / power,
        many * few_of(many.amax((2, 3)))[..., None, None],
    )


def test_compiled_of_views() -> None:
    """Whatever view of the few the many see, and in whatever order of memory the few lie."""
    many = torch.linspace(-1, 1, 6 * 8 * 8).reshape(3, 2, 8, 8)[:, :2]
    compiled = ps.compile(views, options={"cpp_wrapper": False})
    for few in (
        torch.linspace(0, 1, 6).reshape(2, 3),
        torch.linspace(0, 1, 6).reshape(3, 2).t(),
    ):
        torch.testing.assert_close(compiled(few, many), views(few, many))


def test_a_compiled_step_of_many_networks_takes_powers_once() -> None:
    """As many as there are in the formula, in none of the loops over elements."""

    def loss_fn(params: list[Tensor], x: Tensor) -> Tensor:
        return sum((leaf.sum() * x for leaf in params), torch.zeros(()))

    optimizer = ps.optim.adamw(0.1)
    update_step = ps.make_update_step(
        loss_fn, optimizer, weight_fn=lambda x: x.new_ones(())
    )
    params = [torch.ones(8, 64), torch.ones(8, 16, 16)]
    networks = torch.vmap(lambda params, state, x: update_step(params, state, [x]))
    given = params, torch.vmap(optimizer.init)(params), torch.ones(8)
    step = ps.compile(networks, fullgraph=True)
    (new, *_), code = torch_private.code_of_the_compiler(step, *given)
    assert len(re.findall(r"std::pow\(|\.pow\(", code)) == 2
    torch.testing.assert_close(new, networks(*given)[0])


def integers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small enough that every sum of products is exact, in whatever order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


def layouts(rows: int, columns: int, seed: int) -> list[Tensor]:
    """The same shape, in each way in which it may lie in memory: rows, columns, with gaps, as one row or column, as windows."""
    wide = integers(rows, columns + 9, seed=seed).flatten()
    return [
        integers(rows, columns, seed=seed),
        integers(columns, rows, seed=seed).t(),
        integers(rows, 2 * columns, seed=seed)[:, ::2],
        integers(1, columns, seed=seed).expand(rows, columns),
        integers(rows, 1, seed=seed).expand(rows, columns),
        wide.unfold(0, columns, 1)[:rows],
        wide.as_strided((rows, columns), (7, 3)),
    ]


def mlp(params: Any, x: Tensor) -> Tensor:
    hidden = torch.nn.functional.linear(x, params["w"], params["bias"]).relu()
    return hidden @ params["v"] + x


def products_alone(graph: torch.fx.Graph) -> None:
    split_addmm(graph)
    use_onednn(graph)


def compiled(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """With these products on whatever processor this is."""
    options: Any = {"post_grad_custom_post_pass": products_alone}
    return torch.compile(function, options=options, **settings)


replaced = partial(operators_after, products_alone)


def test_products_of_every_layout_and_size() -> None:
    every, others = layouts(SIDE, SIDE + 16, 0), layouts(SIDE + 16, SIDE - 8, 1)
    sizes = [(0, 4, 5), (3, 0, 5), (3, 4, 0), (1, 1, 1), (1, LEAST, 1)]
    for a, b in (
        *((each, others[0]) for each in every),
        *((every[0], each) for each in others),
        *((integers(m, k), integers(k, n)) for m, k, n in sizes),
    ):
        assert torch.equal(product(a, b), a @ b)
        assert product(a, b).is_contiguous()
    assert every[0].shape[0] * others[0].numel() >= LEAST


def test_wrappers_in_cpp_are_for_one_process() -> None:
    assert options()["cpp_wrapper"] != torch.accelerator.is_available()
    with group_of_one():
        assert not options()["cpp_wrapper"]


def test_products_of_gaps_take_the_time_of_products() -> None:
    """Without a copy, oneDNN takes a thousand times as long."""
    a = integers(SIDE, SIDE)
    times = [
        min(timeit.repeat(partial(product, a, b), number=1))
        for b in layouts(SIDE, SIDE, 1)
    ]
    assert max(times[1:]) < 100 * times[0]


def test_what_repays_is_replaced() -> None:
    x, y, z = (integers(SIDE, SIDE, seed=seed) for seed in range(3))
    ours, theirs = "purestep.product.default", "aten.mm.default"
    assert replaced(torch.mm, x, y) == [ours]
    assert replaced(torch.addmm, z, x, y) == [ours, "aten.add.Tensor"]
    assert replaced(torch.addmm, z[0], x, y) == [ours, "aten.add.Tensor"]
    assert replaced(lambda x, y: x.t() @ y, x, y)[-2:] == ["aten.clone.default", ours]
    assert replaced(torch.mm, x[:8], y) == [theirs]
    assert replaced(torch.mm, x.double(), y.double()) == [theirs]
    wide, whole = (
        [each.to(dtype) for each in (z, x, y)] for dtype in (torch.float64, torch.int64)
    )
    assert replaced(torch.addmm, *wide) == [theirs, "aten.add.Tensor"]
    assert replaced(torch.addmm, *whole) == ["aten.addmm.default"]
    assert ours not in replaced(torch.mm, x.bfloat16(), y.bfloat16())
    for scaled in (partial(torch.addmm, beta=2), partial(torch.addmm, beta=2, alpha=3)):
        assert replaced(scaled, z, x, y) == ["aten.addmm.default"]


def test_compiled_products_with_gradients() -> None:
    """Forward and backward, of a size that is not known."""
    shapes = {"bias": (SIDE,), "v": (SIDE, SIDE), "w": (SIDE, SIDE)}
    params = {
        name: integers(*shape, seed=1).requires_grad_()
        for name, shape in shapes.items()
    }
    step = compiled(mlp, dynamic=True)
    for rows in (SIDE, 3, SIDE + 9):
        x = integers(rows, SIDE, seed=rows)
        outputs = [function(params, x) for function in (step, mlp)]
        assert torch.equal(*outputs)
        grads = [
            torch.autograd.grad(output.sum(), [*params.values()]) for output in outputs
        ]
        assert all(map(torch.equal, *grads))
    assert torch_private.pass_of_the_compiler() is None, (
        "options of the compiler stay as they are"
    )


def test_compiled_with_sizes_that_only_the_data_knows() -> None:
    def picked(x: Tensor, chosen: Tensor, w: Tensor) -> Tensor:
        return (x[chosen] @ w).sum(0)

    x, w = (integers(SIDE, SIDE, seed=seed).requires_grad_() for seed in range(2))
    chosen = torch.arange(SIDE) % 3 > 0
    with torch_private.compiling_sizes_of_data():
        output = compiled(picked)(x, chosen, w)
    ours = torch.autograd.grad(output.sum(), (x, w))
    theirs = torch.autograd.grad(picked(x, chosen, w).sum(), (x, w))
    assert all(map(torch.equal, ours, theirs))
