"""T6, purity. A step is a function: of its arguments, of nothing else, and it touches nothing.

Inputs are bit-identical after the call and share no storage with outputs; the global RNG, the grad
mode, the default dtype and every ``.grad`` are untouched; whatever was called before, the same
arguments give the same.
"""

from typing import Any

import torch

from proofs.ranks import step_of
from proofs.strategies import (
    DTYPES,
    Chooser,
    Drawn,
    Groups,
    assert_same,
    drawn,
    step_case,
    steps,
    weights_of,
)
from proofs.theorem import System, as_tests, theorem
from purestep import tree

ONE: dict[str, Any] = {"axes": ["one"], "ranks": [1], "donate": False}


def step_with(system: System, drawn: Drawn) -> Any:
    """The case's step on one rank."""
    (case, how, _), make = drawn, system.make_update_step
    return make(case.loss_fn, case.optimizer, weight_fn=weights_of, **how.settings)


def storages(value: Any) -> set[torch.UntypedStorage]:
    """Where the leaves that hold anything live."""
    return {leaf.untyped_storage() for leaf in tree.leaves(value) if leaf.numel()}


def globals_of() -> tuple[Any, ...]:
    """The global state that a step does not change."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
    )


@theorem("T6", steps(donate=False))
def inputs_untouched(system: System, drawn: Drawn) -> None:
    """Inputs keep their bits and lend no storage; no global state moves; on any ranks."""
    case, how, groups = drawn
    state = case.params, case.opt_state
    inputs = state, groups
    before = tree.map(torch.clone, inputs)
    rng, world = torch.get_rng_state(), globals_of()
    outputs = step_of(system, how, state, groups, case.loss_fn, case.recipe)
    assert_same(inputs, before, "inputs")
    assert torch.equal(torch.get_rng_state(), rng), "the global RNG moved"
    assert globals_of() == world, "global settings changed"
    assert not storages(outputs) & storages(inputs), (
        "an output lives in an input's storage"
    )
    assert not any(leaf.requires_grad for leaf in tree.leaves(outputs))


def two_groups(choose: Chooser) -> tuple[Drawn, Groups]:
    """A step, and another group of another size."""
    one, other = (
        step_case(choose, **ONE, dtypes=[dtype])
        for dtype in [choose.choice(DTYPES)] * 2
    )
    return one, other[2]


@theorem("T6", drawn(two_groups))
def no_memory(system: System, drawn: tuple[Drawn, Groups]) -> None:
    """Called for other arguments in between, the same arguments give the same result."""
    (case, _, (group,)), (other,) = drawn
    step, fresh = (step_with(system, drawn[0]) for _ in range(2))
    first = step(case.params, case.opt_state, group)
    moved = step(case.params, case.opt_state, other)
    assert_same(step(case.params, case.opt_state, group), first, "the second call")
    assert_same(fresh(case.params, case.opt_state, other), moved, "another instance")


@theorem("T6", steps(**ONE))
def grad_untouched(system: System, drawn: Drawn) -> None:
    """Params that require grad, in any grad mode: their ``.grad`` stays; values are the same."""
    case, _, (group,) = drawn
    step = step_with(system, drawn)
    expected = step(case.params, case.opt_state, group)
    params = tree.map(lambda leaf: leaf.detach().requires_grad_().clone(), case.params)
    for leaf in tree.leaves(params):
        leaf.grad = torch.full_like(leaf, 7)
    for grad_mode in (True, False):
        with torch.set_grad_enabled(grad_mode):
            result = step(params, case.opt_state, group)
            assert torch.is_grad_enabled() == grad_mode
        assert_same(
            tree.map(torch.Tensor.detach, result), expected, "with requires_grad"
        )
        assert not any(leaf.requires_grad for leaf in tree.leaves(result[2]))
    assert all((leaf.grad == 7).all() for leaf in tree.leaves(params)), (
        ".grad was written"
    )


globals().update(as_tests(globals()))
