"""T6, purity. A step is a function: of its arguments, of nothing else, and it touches nothing.

Inputs are bit-identical after the call and share no storage with outputs; the global RNG, the grad
mode, the default dtype and every ``.grad`` are untouched; whatever was called before, the same
arguments give the same.
"""

from typing import Any

import torch

from purestep import tree
from support.purity import global_state, storages_in
from support.ranks import take_step
from support.strategies import (
    DTYPES,
    Chooser,
    Groups,
    StepCase,
    assert_same,
    builds,
    get_weights,
    make_step_case,
    steps,
)
from support.theorem import System, as_tests, theorem

ONE_RANK: dict[str, Any] = {"axes": ["one"], "ranks": [1], "donate": False}


def make_step(system: System, drawn: StepCase) -> Any:
    """Makes the case's step on one rank."""
    case, setup, _ = drawn
    return system.make_update_step(
        case.loss_fn,
        case.optimizer,
        weight_fn=get_weights,
        **setup.settings,
    )


@theorem("T6", steps(donate=False))
def inputs_untouched(system: System, drawn: StepCase) -> None:
    """Inputs keep their bits and lend no storage; no global state moves; on any ranks."""
    case, setup, groups = drawn
    state = case.params, case.opt_state
    inputs = state, groups
    inputs_before = tree.map(torch.clone, inputs)
    rng_before = torch.get_rng_state()
    globals_before = global_state()

    outputs = take_step(system, setup, state, groups, case.loss_fn, case.recipe)

    assert_same(inputs, inputs_before, "inputs")
    assert torch.equal(torch.get_rng_state(), rng_before), "the global RNG moved"
    assert global_state() == globals_before, "global settings changed"
    shared = storages_in(outputs) & storages_in(inputs)
    assert not shared, "an output lives in an input's storage"
    assert not any(leaf.requires_grad for leaf in tree.leaves(outputs))


def make_two_groups(choose: Chooser) -> tuple[StepCase, Groups]:
    """Makes a step, and another group of another size."""
    dtype = choose.choice(DTYPES)
    step = make_step_case(choose, **ONE_RANK, dtypes=[dtype])
    _, _, other_groups = make_step_case(choose, **ONE_RANK, dtypes=[dtype])
    return step, other_groups


@theorem("T6", builds(make_two_groups))
def no_memory(system: System, drawn: tuple[StepCase, Groups]) -> None:
    """Called for other arguments in between, the same arguments give the same result."""
    step_case, (other,) = drawn
    case, _, (group,) = step_case
    step = make_step(system, step_case)
    fresh_step = make_step(system, step_case)

    first = step(case.params, case.opt_state, group)
    on_other = step(case.params, case.opt_state, other)
    second = step(case.params, case.opt_state, group)

    assert_same(second, first, "the second call")
    fresh = fresh_step(case.params, case.opt_state, other)
    assert_same(fresh, on_other, "another instance")


@theorem("T6", steps(**ONE_RANK))
def grad_untouched(system: System, drawn: StepCase) -> None:
    """Params that require grad, in any grad mode: their ``.grad`` stays; values are the same."""
    case, _, (group,) = drawn
    step = make_step(system, drawn)
    expected = step(case.params, case.opt_state, group)
    params = tree.map(lambda leaf: leaf.detach().requires_grad_().clone(), case.params)
    for leaf in tree.leaves(params):
        leaf.grad = torch.full_like(leaf, 7)
    for grad_mode in (True, False):
        with torch.set_grad_enabled(grad_mode):
            result = step(params, case.opt_state, group)
            assert torch.is_grad_enabled() == grad_mode
        values = tree.map(torch.Tensor.detach, result)
        assert_same(values, expected, "with requires_grad")
        _, _, metrics = result
        assert not any(leaf.requires_grad for leaf in tree.leaves(metrics))
    for leaf in tree.leaves(params):
        assert (leaf.grad == 7).all(), ".grad was written"


globals().update(as_tests(globals()))
