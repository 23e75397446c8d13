"""Tests units of modules, which gather their own shards: what is refused, what goes wrong on a rank, what is alive.

T12 compares their numbers with those of full params, and tests/model_families.py models of transformers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import purestep as ps
from purestep.testing import ThreadAxis
from support.strategies import assert_same
from tests.memory import LiveBytes

pytestmark = pytest.mark.timeout(60)

WIDTH = 8
OPTIMIZER = ps.optim.sgd(0.5)


class Block(nn.Module):
    """A layer of integers, which calls ``then`` on its result."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        weight = torch.arange(width * width).view(width, width) % 5 - 2
        self.weight = nn.Parameter(weight.to(torch.float64))
        self.then: Callable[[Tensor], Tensor] = torch.relu

    def forward(self, x: Tensor) -> Tensor:
        return self.then(x @ self.weight) * 0.125


class Model(nn.Module):
    """Blocks between two layers, which are in no unit."""

    def __init__(self, num_blocks: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.first = Block(width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().sum(-1)


def is_block(name: str, module: nn.Module) -> bool:
    return name.startswith("blocks.") and isinstance(module, Block)


def weigh_rows(x: Tensor) -> Tensor:
    return torch.ones(len(x), dtype=torch.int64)


def make_rows(count: int) -> Tensor:
    """Makes integers."""
    return (torch.arange(count * WIDTH).view(count, WIDTH) % 7 - 3).to(torch.float64)


def make_step(apply: Callable[..., Any], axis: ps.Axis, **settings: Any) -> Any:
    """Makes a step on the ranks' rows."""
    return ps.make_update_step(
        apply,
        OPTIMIZER,
        weight_fn=weigh_rows,
        axis=axis,
        **{"gather": "loss", **settings},
    )


def step_on_one_rank(model: nn.Module, rows: Tensor) -> Any:
    """Takes a step on full params."""
    params, apply = ps.from_module(model)
    step = make_step(apply, ps.LocalAxis(), gather="step")
    return step(params, OPTIMIZER.init(params), [rows])


def step_on_ranks(
    model: nn.Module, groups: list[list[Tensor]], **settings: Any
) -> list[Any]:
    """Takes a step on shards, on threads, and returns full params and metrics of each rank."""
    axis = ThreadAxis(len(groups))
    params, apply = ps.from_module(model, **{"units": is_block, **settings})
    step = make_step(apply, axis)

    def program(group: list[Tensor]) -> Any:
        shards = ps.shard(params, axis)
        new_params, _, metrics = step(shards, OPTIMIZER.init(shards), group)
        return ps.unshard(new_params), metrics

    return axis.map(program)(groups)


# What is right


WAYS: dict[str, dict[str, Any]] = {
    "activations stay": {},
    "inputs stay": {"remat": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_class_of_units(way: str) -> None:
    """Takes the step of one rank, to the bit."""
    rows = make_rows(8)
    expected, _, expected_metrics = step_on_one_rank(Model(), rows)
    groups = [[rows[:1]], [rows[1:3], rows[3:8]]]
    for params, metrics in step_on_ranks(Model(), groups, units=Block, **WAYS[way]):
        assert_same(params, expected)
        assert_same(metrics.loss, expected_metrics.loss)


def test_units_in_one_program() -> None:
    """Gathers under vmap, where nothing can be saved or recomputed."""
    axis = ps.VmapAxis(2)
    rows = make_rows(8)
    expected, _, _ = step_on_one_rank(Model(), rows)
    params, apply = ps.from_module(Model(), units=Block)
    step = make_step(apply, axis)

    def program(rows: Tensor) -> Any:
        shards = ps.shard(params, axis)
        new_params, _, _ = step(shards, OPTIMIZER.init(shards), [rows])
        return ps.unshard(new_params)

    assert_same(axis.map(program, out_dims=None)(rows.view(2, 4, WIDTH)), expected)


def test_units_of_one_graph() -> None:
    """Compiles a call, which gathers all params at its start."""
    params, apply = ps.from_module(Model(), units=Block)
    shards = ps.shard(params, ps.LocalAxis())
    rows = make_rows(8)
    compiled = torch.compile(apply, backend="aot_eager", fullgraph=True)
    assert_same(compiled(shards, rows), apply(params, rows))


@pytest.mark.parametrize("way", WAYS)
def test_hooks_and_saved_tensors_of_the_caller(way: str) -> None:
    """Calls a unit's hooks once in each run of it, and packs its activations by the caller's hooks."""
    model = Model()
    calls = []
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append("called"))
    axis = ThreadAxis(2)
    params, apply = ps.from_module(model, units=is_block, **WAYS[way])

    def loss_fn(params: Any, rows: Tensor) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return apply(params, rows)

    step = make_step(loss_fn, axis)
    rows = make_rows(8)

    def program(rows: Tensor) -> Any:
        shards = ps.shard(params, axis)
        return ps.unshard(step(shards, OPTIMIZER.init(shards), [rows])[0])

    expected, _, _ = step_on_one_rank(Model(), rows)
    for new_params in axis.map(program)([rows[:4], rows[4:]]):
        assert_same(new_params, expected)
    runs_per_rank = 2 if "remat" in WAYS[way] else 1
    assert len(calls) == 2 * runs_per_rank


def test_a_checkpoint_inside_of_a_unit() -> None:
    """Finds the unit's params when the backward pass calls its parts again."""
    model = Model()
    for block in model.blocks:
        inner = block.forward
        block.forward = partial(checkpoint, inner, use_reentrant=False)
    rows = make_rows(8)
    expected, _, _ = step_on_one_rank(Model(), rows)
    for params, _ in step_on_ranks(model, [[rows[:4]], [rows[4:]]]):
        assert_same(params, expected)


class PassesOn(Block):
    """Returns its input beside its result, as layers do with a cache or a mask."""

    def forward(self, x: Tensor) -> Any:
        return x, super().forward(x)


class Sums(nn.Module):
    """Adds what each block passes on."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PassesOn() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            passed, result = block(x)
            x = passed + result
        return x.square().sum(-1)


@pytest.mark.parametrize("way", WAYS)
def test_a_unit_that_passes_its_input_on(way: str) -> None:
    """Gathers as often as other units: not where the gradient of its input flows elsewhere."""
    axis = ThreadAxis(2)
    params, apply = ps.from_module(Sums(), units=is_block, **WAYS[way])
    step = make_step(apply, axis)
    rows = make_rows(8)

    def program(rows: Tensor) -> Any:
        shards = ps.shard(params, axis)
        state = OPTIMIZER.init(shards)
        step(
            shards, state, [rows]
        )  # A first step asks before each gather who takes part.
        before = axis.num_collectives
        new_params, _, _ = step(shards, state, [rows])
        num_collectives = axis.num_collectives - before
        return ps.unshard(new_params), num_collectives

    expected, _, _ = step_on_one_rank(Sums(), rows)
    for new_params, num_collectives in axis.map(program)([rows[:4], rows[4:]]):
        assert_same(new_params, expected)
        # Three for each of three units, two messages, and the norm.
        assert num_collectives == 3 * 3 + 3


@pytest.mark.parametrize("way", WAYS)
def test_later_updates_launch_nothing_but_gathers_and_scatters(way: str) -> None:
    """Knows the root's gather again in the second microbatch, after those of units."""
    axis = ThreadAxis(2)
    params, apply = ps.from_module(Model(), units=is_block, **WAYS[way])
    step = make_step(apply, axis)
    group = [make_rows(2), make_rows(3)]

    def count_collectives(_: int) -> int:
        shards = ps.shard(params, axis)
        state = OPTIMIZER.init(shards)
        step(shards, state, group)
        before = axis.num_collectives
        step(shards, state, group)
        return axis.num_collectives - before

    # In each microbatch three for each of three units, and two of the root; two messages, and the
    # norm.
    assert axis.map(count_collectives)(range(2)) == [2 * (3 * 3 + 2) + 3] * 2


def test_a_param_that_a_partial_holds_is_the_root_s() -> None:
    """Gathers it at the start of the call: the partial is made anew in each call."""
    model = Model()
    block: Any = model.blocks[1]
    block.then = partial(functional.linear, weight=block.weight)
    rows = make_rows(8)
    expected, _, _ = step_on_one_rank(model, rows)
    for params, _ in step_on_ranks(model, [[rows[:4]], [rows[4:]]]):
        assert_same(params, expected)


def test_sums_of_half_precision_are_float32() -> None:
    """Reduces the gradients of bfloat16 params in float32, as without units."""
    rows = make_rows(8).to(torch.bfloat16)
    axis = ThreadAxis(2)
    results = []
    for units, gather in ((None, "microbatch"), (Block, "loss")):
        params, apply = ps.from_module(Model().to(torch.bfloat16), units=units)
        step = make_step(apply, axis, gather=gather)

        def program(rows: Tensor, params: Any = params, step: Any = step) -> Any:
            shards = ps.shard(params, axis)
            group = [*rows.split(1)]
            return ps.unshard(step(shards, OPTIMIZER.init(shards), group)[0])

        results.append(axis.map(program)([rows[:4], rows[4:]]))
    assert_same(results[1], results[0])


def test_frozen_shards_have_no_gradient() -> None:
    """Gathers them beside others, and computes no gradient that nothing asks for."""
    axis = ThreadAxis(2)

    def program(rank: int) -> None:
        shards = ps.shard({"w": torch.ones(4), "frozen": torch.ones(4)}, axis)
        shards["w"].local.requires_grad_()
        full = ps.unshard(shards)
        assert full["w"].requires_grad
        assert not full["frozen"].requires_grad
        full["w"].sum().backward()
        assert_same(shards["w"].local.grad, torch.full((2,), 2.0))

    axis.map(program)(range(2))


# What is refused


def test_units_that_choose_nothing() -> None:
    with pytest.raises(ValueError, match="chooses no part of Model"):
        ps.from_module(Model(), units=nn.Linear)


def test_units_that_are_no_choice() -> None:
    with pytest.raises(TypeError, match="must be a class of modules"):
        ps.from_module(Model(), units="blocks.*")  # type: ignore[arg-type]


def test_a_unit_that_is_not_called() -> None:
    with pytest.raises(ValueError, match="blocks is a ModuleList, which is not called"):
        ps.from_module(Model(), units=nn.ModuleList)


class Reads(nn.Module):
    """Computes with a block's weight without a call of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        assert self.block.weight.shape == (WIDTH, WIDTH)
        return (x @ self.block.weight).sum(-1)


def test_a_param_outside_of_its_unit() -> None:
    with pytest.raises(
        RuntimeError, match=r"block\.weight is used outside of the call"
    ):
        step_on_ranks(Reads(), [[make_rows(1)], [make_rows(1)]], units=Block)


class Caches(nn.Module):
    """Passes a cache to its block, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.block.forward = self.write  # type: ignore[assignment, method-assign]

    def write(self, x: Tensor, past_key_values: list[Tensor]) -> Tensor:
        past_key_values.append(x)
        return x @ self.block.weight

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.block(x, past_key_values=[])
        return output.sum(-1)


def test_a_cache_in_a_unit_that_is_recomputed() -> None:
    groups = [[make_rows(1)], [make_rows(1)]]
    with pytest.raises(ValueError, match="pass use_cache=False"):
        step_on_ranks(Caches(), groups, units=Block, remat=True)
    assert step_on_ranks(Caches(), groups, units=Block)


class Clamps(Block):
    """Writes to its weight, which each call gathers anew."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-1, 1)
        return super().forward(x)


@pytest.mark.parametrize("way", WAYS)
def test_a_unit_that_writes_to_its_params(way: str) -> None:
    model = Model()
    model.blocks[1] = Clamps()
    with pytest.raises(ValueError, match=r"writes to blocks\.1\.weight"):
        step_on_ranks(model, [[make_rows(1)], [make_rows(1)]], **WAYS[way])


class ScaledBlock(Block):
    """Multiplies by a param that it finds in a closure, or under a layer as key."""

    def __init__(self, way: str) -> None:
        super().__init__()
        weight = self.weight
        self.layer = nn.Identity()
        self.scale: Any = lambda: weight[0, 0]
        if way == "key":
            self.params_of = {self.layer: weight}
            self.scale = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is not None:
            return super().forward(x) * self.scale()
        return super().forward(x) * self.params_of[self.layer][0, 0]


@pytest.mark.parametrize("settings", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("way", ["closure", "key"])
def test_a_param_that_another_way_leads_to(way: str, settings: dict[str, Any]) -> None:
    """Gathers it with the root: in the unit's call, a closure would have the shard."""
    model = Model()
    model.blocks[1] = ScaledBlock(way)
    rows = make_rows(8)
    expected, _, _ = step_on_one_rank(model, rows)
    for params, _ in step_on_ranks(model, [[rows[:4]], [rows[4:]]], **settings):
        assert_same(params, expected)


class PassesWeight(nn.Module):
    """Lets an inner unit multiply by a param of this one, of which two inner units hold one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.full((WIDTH,), 2.0, dtype=torch.float64))
        self.inner = Multiplies()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.second(self.first(x)), self.scale)


class Multiplies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return (x + self.shift) * scale


def test_units_that_share_params_with_the_unit_around_them() -> None:
    """Gathers each param by the unit that holds it, also in the backward pass of another one."""
    model = Model()
    model.blocks[1] = PassesWeight()
    rows = make_rows(8)
    expected, _, _ = step_on_one_rank(model, rows)
    units = (Block, PassesWeight, Multiplies)
    for params, _ in step_on_ranks(model, [[rows[:4]], [rows[4:]]], units=units):
        assert_same(params, expected)


# Ranks that go wrong


def run_other_order(module: Any, x: Tensor, is_other: bool) -> Tensor:
    """Runs the blocks backwards on one rank."""
    blocks = [*module.blocks]
    for block in reversed(blocks) if is_other else blocks:
        x = block(x)
    return x.square().sum(-1)


class Ordered(Model):
    def forward(self, x: Tensor, is_other: bool = False) -> Tensor:
        return run_other_order(self, x, is_other)


def make_ordered_step(axis: ps.Axis) -> tuple[Any, Any]:
    """Makes params, and a step whose microbatches say in which order the blocks run."""
    params, apply = ps.from_module(Ordered(), units=Block)

    def loss_fn(params: Any, microbatch: Any) -> Any:
        return apply(params, microbatch["x"], is_other=bool(microbatch["other"]))

    step = ps.make_update_step(
        loss_fn,
        OPTIMIZER,
        weight_fn=lambda microbatch: weigh_rows(microbatch["x"]),
        axis=axis,
        gather="loss",
    )
    return params, step


FIRST_DIFFERENCE = (
    r"disagree on what their losses gather .*"
    r"ranks 0, 2 with 1\. all_gather for blocks\.0 .* against "
    r"rank 1 with 1\. all_gather for blocks\.2 "
)
LATER_DIFFERENCE = (
    r"runs all_gather for blocks\.2 .* where it ran all_gather for blocks\.0 "
)
OTHER_ORDERS = {0: FIRST_DIFFERENCE, 1: LATER_DIFFERENCE}
"""Words of the errors of all ranks, by the number of earlier updates."""


@pytest.mark.parametrize("num_earlier", OTHER_ORDERS)
def test_another_order_of_units(num_earlier: int) -> None:
    """Says on all ranks which unit differs first, and updates nothing; the next step is right."""
    axis = ThreadAxis(3)
    params, step = make_ordered_step(axis)
    rows = make_rows(8)
    parts = [rows[:2], rows[2:4], rows[4:]]

    def program(rank: int) -> Any:
        shards = ps.shard(params, axis)
        state = OPTIMIZER.init(shards)
        other = torch.tensor(rank == 1)
        right = {"x": parts[rank], "other": torch.tensor(False)}
        for _ in range(num_earlier):
            step(shards, state, [right])
        errors = (ValueError, ps.RankError)
        with pytest.raises(errors, match=OTHER_ORDERS[num_earlier]):
            step(shards, state, [{"x": parts[rank], "other": other}])
        return ps.unshard(step(shards, state, [right])[0])

    expected, _, _ = step_on_one_rank(Ordered(), rows)
    for new_params in axis.map(program)(range(3)):
        assert_same(new_params, expected)


ORDERS = {
    "in the second update": [[False], [True], [False]],
    "in each update": [[False], [True], [False], [True], [True]],
    "between microbatches": [[False, True], [False, True], [False, False], [True]],
}
"""Whether blocks run in the other order, by update and microbatch."""


@pytest.mark.parametrize("name", ORDERS)
def test_orders_of_units_may_vary(name: str) -> None:
    """Runs any order, as long as all ranks do."""
    axis = ThreadAxis(2)
    rows = make_rows(8).chunk(2)

    def program(axis: ps.Axis, parts: list[Tensor]) -> Any:
        params, step = make_ordered_step(axis)
        params, state = ps.shard((params, OPTIMIZER.init(params)), axis)
        results = []
        for others in ORDERS[name]:
            group = []
            for part in parts:
                for x, other in zip(part.chunk(len(others)), others, strict=True):
                    group.append({"x": x, "other": torch.tensor(other)})
            new_params, new_state, _ = step(params, state, group)
            results.append(ps.unshard((new_params, new_state)))
        return results

    expected = program(ps.LocalAxis(), [*rows])
    for results in axis.map(lambda part: program(axis, [part]))(rows):
        assert_same(results, expected)


def test_a_nan_on_one_rank_is_skipped_on_all() -> None:
    axis = ThreadAxis(2)
    params, apply = ps.from_module(Model(), units=Block)
    step = make_step(apply, axis, on_nonfinite="skip")

    def program(rank: int) -> Any:
        shards = ps.shard(params, axis)
        rows = make_rows(2)
        if rank:
            rows[0] = torch.nan
        new_params, _, metrics = step(shards, OPTIMIZER.init(shards), [rows])
        assert not metrics.applied
        return ps.unshard(new_params)

    for new_params in axis.map(program)(range(2)):
        assert_same(new_params, params)


# What is alive


def peak_bytes(num_blocks: int, width: int, num_earlier: int, **options: Any) -> float:
    """Measures the peak of a step above the state, in full blocks, of two microbatches.

    The step is the first one, or follows on ``num_earlier`` others.
    """
    axis = ThreadAxis(2)
    params, apply = ps.from_module(Model(num_blocks, width), units=is_block, **options)
    step = make_step(apply, axis, donate=True)
    rows = torch.ones(1, width, dtype=torch.float64)

    def program(rank: int) -> float:
        shards = ps.shard(params, axis)
        state = OPTIMIZER.init(shards)
        for _ in range(num_earlier):
            shards, state, _ = step(shards, state, [rows] * 2)
        with LiveBytes() as live:
            step(shards, state, [rows] * 2)
        return live.peak

    return max(axis.map(program)(range(2))) / (width * width * 8)


@pytest.mark.parametrize("num_earlier", [0, 1], ids=["first", "later"])
@pytest.mark.parametrize("way", WAYS)
def test_a_further_block_adds_its_shard_of_the_gradients_alone(
    way: str, num_earlier: int
) -> None:
    """Keeps no further full block alive: 8 blocks more are 8 halves of a gradient more.

    Threads do not wait for each other where they free, so a full block or two may be alive beside.
    The first update, which is checked, keeps none either.
    """
    few, many = (peak_bytes(number, 64, num_earlier, **WAYS[way]) for number in (8, 16))
    assert many - few <= 8 / 2 + 2


class Rotates(Block):
    """Multiplies by the conjugate of complex numbers that do not train."""

    def __init__(self) -> None:
        super().__init__()
        parts = torch.arange(2.0 * WIDTH, dtype=torch.float64).view(WIDTH, 2)
        turns = torch.view_as_complex(parts)
        self.turns = nn.Parameter(turns, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.complex(super().forward(x), x)
        turned = y.square() * self.turns.conj()
        return turned.real


def test_a_conjugated_param_of_a_unit_is_saved_as_it_is() -> None:
    model = Model(1)
    model.blocks[0] = Rotates()
    params, apply = ps.from_module(model, units=is_block)
    x = make_rows(1).requires_grad_()
    expected = torch.autograd.grad(model(x).sum(), x)
    axis = ThreadAxis(2)

    def program(_: int) -> Any:
        shards = ps.shard(params, axis)
        frozen = ps.shard(apply.frozen, axis)
        rows = x.detach().requires_grad_()
        loss = apply(shards, rows, frozen=frozen).sum()
        return torch.autograd.grad(loss, rows)

    for gradient in axis.map(program)([0, 1]):
        assert_same(gradient, expected)
