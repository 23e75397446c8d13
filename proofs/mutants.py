"""Puts bugs that happened into purestep's own source, one at a time: each must fail a theorem.

A mutant replaces a few words of the package by wrong ones. Words that the source does not have
exactly once are an error, so that a mutant always is the bug that its description states.

    python -m proofs.mutants        writes the table of all bugs into proofs/README.md
"""

import importlib
import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from proofs import plain_mutants
from support.theorem import Theorem

README = Path(__file__).with_name("README.md")
BUGS = range(1, 54)
"""The numbers of the bugs that happened; mutants with larger numbers are ideas of ours."""


class Mutant(NamedTuple):
    """A bug by its number, a claim that rejects it, and words of a module with their replacement."""

    number: int
    claim: str
    description: str
    module: str
    old: str
    new: str


MUTANTS = [
    Mutant(
        number=28,
        claim="test_t07_identity.no_tokens",
        description="skip that still decays weights or moves moments or the step counter",
        module="step",
        old="if not applied.is_cpu or applied:\n",
        new=(
            "grads, applied = mask_grads(grads, applied), torch.tensor(True)\n"
            "        if applied:\n"
        ),
    ),
    Mutant(
        number=29,
        claim="test_t01_cut.many_microbatches",
        description="accumulation in bf16: 1000 × 1e-3 gives 0.5",
        module="grads.accumulate",
        old="accum_dtype or accumulation_dtype(leaf.dtype)",
        new="accum_dtype or leaf.dtype",
    ),
    Mutant(
        number=43,
        claim="test_t01_cut.programs",
        description="gradients added up in memory that two leaves share, as autograd does",
        module="grads.inplace",
        old="clone_aliased(accumulator.values, [*others, *data]",
        new="clone_aliased([], [*others, *data]",
    ),
    Mutant(
        number=44,
        claim="test_t02_ranks.separate_ranks",
        description="flat buckets laid out in each rank's own memory order",
        module="sharding.buckets",
        old=".view(total.shape)",
        new=".as_strided(total.shape, torch.empty_like(total).stride())",
    ),
    Mutant(
        number=45,
        claim="test_t17_denominators.any_denominator",
        description="lr / N in the default dtype, hidden by N being a power of two",
        module="objective",
        old="shares = exact / num_tokens",
        new="shares = (exact / num_tokens).to(torch.get_default_dtype())",
    ),
    Mutant(
        number=46,
        claim="test_t05_weights.counted_once",
        description="weights asked for twice: what multiplies is not what was counted",
        module="grads.accumulate",
        old="if weights is None and weight_fn is not None:",
        new="if weight_fn is not None:",
    ),
    Mutant(
        number=47,
        claim="test_t01_cut.unreached",
        description="a loss that reaches no parameter is applied (weight decay alone moves)",
        module="grads.accumulate",
        old="if losses and not depends_on_params and has_tokens(counts):",
        new="if False:",
    ),
    Mutant(
        number=48,
        claim="test_t01_cut.programs",
        description="leaves shared by all microbatches: what a loss does to them depends on the cut",
        module="grads.inplace",
        old="leaves = [*map(Tensor.requires_grad_, map(Tensor.detach, inputs.leaves))]",
        new=(
            "leaves = [x if x.requires_grad else x.detach().requires_grad_() for x in inputs.leaves]\n"
            "            inputs.leaves[:] = leaves"
        ),
    ),
    Mutant(
        number=49,
        claim="test_t01_cut.recomputation",
        description="recomputed activations with other parameters than the forward pass had",
        module="grads.inplace",
        old="if needs_checks and not are_module_parameters:",
        new="if False:",
    ),
    Mutant(
        number=50,
        claim="test_t01_cut.programs",
        description="a module closed over is left with a graph, or gradients, that grow from step to step",
        module="grads.inplace",
        old="inputs=tuple(leaves)",
        new="inputs=()",
    ),
    Mutant(
        number=51,
        claim="test_t13_donation.overlaps",
        description="donated leaves that overlap at different offsets",
        module="validation",
        old="if leaf.numel() and leaf.untyped_storage() in owners:",
        new="if False:",
    ),
    Mutant(
        number=52,
        claim="test_t12_shard.pieces_of_one_tensor",
        description="a norm of one rank's shard clips what all ranks share",
        module="tree.norms",
        old='term = axis.apply("psum", term)',
        new="pass",
    ),
    Mutant(
        number=54,
        claim="test_t02_ranks.separate_ranks",
        description="a bucket that leaves before its last leaf is ready",
        module="sharding.buckets",
        old="if self._buckets[self._num_launched].pending:",
        new="if len(self._buckets[self._num_launched].pending) > 1:",
    ),
    Mutant(
        number=55,
        claim="test_t02_ranks.separate_ranks",
        description="buckets that leave in the first microbatch, not in the last",
        module="grads.accumulate",
        old="index + 1 == len(group.microbatches)",
        new="index == 0",
    ),
    Mutant(
        number=56,
        claim="test_t12_shard.separate_params",
        description="a microbatch that a rank joins for the others' sake counts",
        module="grads.per_microbatch",
        old="torch.zeros(1, dtype=torch.bool)",
        new="torch.ones(1, dtype=torch.bool)",
    ),
    Mutant(
        number=57,
        claim="test_t12_shard.units_of_modules",
        description="a microbatch that a rank repeats for the others' sake counts",
        module="grads.per_microbatch",
        old="torch.zeros_like(compute_weights(weight_fn, last))",
        new="compute_weights(weight_fn, last)",
    ),
    Mutant(
        number=58,
        claim="test_t12_shard.units_of_modules",
        description="figures of a repeated microbatch added twice",
        module="grads.per_microbatch",
        old="return losses._replace(aux=())",
        new="return losses",
    ),
]

ELSEWHERE = {
    21: (
        "auxiliary loss scaled by local tokens",
        "test_t01_cut.terms",
    ),
    22: (
        "global auxiliary gradient divided by world size",
        "test_t02_ranks.rank_terms",
    ),
    23: (
        "auxiliary gradient dead, its carrier's result discarded",
        "test_t01_cut.terms",
    ),
    24: (
        "auxiliary term not averaged over microbatches",
        "test_t01_cut.terms",
    ),
    37: (
        "reduction at every microbatch: right values, K times the traffic",
        "test_t02_ranks.traffic",
    ),
    53: (
        "a stream resumed at what was read ahead, not at what was used",
        "test_t14_repartition.stream",
    ),
}
"""Bugs that are put neither into the source nor into the loop, and the claims about them."""


NO_AUXILIARY_TERM = "unseen: the kit's problems have no auxiliary term"
OWN_LOSS = "unseen: the loss is the problem's own"
UNSEEN = {
    21: NO_AUXILIARY_TERM,
    22: NO_AUXILIARY_TERM,
    23: NO_AUXILIARY_TERM,
    24: NO_AUXILIARY_TERM,
    37: "unseen: the values are right",
    43: "unseen: the kit's problems have no leaves that share memory",
    44: "unseen: the trainer lays out its own memory",
    46: "unseen: weights are data of the problem",
    47: OWN_LOSS,
    48: OWN_LOSS,
    49: OWN_LOSS,
    50: "unseen: memory that grows changes no number",
    51: "unseen: the trainer makes its own leaves",
    52: "unseen: each rank holds whole tensors",
    53: "unseen: the trainer has no stream, but gets groups",
}
"""Bugs that the kit cannot find in the loop, which is a black box to it, and why."""


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Plants the bug in purestep: functions stay the same objects, with other code."""
    module = importlib.import_module(f"purestep.{mutant.module}")
    source = inspect.getsource(module)
    if source.count(mutant.old) != 1:
        raise ValueError(
            f"{module.__name__} does not have these words exactly once: {mutant.old}"
        )
    source = source.replace(mutant.old, mutant.new)
    compiled = compile(source, f"<mutant {mutant.number}>", "exec", dont_inherit=True)
    codes = {code.co_qualname: code for code in _codes_in(compiled)}
    # After a graph break, torch's compiler adds a function to the names of the module.
    functions = [f for f in _functions_in(module) if f.__qualname__ in codes]
    codes_before = [function.__code__ for function in functions]
    try:
        for function in functions:
            function.__code__ = codes[function.__qualname__]
        # Wrong code may also be slow, and warn of that.
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        for function, code in zip(functions, codes_before, strict=True):
            function.__code__ = code


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yields the code of all functions and classes that are defined in it."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes_in(constant)


def _functions_in(module: ModuleType) -> Iterator[FunctionType]:
    """Yields the module's functions, and those of its classes."""
    values: list[Any] = [*vars(module).values()]
    for value in values:
        if isinstance(value, type) and value.__module__ == module.__name__:
            for member in vars(value).values():
                # The function of a property is its getter.
                values.append(getattr(member, "fget", member))
        function = inspect.unwrap(getattr(value, "__func__", value))
        if not isinstance(function, FunctionType):
            continue
        if function.__code__.co_filename == module.__file__:
            yield function


def claim(name: str) -> Theorem:
    """Finds the claim of this name, ``file.function``."""
    file, function = name.split(".")
    theorem: Theorem = getattr(importlib.import_module(f"proofs.{file}"), function)
    return theorem


def _format_claim(name: str) -> str:
    _, function = name.split(".")
    return f"{claim(name).name} `{function}`"


def table() -> str:
    """Formats one line for each bug: the claim that rejects it in purestep, and the laws in the loop."""
    descriptions: dict[int, list[str]] = {}
    laws: dict[int, list[str]] = {}
    in_source: dict[int, str] = {}
    for bug in plain_mutants.BUGS:
        number = int(bug.number.rstrip("ab"))
        descriptions.setdefault(number, []).append(bug.description)
        laws.setdefault(number, []).append(bug.law)
    for mutant in MUTANTS:
        descriptions[mutant.number] = [mutant.description]
        file = mutant.module.replace(".", "/") + ".py"
        rejected_by = _format_claim(mutant.claim)
        in_source[mutant.number] = f"{rejected_by} rejects it in `{file}`"
    for number, (description, about) in ELSEWHERE.items():
        descriptions[number] = [description]
        in_source[number] = f"{_format_claim(about)} says otherwise"

    lines = ["| | bug | in purestep | in the loop |", "|--:|---|---|---|"]
    for number in sorted(descriptions):
        in_loop = UNSEEN.get(number, "")
        if number in laws:
            in_loop = ", ".join(dict.fromkeys(laws[number]))
        description = "; ".join(descriptions[number])
        in_purestep = in_source.get(number, "")
        lines.append(f"| {number} | {description} | {in_purestep} | {in_loop} |")
    return "\n".join(lines)


def written() -> str:
    """Returns the README with the table between its marks."""
    before, rest = README.read_text().split("<!-- mutants -->\n")
    _, after = rest.split("<!-- end -->\n")
    return f"{before}<!-- mutants -->\n{table()}\n<!-- end -->\n{after}"


if __name__ == "__main__":
    README.write_text(written())
