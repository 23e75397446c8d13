"""The kit for trainers: what it draws, what it allows for rounding, and how it reports.

That it accepts right trainers and finds the bugs that happened is in proofs/test_kit.py.
"""

import itertools
import os
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import find, given, strategies as st
from torch import Tensor, nn

import purestep as ps
from proofs.plain_loop import PlainLoop
from purestep.testing import Abilities, Linear, Problem, Specification
from purestep.testing.bounds import bound
from purestep.testing.strategies import exact_batches, problems, ranks, weights

Batch = dict[str, Tensor]


def judged(trainer: Any, *laws: str, cases: int = 20) -> list[str]:
    """The findings, with the law's own words where it does not hold."""
    verdicts = ps.testing.judge(trainer, laws, cases=cases, shrink=0)
    return [f"{v.finding}: {v.why}" if v.why else v.finding for v in verdicts]


def right(
    model: Any, optimizer: Any, microbatches: Sequence[Batch], problem: Problem
) -> dict[str, Any]:
    """The loop by hand, on one rank or on several processes."""
    optimizer.zero_grad()
    counts = [problem.weights(b).sum().to(torch.float64) for b in microbatches]
    count = torch.stack([*counts, torch.zeros((), dtype=torch.float64)]).sum()
    parallel = torch.distributed.is_initialized()
    if parallel:
        torch.distributed.all_reduce(count)
    for batch in microbatches:
        ((problem.losses(model, batch) * problem.weights(batch)).sum() / count).backward()
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if parallel:
            torch.distributed.all_reduce(p.grad)
    if count > 0:
        optimizer.step()
    return {"num_tokens": count}


def local_count(
    model: Any, optimizer: Any, microbatches: Sequence[Batch], problem: Problem
) -> None:
    """Divides by the rank's count, and averages over ranks."""
    optimizer.zero_grad()
    count = sum(problem.weights(b).sum() for b in microbatches) if microbatches else torch.zeros(())
    for batch in microbatches:
        ((problem.losses(model, batch) * problem.weights(batch)).sum() / max(count, 1)).backward()
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        torch.distributed.all_reduce(p.grad)
        p.grad /= torch.distributed.get_world_size()
    optimizer.step()


def mean_of_means(
    model: Any, optimizer: Any, microbatches: Sequence[Batch], problem: Problem
) -> None:
    """Each microbatch by its own count."""
    optimizer.zero_grad()
    for batch in microbatches:
        counted = problem.weights(batch)
        loss = (problem.losses(model, batch) * counted).sum() / counted.sum().clamp(min=1)
        (loss / len(microbatches)).backward()
    optimizer.step()


@given(ranks([[0], [1], [2], [3]], 3, uneven=False))
def test_even_ranks_hold_equally_many(shares: list[list[list[int]]]) -> None:
    assert len({len(share) for share in shares}) == 1
    assert [part for share in shares for part in share] == [[0], [1], [2], [3]]


KINDS: Any = st.sampled_from(["mask", "whole", "any"])


@given(KINDS.flatmap(lambda kind: weights(2, 3, kind)))
def test_exact_weights_sum_to_a_power_of_two(drawn: list[list[float]]) -> None:
    total = Fraction(sum(map(sum, drawn)))
    assert total > 0
    assert all(n & (n - 1) == 0 for n in (total.numerator, total.denominator))


@pytest.mark.parametrize("kind", ["mask", "whole", "any"])
def test_other_sums_are_drawn_too(kind: Any) -> None:
    assert find(weights(1, 3, kind, exact=False), lambda w: sum(map(sum, w)) == 3)


def test_failures_shrink_to_what_a_person_can_read() -> None:
    trainer = ps.testing.loop(mean_of_means, abilities=Abilities(weights="mask"))
    with pytest.raises(AssertionError, match=r"T1 .cut. does not hold") as raised:
        ps.testing.check(trainer, ["T1"])
    # Two means of equally many tokens are no mistake: the least that shows it has a row more, or
    # more tokens in one row.
    assert re.search(r"rows \[0(, 1)?\] \| \[[12](, 2)?\];", str(raised.value))
    outcomes: list[Any] = []
    code = str(raised.value).split("To see it with a trainer of yours:")[1]
    exec(code, {"trainer": trainer, "print": outcomes.append})
    (first,), (second,) = outcomes
    apart = [(first.params[name] - second.params[name]).norm() for name in first.params]
    assert max(apart) > 0.01, "the code to paste does not show what was found"


def test_a_trainer_in_float32_is_accepted_and_its_bugs_are_seen() -> None:
    abilities = Abilities(dtype=torch.float32)
    loop = ps.testing.loop(right, abilities=abilities)
    assert judged(loop, "T0", "T1", "T4", "T5") == ["holds"] * 4
    (found,) = judged(ps.testing.loop(mean_of_means, abilities=abilities), "T1")
    assert found.startswith("wrong")


@pytest.mark.parametrize(("update", "finding"), [(right, "holds"), (local_count, "wrong")])
def test_programs_in_processes_are_judged(update: Any, finding: str) -> None:
    trainer = ps.testing.loop(update, abilities=Abilities(ranks=2))
    ranks, purity = judged(trainer, "T2", "T6", cases=10)
    assert ranks.startswith(finding)
    assert purity == "holds"


CALLS = itertools.count()
BESIDE: dict[str, Any] = {
    "torch's global generator": lambda trainer, group: torch.rand(1),
    "Python's global generator": lambda trainer, group: random.random(),
    "whether gradients are recorded": lambda trainer, group: torch.set_grad_enabled(False),
    "the default dtype": lambda trainer, group: torch.set_default_dtype(torch.float64),
    "the microbatch's y": lambda trainer, group: group[0][0]["y"].add_(1),
    "different bits": lambda trainer, group: trainer.models[0].weight.data.mul_(
        1 + 2**-52 * (next(CALLS) % 3)
    ),
}


@pytest.mark.parametrize("what", BESIDE)
def test_purity_sees(what: str) -> None:
    class Broken(PlainLoop):
        def update(self, group: Sequence[Sequence[Batch]]) -> None:
            with torch.enable_grad():
                super().update(group)
            BESIDE[what](self, group)

    state, kept = random.getstate(), torch.get_rng_state()
    try:
        (found,) = judged(Broken(), "T6")
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        random.setstate(state)
        torch.set_rng_state(kept)
    assert found.startswith("wrong")
    assert what in found


def test_a_refusal_is_no_wrong_number() -> None:
    class Refusing(PlainLoop):
        def update(self, group: Sequence[Sequence[Batch]]) -> None:
            if len(group[0]) > 1:
                raise ValueError("one microbatch, please")
            super().update(group)

    assert judged(Refusing(), "T1") == ["refuses: ValueError: one microbatch, please"]
    with pytest.raises(AssertionError, match=r"T1 .cut. is refused"):
        ps.testing.check(Refusing(), ["T1"], cases=20)


@pytest.mark.parametrize("wrong", [lambda *given: None, PlainLoop, None])
def test_an_object_that_is_no_trainer(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"ps.testing.loop\(update\)"):
        ps.testing.judge(wrong, ["T1"])


@pytest.mark.parametrize("ask", [ps.testing.judge, ps.testing.check, ps.testing.laws])
def test_unknown_laws(ask: Any) -> None:
    with pytest.raises(ValueError, match="no law 'T8': they are T0, T1"):
        ask(PlainLoop(), ["T8"])


def test_laws_beyond_the_abilities_are_not_asked() -> None:
    for found in judged(Specification(), "T15", "T16", "T17", cases=5):
        assert found.startswith("not asked")


class Words(nn.Module):
    """Next tokens by a table, and perhaps a layer behind it."""

    def __init__(self, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        table = torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=dtype)
        self.table = nn.Embedding(5, 5, _weight=scale * table)
        self.out = nn.Linear(5, 5, bias=False, dtype=dtype) if scale > 1 else nn.Identity()

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return SimpleNamespace(logits=self.out(self.table(input_ids)))


def test_language_models_are_judged() -> None:
    abilities = Abilities(weights="mask", task=ps.testing.causal_lm(Words()))
    loop = ps.testing.loop(right, abilities=abilities)
    assert judged(loop, "T0", "T1", "T4", "T14", cases=10) == ["holds"] * 4
    wrong = ps.testing.loop(mean_of_means, abilities=abilities)
    assert judged(wrong, "T1")[0].startswith("wrong")


def test_a_loss_near_zero_is_evaluated_with_the_rounding_of_what_it_is_made_of() -> None:
    """One update in float32 at a large rate fits such a model, whose loss was large before."""
    torch.manual_seed(0)
    task = ps.testing.causal_lm(Words(8.0, torch.float32))

    class Single(PlainLoop):
        abilities = Abilities(dtype=torch.float32, weights="mask", task=task)

        def dropped(self, batch: Batch) -> Batch:
            return batch

    assert judged(Single(), "T0", cases=30) == ["holds"]


@pytest.mark.parametrize(("momentum", "finding"), [(False, "holds"), (True, "wrong")])
def test_plain_sgd_is_not_asked_for_more(momentum: bool, finding: str) -> None:
    def plain(model: Any, optimizer: Any, batches: Sequence[Batch], problem: Problem) -> None:
        model.zero_grad()
        count = sum(problem.weights(batch).sum() for batch in batches)
        for batch in batches:
            ((problem.losses(model, batch) * problem.weights(batch)).sum() / count).backward()
        for p in model.parameters():
            p.data -= problem.learning_rate * p.grad

    trainer = ps.testing.loop(plain, abilities=Abilities(momentum=momentum))
    assert judged(trainer, "T0", cases=40)[0].startswith(finding)


def test_no_number_in_both_runs_is_the_same_in_both() -> None:
    """A trainer that divides by zero is wrong about the equation, and right about the order."""

    def nothing(model: Any, optimizer: Any, batches: Sequence[Batch], problem: Problem) -> None:
        for p in model.parameters():
            p.data.fill_(float("nan"))

    equation, order = judged(ps.testing.loop(nothing), "T0", "T3", cases=5)
    assert equation.startswith("wrong")
    assert order == "holds"


def test_evaluation_is_compared_with_the_equation() -> None:
    class Wrong(PlainLoop):
        def evaluate(self, group: Sequence[Sequence[Batch]]) -> float:
            return 2 * super().evaluate(group)

    (found,) = judged(Wrong(), "T0", cases=10)
    assert found.startswith("wrong")
    assert "evaluation" in found


def test_pytest_has_one_test_for_each_law(tmp_path: Any) -> None:
    (tmp_path / "test_mine.py").write_text(
        "import purestep as ps\n"
        "from proofs.plain_loop import PlainLoop\n"
        "test_my_trainer = ps.testing.laws(PlainLoop, ['T0', 'T3', 'T17'], cases=3)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert "2 passed, 1 skipped" in ran.stdout, ran.stdout + ran.stderr
    assert "it has one way" in ran.stdout


def test_without_hypothesis_the_rest_is_there() -> None:
    program = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "import purestep as ps; ps.testing.ThreadAxis(2)\n"
        "try: ps.testing.judge\n"
        "except ImportError as error: print(error)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert 'pip install "purestep[testing]"' in ran.stdout


@given(problems(Abilities()), st.lists(exact_batches(), min_size=1, max_size=3))
def test_the_specification_is_the_step_of_torch(problem: Problem, batches: list[Batch]) -> None:
    """``torch.optim.SGD`` on the mean over all tokens."""
    specification, module = Specification(), problem.module()
    specification.start(problem, 1)
    optimizer = problem.optimizer(module)
    for batch in batches:
        specification.update([[batch]])
        optimizer.zero_grad()
        losses = (module(batch["x"]) - batch["y"]).square()
        (losses * batch["w"]).sum().div(batch["w"].sum()).backward()
        optimizer.step()
    (seen,) = specification.observe()
    tokens = sum(batch["w"].numel() for batch in batches)
    allowed = bound(problem, [*batches], tokens, torch.float64)
    for name, p in module.named_parameters():
        assert (p - seen.params[name]).norm() <= 2 * allowed.params[name]


def test_a_model_is_printed_as_code() -> None:
    model = Linear([1.0, 0.0], 0.5, torch.float64)
    assert repr(model) == "ps.testing.Linear([1.0, 0.0], 0.5, torch.float64)"
    again = eval(repr(model), {"ps": ps, "torch": torch})
    assert torch.equal(again.weight, model.weight)
    assert torch.equal(again.bias, model.bias)
