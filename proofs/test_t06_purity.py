"""T6, purity. A step is a function: of its arguments, of nothing else, and it touches nothing.

Inputs are bit-identical after the call and share no storage with outputs; the global RNG, the grad
mode, the default dtype and every ``.grad`` are untouched; whatever was called before, the same
arguments give the same.
"""

from typing import Any

import torch
from hypothesis import strategies as st

from proofs.strategies import (
    DTYPES,
    Batch,
    Case,
    assert_same,
    cases,
    groups_of,
    settings_of_steps,
    weights_of,
)
from proofs.theorem import System, theorem
from purestep import tree

Drawn = tuple[Case, list[Batch], list[Batch], dict[str, Any]]


@st.composite
def purity_cases(draw: st.DrawFn) -> Drawn:
    """A case, its cut, another group of another size, and settings."""
    dtype = draw(st.sampled_from(DTYPES))
    case, other = draw(cases(dtypes=[dtype])), draw(cases(dtypes=[dtype]))
    settings = draw(settings_of_steps(donate=False))
    (group,), (second,) = (draw(groups_of(each, ranks=1)) for each in (case, other))
    return case, group, second, settings


def step_with(system: System, case: Case, settings: dict[str, Any]) -> Any:
    """The case's step."""
    return system.make_update_step(case.loss_fn, case.optimizer, weight_fn=weights_of, **settings)


def storages(value: Any) -> set[torch.UntypedStorage]:
    """Where the leaves that hold anything live."""
    return {leaf.untyped_storage() for leaf in tree.leaves_of(value) if leaf.numel()}


def globals_of() -> tuple[Any, ...]:
    """The global state that a step does not change."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
    )


@theorem("T6", purity_cases())
def inputs_untouched(system: System, drawn: Drawn) -> None:
    """Inputs keep their bits and lend no storage; no global state moves."""
    case, group, _, settings = drawn
    inputs = (case.params, case.opt_state, group)
    before = tree.map(torch.clone, inputs)
    rng, world = torch.get_rng_state(), globals_of()
    outputs = step_with(system, case, settings)(*inputs)
    assert_same(inputs, before, "inputs")
    assert torch.equal(torch.get_rng_state(), rng), "the global RNG moved"
    assert globals_of() == world, "global settings changed"
    assert not storages(outputs) & storages(inputs), "an output lives in an input's storage"
    assert not any(leaf.requires_grad for leaf in tree.leaves_of(outputs))


@theorem("T6", purity_cases())
def no_memory(system: System, drawn: Drawn) -> None:
    """Called for other arguments in between, the same arguments give the same result."""
    case, group, other, settings = drawn
    step, fresh = (step_with(system, case, settings) for _ in range(2))
    first = step(case.params, case.opt_state, group)
    moved = step(case.params, case.opt_state, other)
    assert_same(step(case.params, case.opt_state, group), first, "the second call")
    assert_same(fresh(case.params, case.opt_state, other), moved, "another instance")


@theorem("T6", purity_cases())
def grad_untouched(system: System, drawn: Drawn) -> None:
    """Params that require grad, in any grad mode: their ``.grad`` stays; values are the same."""
    case, group, _, settings = drawn
    step = step_with(system, case, settings)
    expected = step(case.params, case.opt_state, group)
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), case.params)
    for leaf in tree.leaves_of(params):
        leaf.grad = torch.full_like(leaf, 7)
    for grad_mode in (True, False):
        with torch.set_grad_enabled(grad_mode):
            result = step(params, case.opt_state, group)
            assert torch.is_grad_enabled() == grad_mode
        assert_same(tree.map(torch.Tensor.detach, result), expected, "with requires_grad")
        assert not any(leaf.requires_grad for leaf in tree.leaves_of(result[2]))
    assert all((leaf.grad == 7).all() for leaf in tree.leaves_of(params)), ".grad was written"


test_inputs_untouched = inputs_untouched.test()
test_no_memory = no_memory.test()
test_grad_untouched = grad_untouched.test()
