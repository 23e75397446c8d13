"""Takes drawn steps on one rank, on simulated ones, on threads and on processes, and checks the claims about them."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import purestep as ps
from purestep import tree
from purestep.testing.bounds import rounding_bound
from purestep.testing.specification import spec
from support import models, parallel
from support.bridge import make_bridged_step
from support.optimizers import CAPTURE, OPTIMIZERS
from support.strategies import (
    LAYOUTS,
    Batch,
    Case,
    Groups,
    Setup,
    StepCase,
    assert_same,
    change_layout,
    copy_state,
    get_weights,
    make_opt_state,
    stack_ranks,
)
from support.texts import RealStepCase
from support.theorem import System
from support.worlds import Grid, Ranks, on_threads

Run = Callable[..., list[Any]]
"""``run(ranks, program, *args)``, on threads or on processes."""


COMPILER = partial(torch.compile, backend="eager")


@dataclass(frozen=True)
class Program:
    """A step of a rank on its local microbatches, in any setup; and an evaluation, if ``evaluates``.

    Processes look the optimizer up by its name.
    """

    system: System
    setup: Setup
    loss_fn: Callable[..., Any]
    optimizer: ps.optim.Optimizer | str
    weight_fn: Any = get_weights
    evaluates: bool = False

    def __call__(
        self, axis: Any, params: Any, opt_state: Any, microbatches: list[Batch]
    ) -> Any:
        """Returns the full state, the metrics, and those of the evaluation if it ``evaluates``."""
        if self.setup.stacks:
            microbatches = stack_if_alike(microbatches)
        step_axis = axis.both if isinstance(axis, Grid) else axis
        options: dict[str, Any] = {"weight_fn": self.weight_fn, "axis": step_axis}
        loss_fn = self.loss_fn
        if self.setup.gather:
            shard_axis = axis.second if isinstance(axis, Grid) else axis
            params, opt_state = ps.shard((params, opt_state), shard_axis)
            options["gather"] = self.setup.gather.removesuffix(", recomputed")
            loss_fn = self.gathering_loss()
        evaluations = []
        if self.evaluates:
            evaluate = self.system.make_eval_step(loss_fn, **options)
            evaluations = [evaluate(params, microbatches)]
        make_update_step = self.system.make_update_step
        if self.bridges():
            make_update_step = make_bridged_step
            is_compiled = self.setup.bridge == "compiled" and self.setup.axis == "one"
            options["compile"] = COMPILER if is_compiled else False
        step = make_update_step(
            loss_fn, self.find_optimizer(), **options, **self.setup.settings
        )
        if step_axis.is_multi_program:
            step = self.with_checks(step)
        *state, metrics = step(params, opt_state, microbatches)
        return *ps.unshard(tuple(state)), metrics, *evaluations

    def bridges(self) -> bool:
        """Returns whether ``make_backward`` takes this step: ``setup.bridge`` asks for it.

        It takes no shards, no transforms, and no step of a system that is watched.
        """
        setup = self.setup
        is_plain = setup.axis != "simulated" and not setup.gather
        is_watched = self.system.make_update_step is not ps.make_update_step
        return bool(setup.bridge) and is_plain and not is_watched

    def gathering_loss(self) -> Callable[..., Any]:
        """Returns the loss, which gathers the params itself where the setup leaves that to it."""
        if not self.setup.gather.startswith("loss"):
            return self.loss_fn

        def loss_fn(params: Any, microbatch: Batch) -> Any:
            return self.loss_fn(ps.unshard(params), microbatch)

        if self.setup.gather == "loss, recomputed":
            return ps.remat(loss_fn)
        return loss_fn

    def find_optimizer(self) -> ps.optim.Optimizer:
        """Looks the optimizer up if it is a name."""
        if isinstance(self.optimizer, str):
            return OPTIMIZERS[self.optimizer]
        return self.optimizer

    def with_checks(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the step, which asserts that it leaves its inputs alone, or donates the params' memory."""

        def checked(*inputs: Any) -> Any:
            params, opt_state, microbatches = inputs
            inputs = params, opt_state, [*microbatches]
            before = copy_state(inputs)
            input_addresses = addresses(inputs[:2])
            param_addresses = addresses(inputs[0])
            input_strides = strides(inputs[:2])

            *state, metrics = step(params, opt_state, microbatches)

            if self.setup.settings.get("donate"):
                same_memory = addresses(state[0]) == param_addresses
                assert same_memory, "params moved in memory"
            else:
                after, before = tree.map(torch.nan_to_num, (inputs, before))
                assert_same(after, before, "a rank's inputs")
                shared = {*addresses(state)} & {*input_addresses}
                assert not shared, "an output lives in an input's storage"
                assert strides(state) == input_strides, "another order in memory"
            return *state, metrics

        return checked


def stack_if_alike(microbatches: Any) -> Any:
    """Stacks microbatches of equal shapes to one tree; returns others as they are."""
    shapes = {tuple(leaf.shape for leaf in tree.leaves(part)) for part in microbatches}
    return ps.stack(microbatches) if len(shapes) == 1 else microbatches


def addresses(state: Any) -> list[int]:
    """Returns the addresses in memory of the leaves that have elements."""
    return [leaf.data_ptr() for leaf in tree.leaves(state) if leaf.numel()]


def strides(state: Any) -> list[tuple[int, ...]]:
    """Returns the strides that the leaves have without gaps."""
    return [torch.empty_like(leaf).stride() for leaf in tree.leaves(state)]


def take_step(
    system: System,
    setup: Setup,
    state: Any,
    groups: Groups,
    loss_fn: Callable[..., Any],
    optimizer: ps.optim.Optimizer | str,
    weight_fn: Any = get_weights,
    *,
    evaluates: bool = False,
    run: Run = on_threads,
) -> Any:
    """Returns ``(params, opt_state, metrics)`` of one step, on which all ranks agree.

    With ``evaluates``, an evaluation's metrics come fourth. Raises AssertionError if ranks differ.
    On a device, it simulates several ranks, and without shards.
    """
    on_host = tree.leaves(state)[0].device.type == "cpu"
    if not on_host and setup.axis != "one":
        # The host waits for a device where threads meet, and where shards are made.
        setup = Setup("simulated", setup.settings)
    program = Program(system, setup, loss_fn, optimizer, weight_fn, evaluates)
    if setup.settings.get("donate"):
        state = copy_state(state)
    params, opt_state = state
    if setup.axis == "one":
        microbatches = [*itertools.chain(*groups)]
        return program(ps.LocalAxis(), params, opt_state, microbatches)
    if setup.axis == "simulated":
        axis = ps.VmapAxis(len(groups))
        on_ranks = run_simulated(axis, program, (None, None, 0))
        return on_ranks(params, opt_state, stack_ranks(groups))
    groups = fill_grid(groups, setup)
    if setup.gather.startswith("loss"):
        longest = max(map(len, groups))
        groups = fill_groups(groups, longest if weight_fn is None else 1)
    states = copy_for_ranks(state, len(groups))
    ranks = Ranks(len(groups), setup.bucket_bytes, setup.grid[0])
    first, *others = run(ranks, program, *states, groups)
    expected = tree.map(torch.nan_to_num, first)
    for other in others:
        actual = tree.map(torch.nan_to_num, other)
        assert_same(actual, expected, "a rank's result")
    return first


def fill_grid(groups: Groups, setup: Setup) -> Groups:
    """Adds ranks without microbatches, up to a multiple of the grid's columns."""
    _, columns = setup.grid
    return groups + [[]] * (-len(groups) % columns)


def fill_groups(groups: Groups, length: int) -> Groups:
    """Gives each rank at least ``length`` microbatches, by some whose weights are zero.

    A loss that gathers is a collective, in which every rank has to take part.
    """
    microbatches = [*itertools.chain(*groups)]
    if not microbatches:
        return groups
    empty = without_tokens(microbatches[0])
    return [group + [empty] * (length - len(group)) for group in groups]


def without_tokens(batch: Batch) -> Batch:
    """Returns zeros in the batch's shapes, weights included."""
    return {key: torch.zeros_like(leaf) for key, leaf in batch.items()}


def copy_for_ranks(state: Any, size: int) -> tuple[list[Any], list[Any]]:
    """Copies params and opt_state for each rank, in different layouts in memory."""
    layouts = itertools.islice(itertools.cycle(LAYOUTS[:3]), size)
    states = [change_layout(copy_state(state), layout) for layout in layouts]
    return [params for params, _ in states], [opt_state for _, opt_state in states]


def run_simulated(
    axis: ps.VmapAxis,
    program: Callable[..., Any],
    in_dims: Any = 0,
    out_dims: Any = None,
) -> Callable[..., Any]:
    """Maps the program over simulated ranks; a ValueError in it fails the claim, as on threads.

    It is raised if ranks may differ in an output whose dimension in ``out_dims`` is None.
    """

    def on_ranks(*args: Any) -> Any:
        try:
            return axis.map(partial(program, axis), in_dims, out_dims)(*args)
        except ValueError as error:
            raise AssertionError("the ranks cannot go on together") from error

    return on_ranks


def check_step(
    system: System,
    setup: Setup,
    case: Case,
    groups: Groups,
    loss_fn: Callable[..., Any] | None = None,
    plain: Callable[..., Any] | None = None,
    **options: Any,
) -> Any:
    """Checks that state and loss are those of ``spec`` on the one big batch, to the bit.

    It checks the other metrics, too: the norm but for rounding. Returns the step's result.
    ``loss_fn`` computes what ``plain`` does.
    """
    state = case.params, case.opt_state
    loss_fn = loss_fn or case.loss_fn

    def update(grads: Any, opt_state: Any, params: Any) -> Any:
        grads = cast_to_sum_dtype(setup, grads)
        return case.optimizer.update(grads, opt_state, params)

    expected, grads, loss = spec(plain or loss_fn, update, *state, case.batch)
    result = take_step(system, setup, state, groups, loss_fn, case.recipe, **options)
    params, opt_state, metrics, *_ = result

    assert_same((params, opt_state), expected)
    assert metrics.loss == loss, f"loss: {metrics.loss} is not {loss}"
    assert metrics.loss.dtype == tree.accumulation_dtype(case.batch["x"].dtype)
    assert metrics.num_tokens == case.batch["w"].sum()
    with_tokens = [part for part in itertools.chain(*groups) if part["w"].any()]
    assert metrics.num_microbatches == len(with_tokens)
    assert metrics.applied
    assert_norm(metrics.grad_norm, grads)
    return result


def cast_to_sum_dtype(setup: Setup, grads: Any) -> Any:
    """Casts gradients to the dtype in which a step sums them."""
    accum_dtype = setup.settings.get("accum_dtype")

    def cast(grad: Tensor) -> Tensor:
        return grad.to(accum_dtype or tree.accumulation_dtype(grad.dtype))

    return tree.map(cast, grads)


def assert_norm(norm: Tensor, grads: Any) -> None:
    """Asserts that the norm is the gradients', but for rounding."""
    leaves = [leaf.double() for leaf in tree.leaves(grads)]
    squares = torch.stack([leaf.square().sum() for leaf in leaves])
    error = (norm - squares.sum().sqrt()).abs()
    assert error <= rounding_bound(4 * squares.numel() + 64, norm.dtype) * norm


def check_metrics(system: System, drawn: StepCase, **options: Any) -> None:
    """Checks the step, its aux, which looks at the tokens that count, and evaluation, on all ranks."""
    case, setup, groups = drawn
    # Ranks without any microbatch cannot return an aux like that of the others.
    ignored = without_tokens(case.batch)
    groups = [group or [ignored] for group in fill_grid(groups, setup)]
    loss_fn = partial(loss_with_aux, loss_fn=case.loss_fn)
    options = {"evaluates": True, **options}
    evaluate = system.make_eval_step(loss_fn, weight_fn=get_weights)
    expected = evaluate(case.params, [case.batch])

    *_, metrics, evaluation = check_step(
        system, setup, case, groups, loss_fn, case.loss_fn, **options
    )

    assert_same(metrics.aux, expected.aux, "aux")
    # The number of microbatches is what the cut changes.
    evaluation = evaluation._replace(num_microbatches=expected.num_microbatches)
    assert_same(evaluation, expected, "evaluation")


def loss_with_aux(
    params: Any, batch: Batch, loss_fn: Callable[..., Tensor] = models.integer_loss
) -> ps.LossOutput:
    """Computes a loss whose aux has the number of its zeros, an integer, and its sum, a float."""
    losses = loss_fn(params, batch)
    counts = batch["w"] > 0
    num_zero = (counts & (losses == 0)).sum()
    total = torch.where(counts, losses, 0).sum()
    return ps.LossOutput(losses, aux={"zero": num_zero, "sum": [total]})


def check_within_bound(
    system: System,
    drawn: RealStepCase,
    loss_fn: Callable[..., Any] = models.transformer_loss,
    weight_fn: Any = get_weights,
    extra_roundings: int = 0,
) -> None:
    """Checks the transformer's gradient and loss: exact, but for rounding."""
    case, setup, groups = drawn
    state = case.params, tree.zeros_like(case.params)
    _, grads, metrics = take_step(
        system, setup, state, groups, loss_fn, CAPTURE, weight_fn
    )
    # Each weight, their sum and their quotient round, and each sum of two microbatches.
    num_microbatches = sum(len(group) for group in groups)
    case.assert_within_bound(grads, extra_roundings + 3 + num_microbatches)
    case.assert_loss_within_bound(metrics.loss)


# On a grid of two rows


def check_context_parallel(run: Run, drawn: StepCase) -> None:
    """Checks that sequences split over the grid's second dimension give the step of the full sequences."""
    case, setup, groups = drawn
    # Squares of gradients as large as these do not add up exactly.
    recipe = "adamw" if case.recipe == "clipped" else case.recipe
    params = parallel.attention_params(case.generator)
    opt_state = make_opt_state(recipe, params, case.generator)
    batch = repeat_sequences(case.batch)
    case = replace(case, params=params, recipe=recipe, opt_state=opt_state, batch=batch)
    state, _, loss = spec(
        parallel.attention_loss, case.optimizer.update, params, opt_state, batch
    )
    local_groups = []
    for group in groups:
        group = [repeat_sequences(part) for part in group]
        for column in range(2):
            shards = [parallel.context_shard(part, column, 2) for part in group]
            local_groups.append(shards)
    program = partial(parallel.context_parallel_step, recipe, setup.settings)
    copies = [copy_state((params, opt_state)) for _ in local_groups]
    states = zip(*copies, strict=True)

    ranks = Ranks(4, setup.bucket_bytes, rows=2)
    results = run(ranks, program, *states, local_groups)

    for *new_state, metrics in results:
        assert_same((*new_state, metrics.loss), (*state, loss))
        assert metrics.num_tokens == batch["w"].sum()


def repeat_sequences(batch: Batch) -> Batch:
    """Appends each sequence to itself."""
    return {key: torch.cat([value, value], 1) for key, value in batch.items()}


def check_tensor_parallel(run: Run, drawn: StepCase, columns: int) -> None:
    """Checks layers cut over the grid's second dimension: norms are those of full layers."""
    case, setup, groups = drawn
    expected = step_on_full_params(case, setup, groups)
    program = partial(parallel.tensor_parallel_step, case.recipe, setup)
    groups = [group for group in groups for _ in range(columns)]
    states = copy_for_ranks((case.params, case.opt_state), len(groups))
    ranks = Ranks(len(groups), setup.bucket_bytes, 2)
    for actual in run(ranks, program, *states, groups):
        assert_same(actual, expected)


def step_on_full_params(case: Case, setup: Setup, groups: Groups) -> Any:
    """Takes the step on full params, and checks it."""
    plain = Setup("one", {**setup.settings, "donate": False})
    return check_step(System(), plain, case, groups)
