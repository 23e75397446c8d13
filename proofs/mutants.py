"""Bugs that happened, put into purestep's own source one at a time: each must fail a theorem.

A mutant replaces a few words of the package by wrong ones. Words that the source does not have
exactly once are an error, so that a mutant always is the bug that it says.

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
from proofs.theorem import Theorem

README = Path(__file__).with_name("README.md")
BUGS = range(1, 54)
"""The numbers of the bugs that happened; those of the mutants behind them are ideas of ours."""


class Mutant(NamedTuple):
    """A bug by its number, a claim that rejects it, and words of a module with other ones."""

    number: int
    claim: str
    bug: str
    module: str
    old: str
    new: str


MUTANTS = [
    Mutant(28, "test_t07_identity.no_tokens",
        "skip that still decays weights or moves moments or the step counter",
        "step", "if not applied.is_cpu or applied:\n",
        "grads, applied = mask_grads(grads, applied), torch.tensor(True)\n        if applied:\n"),
    Mutant(29, "test_t01_cut.many_microbatches", "accumulation in bf16: 1000 × 1e-3 gives 0.5",
        "grads.accumulate", "accum_dtype or accumulation_dtype(leaf.dtype)",
        "accum_dtype or leaf.dtype"),
    Mutant(43, "test_t01_cut.programs",
        "gradients added up in memory that two leaves share, as autograd does",
        "grads.inplace", "clone_aliased(accumulator.values, others", "clone_aliased([], others"),
    Mutant(44, "test_t02_ranks.separate_ranks",
        "flat buckets laid out in each rank's own memory order",
        "sharding.buckets", ".view(total.shape)",
        ".as_strided(total.shape, torch.empty_like(total).stride())"),
    Mutant(45, "test_t17_denominators.any_denominator",
        "lr / N in the default dtype, hidden by N being a power of two",
        "objective", "shares = exact / divisors.num_tokens",
        "shares = (exact / divisors.num_tokens).to(torch.get_default_dtype())"),
    Mutant(46, "test_t05_weights.counted_once",
        "weights asked for twice: what multiplies is not what was counted",
        "grads.accumulate", "if weights is None and weight_fn is not None:",
        "if weight_fn is not None:"),
    Mutant(47, "test_t01_cut.unreached",
        "a loss that reaches no parameter is applied (weight decay alone moves)",
        "grads.accumulate", "if losses and not depends_on_params and has_tokens(counts):", "if False:"),
    Mutant(48, "test_t01_cut.programs",
        "leaves shared by all microbatches: what a loss does to them depends on the cut",
        "grads.inplace", "leaves = [*map(Tensor.requires_grad_, map(Tensor.detach, inputs.leaves))]",
        "leaves = [x if x.requires_grad else x.detach().requires_grad_() for x in inputs.leaves]\n"
        "        inputs.leaves[:] = leaves"),
    Mutant(49, "test_t01_cut.recomputation",
        "recomputed activations with other parameters than the forward pass had",
        "grads.inplace", "forbid_module_recompute(leaves) if needs_checks", "forbid_module_recompute(leaves) if False"),
    Mutant(50, "test_t01_cut.programs",
        "a module closed over is left with a graph, or gradients, that grow from step to step",
        "grads.inplace", "inputs=tuple(leaves)", "inputs=()"),
    Mutant(51, "test_t13_donation.overlaps",
        "donated leaves that overlap at different offsets",
        "validation", "if leaf.numel() and leaf.untyped_storage() in owners:", "if False:"),
    Mutant(52, "test_t12_shard.pieces_of_one_tensor",
        "a norm of one rank's shard clips what all ranks share", "tree.norms",
        'terms.append(here if axis is None else axis.apply("psum", here))', "terms.append(here)"),
    Mutant(54, "test_t02_ranks.separate_ranks", "a bucket that leaves before its last leaf is ready",
        "sharding.buckets", "and not self._buckets[self._left].waiting:",
        "and len(self._buckets[self._left].waiting) < 2:"),
    Mutant(55, "test_t02_ranks.separate_ranks",
        "buckets that leave in the first microbatch, not in the last",
        "grads.accumulate", "on_grad_ready if index == last else None", "on_grad_ready if index == 0 else None"),
    Mutant(56, "test_t12_shard.separate_params",
        "a microbatch that a rank joins for the others' sake counts", "grads.per_microbatch",
        "torch.zeros(1, dtype=torch.bool)", "torch.ones(1, dtype=torch.bool)"),
]  # fmt: skip

ELSEWHERE = {
    21: ("auxiliary loss scaled by local tokens", "test_t01_cut.terms"),
    22: ("global auxiliary gradient divided by world size", "test_t02_ranks.rank_terms"),
    23: ("auxiliary gradient dead, its carrier's result discarded", "test_t01_cut.terms"),
    24: ("auxiliary term not averaged over microbatches", "test_t01_cut.terms"),
    37: ("reduction at every microbatch: right values, K times the traffic",
        "test_t02_ranks.traffic"),
    53: ("a stream resumed at what was read ahead, not at what was used",
        "test_t14_repartition.stream"),
}  # fmt: skip
"""Bugs that are put neither into the source nor into the loop, and the claims about them."""


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Within it, purestep has the bug: functions stay the same objects, with other code."""
    module = importlib.import_module(f"purestep.{mutant.module}")
    source = inspect.getsource(module)
    if source.count(mutant.old) != 1:
        raise ValueError(
            f"{module.__name__} does not have these words exactly once: {mutant.old}"
        )
    source = source.replace(mutant.old, mutant.new)
    compiled = compile(source, f"<mutant {mutant.number}>", "exec", dont_inherit=True)
    codes = {code.co_qualname: code for code in _codes(compiled)}
    before = [(function, function.__code__) for function in _functions(module)]
    try:
        for function, _ in before:
            function.__code__ = codes[function.__qualname__]
        with warnings.catch_warnings(
            action="ignore"
        ):  # What is wrong may be slow, too.
            yield
    finally:
        for function, code in before:
            function.__code__ = code


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of all that is defined in it."""
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _codes(each)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """The module's functions, and those of its classes."""
    values: list[Any] = [*vars(module).values()]
    for value in values:
        if isinstance(value, type) and value.__module__ == module.__name__:
            values.extend(getattr(each, "fget", each) for each in vars(value).values())
        function = inspect.unwrap(getattr(value, "__func__", value))
        if (
            isinstance(function, FunctionType)
            and function.__code__.co_filename == module.__file__
        ):
            yield function


def claim(name: str) -> Theorem:
    """The claim of this name, ``file.function``."""
    file, function = name.split(".")
    found: Theorem = getattr(importlib.import_module(f"proofs.{file}"), function)
    return found


def table() -> str:
    """One line for each bug: the claim that rejects it in purestep, and the laws in the loop."""
    names: dict[int, str] = {}
    here: dict[int, str] = {}
    loop: dict[int, str] = {**plain_mutants.UNSEEN}
    for bug in plain_mutants.BUGS:
        number, more = int(bug.number.rstrip("ab")), not bug.number.endswith("b")
        names[number] = bug.bug if more else f"{names[number]}; {bug.bug}"
        loop[number] = (
            bug.law if more else ", ".join(dict.fromkeys([loop[number], bug.law]))
        )
    for one in MUTANTS:
        names[one.number] = one.bug
        place = one.module.replace(".", "/")
        here[one.number] = f"{_shown(one.claim)} rejects it in `{place}.py`"
    for number, (name, about) in ELSEWHERE.items():
        names[number], here[number] = name, f"{_shown(about)} says otherwise"
    rows = [
        f"| {n} | {names[n]} | {here.get(n, '')} | {loop.get(n, '')} |"
        for n in sorted(names)
    ]
    return "\n".join(
        ["| | bug | in purestep | in the loop |", "|--:|---|---|---|", *rows]
    )


def _shown(name: str) -> str:
    return f"{claim(name).name} `{name.split('.')[1]}`"


def written() -> str:
    """The README with the table between its marks."""
    before, rest = README.read_text().split("<!-- mutants -->\n")
    after = rest.split("<!-- end -->\n")[1]
    return f"{before}<!-- mutants -->\n{table()}\n<!-- end -->\n{after}"


if __name__ == "__main__":
    README.write_text(written())
