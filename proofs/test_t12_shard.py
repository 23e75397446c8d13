"""T12, sharding. A step on shards gives the shards of the step on full tensors, and its metrics.

    unshard(step(shard(θ), shard(s))) = step(θ, s)

The axis over which the state is cut is the step's own (the ranks that split the tokens), one dimension of it, or one that
does not split tokens (tensor parallelism). The step gathers once, or for each microbatch, or leaves it to the loss. Some shards
are empty, some shorter than others. Norms, clipping and skips are those of the full tensors.
"""

import itertools
from functools import partial
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

import purestep as ps
from purestep import tree
from support.parallel import tensor_parallel_step
from support.ranks import (
    check_metrics,
    check_tensor_parallel,
    run_simulated,
    step_on_full_params,
)
from support.strategies import (
    GATHERS,
    Chooser,
    StepCase,
    assert_same,
    builds,
    make_step_case,
    stack_ranks,
    steps,
)
from support.theorem import System, as_tests, theorem
from support.unit_models import (
    UnitsCase,
    make_keyed_loss,
    make_units_case,
    weigh_rows,
)
from support.worlds import Grid, Ranks, on_threads

SHARDED: dict[str, Any] = {"dtypes": [torch.float64], "gathers": GATHERS}
UNEVEN_GRIDS = [(0, 1), (0, 5), (1, 3), (2, 2), (2, 6)]


def layers_case(choose: Chooser, *columns: int) -> tuple[StepCase, int]:
    """Makes a step on two rows, and chooses the number of columns.

    A layer of four in three columns leaves one of them empty; the other leaves may be cut over the rows.
    """
    case = make_step_case(
        choose,
        dtypes=[torch.float64],
        scalars=False,
        trees=True,
        axes=["threads"],
        ranks=[2],
        gathers=["", "step", "microbatch"],
    )
    return case, choose.choice(columns)


@theorem("T12", builds(layers_case, 1, 2, 3))
def separate_layers(system: System, drawn: tuple[StepCase, int]) -> None:
    """Layers cut over ranks that share tokens: the state and all metrics, to the bit."""
    case, columns = drawn
    check_tensor_parallel(on_threads, case, columns)


@theorem("T12", builds(layers_case, 2, 3))
def simulated_layers(system: System, drawn: tuple[StepCase, int]) -> None:
    """The same in one program, which batches uneven shards, padded to one size."""
    (case, setup, groups), size = drawn
    rows = ps.VmapAxis(2)
    columns = ps.VmapAxis(size)
    grid = Grid(rows, columns, rows)

    def program(_: Any, *inputs: Any) -> Any:
        step = partial(tensor_parallel_step, case.recipe, setup, grid)
        return columns.map(step, in_dims=None, out_dims=None)(*inputs)

    on_grid = run_simulated(rows, program, (None, None, 0))
    actual = on_grid(case.params, case.opt_state, stack_ranks(groups))
    assert_same(actual, step_on_full_params(case, setup, groups))


@theorem("T12", steps(**SHARDED, axes=["threads"], grids=UNEVEN_GRIDS))
def separate_params(system: System, drawn: StepCase) -> None:
    """Params and state cut over the step's own axis, or one of two dimensions of it, whose ranks are uneven."""
    check_metrics(system, drawn)


@theorem("T12", steps(**SHARDED, axes=["simulated"]))
def simulated_params(system: System, drawn: StepCase) -> None:
    """The same in one program, which batches uneven shards."""
    check_metrics(system, drawn)


class TensorCase(NamedTuple):
    """Integers of any shape, a dimension to cut, and how many ranks there are."""

    full: Tensor
    dim: int
    size: int


def make_tensor_case(choose: Chooser) -> TensorCase:
    """Makes a tensor of one to three dimensions, each of zero to five elements."""
    shape = [choose.randrange(6) for _ in range(choose.randint(1, 3))]
    full = torch.randint(-4, 5, shape, generator=choose.generator())
    dim = choose.randrange(len(shape))
    return TensorCase(full.to(torch.float64), dim, choose.randint(1, 4))


class ShardFacts(NamedTuple):
    """What all ranks agree on about shards of params."""

    params: Any
    clipped: Any
    norm: Tensor
    reciprocals_finite: Tensor


CLIP = ps.optim.clip_by_global_norm(1.0)
CLIPPED = ps.optim.chain(CLIP, ps.optim.adamw(0.1))


def facts_of_full(params: dict[str, Tensor]) -> ShardFacts:
    """Computes the facts from full tensors."""
    clipped, _ = CLIP.update(params, (), None)
    elements = torch.cat([leaf.flatten() for leaf in params.values()])
    norm = torch.linalg.vector_norm(elements)
    # Of integers, the reciprocal of 0 alone is not finite.
    return ShardFacts(params, clipped, norm, elements.all())


def facts_of_shards(shards: dict[str, Any]) -> ShardFacts:
    """Computes the facts from shards, by collectives."""
    clipped, _ = CLIP.update(shards, (), None)
    params, clipped = ps.unshard((shards, clipped))
    finite = tree.all_finite(tree.map(torch.reciprocal, shards))
    return ShardFacts(params, clipped, tree.global_norm(shards), finite)


@theorem("T12", builds(make_tensor_case))
def pieces_of_one_tensor(system: System, drawn: TensorCase) -> None:
    """Checks that shards are chunks, and have the norm, clip and finiteness of the full tensor.

    Chunks are those of ``torch.chunk``. Ranks are threads or simulated, and simulated ones pad
    their shards.
    """
    full, dim, size = drawn
    params = {"w": full, "scale": full.sum()}
    expected = facts_of_full(params)
    chunks = [*full.chunk(size, dim)]
    empty = full.narrow(dim, 0, 0)
    chunks += [empty] * (size - len(chunks))

    def program(axis: Any) -> Any:
        shards = ps.shard(params, axis, dim - full.ndim)
        return shards["w"].local, facts_of_shards(shards)

    if size == 1:
        separate = [program(ps.LocalAxis())]
    else:
        separate = on_threads(Ranks(size, 40), program)
    for chunk, (local, facts) in zip(chunks, separate, strict=True):
        assert torch.equal(local, chunk) or not full.numel()
        assert_same(facts, expected)

    on_ranks = run_simulated(
        ps.VmapAxis(size), lambda axis, _: program(axis), out_dims=(0, None)
    )
    padded_shards, facts = on_ranks(torch.arange(size))
    assert_same(facts, expected)
    for padded, (local, _) in zip(padded_shards, separate, strict=True):
        assert torch.equal(padded.narrow(dim, 0, local.shape[dim]), local)
        assert padded.norm() == local.norm()


@theorem("T12", builds(make_tensor_case))
def summed_cotangents(system: System, drawn: TensorCase) -> None:
    """What each rank computes of the gathered tensor adds up: in the gradient of the shards, and of the full tensor."""
    full, dim, size = drawn

    def program(axis: Any, factor: Tensor) -> Any:
        def unshard(local: Tensor) -> Any:
            return ps.unshard(ps.Shard(local, axis, tuple(full.shape), dim))

        def loss_of_shard(local: Tensor) -> Tensor:
            return (factor * unshard(local).square()).sum()

        def loss_of_full(full: Tensor) -> Tensor:
            return loss_of_shard(ps.shard(full, axis, dim).local)

        local = ps.shard(full, axis, dim).local
        grad_of_shard = torch.func.grad(loss_of_shard)(local)
        return unshard(grad_of_shard), torch.func.grad(loss_of_full)(full)

    factors = torch.arange(1, size + 1, dtype=torch.float64)
    grad = 2 * factors.sum() * full
    for grads in on_threads(Ranks(size, 40), program, factors.unbind()):
        assert_same(grads, (grad, grad))
    on_ranks = run_simulated(ps.VmapAxis(size), program)
    assert_same(on_ranks(factors), (grad, grad))


PADDING = st.sampled_from([7.0, torch.inf, torch.nan])


@theorem("T12", st.tuples(builds(make_tensor_case), PADDING))
def filled_up(system: System, drawn: tuple[TensorCase, float]) -> None:
    """A shard's padding is never read: by a norm, a finite check, a gather, a loss."""
    (full, dim, size), padding = drawn

    def loss_fn(w: Any, x: Any) -> Any:
        return w.sum() * x

    def program(axis: Any, _: Tensor) -> Any:
        shard = ps.shard(full, axis, dim)
        ones = ps.shard(torch.ones_like(full), axis, dim)
        shard.local = torch.where(ones.local > 0, shard.local, padding)
        evaluate = system.make_eval_step(loss_fn, weight_fn=torch.ones_like)
        evaluation = evaluate(shard, [torch.ones(1, dtype=torch.float64)])
        return (
            tree.global_norm(shard),
            tree.all_finite(shard),
            ps.unshard(shard),
            ps.psum(evaluation.loss, axis),
        )

    actual = run_simulated(ps.VmapAxis(size), program)(torch.arange(size))
    norm = torch.linalg.vector_norm(full)
    assert_same(actual, (norm, torch.tensor(True), full, full.sum()))


@theorem("T12", builds(make_units_case))
def units_of_modules(system: System, drawn: UnitsCase) -> None:
    """Parts of a module gather their params where they run: nested, called twice, tied, frozen, with dropout, recomputed.

    Ranks have different numbers of microbatches.
    """
    module = drawn.module
    weights = {"weight_fn": weigh_rows}
    params, apply = ps.from_module(module)
    opt_state = CLIPPED.init(params)
    loss_fn = make_keyed_loss(apply, module.training)
    group = [*itertools.chain(*drawn.groups)]
    step = system.make_update_step(loss_fn, CLIPPED, **weights)
    *state, metrics = step(params, opt_state, group)
    evaluation = system.make_eval_step(loss_fn, **weights)(params, group)

    _, apply = ps.from_module(
        module, units=lambda name, _: name in drawn.unit_names, remat=drawn.is_remat
    )
    loss_fn = make_keyed_loss(apply, module.training)

    def program(axis: Any, microbatches: Any) -> Any:
        shards = ps.shard((params, opt_state), axis)
        options: dict[str, Any] = {**weights, "axis": axis, "gather": "loss"}
        evaluate = system.make_eval_step(loss_fn, **options)
        evaluation = evaluate(shards[0], microbatches)
        step = system.make_update_step(loss_fn, CLIPPED, **options, **drawn.settings)
        *state, metrics = step(*shards, microbatches)
        return *ps.unshard(tuple(state)), metrics, evaluation

    ranks = Ranks(len(drawn.groups), 40)
    for result in on_threads(ranks, program, drawn.groups):
        assert_same(result, (*state, metrics, evaluation))


globals().update(as_tests(globals()))
