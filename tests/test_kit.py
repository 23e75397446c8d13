"""The kit for trainers: what it draws, what it allows for rounding, and how it tells what it found."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import find, given, strategies as st
from torch import Tensor, nn

import purestep as ps
from proofs.plain_loop import PlainLoop
from purestep.testing import LAWS, Abilities, Linear, Problem, Specification
from purestep.testing.bounds import bound
from purestep.testing.specification import together
from purestep.testing.strategies import (
    cuts,
    exact_batches,
    orders,
    problems,
    ranks,
    regrouped,
    weights,
)

Batch = dict[str, Tensor]


@given(st.integers(1, 6).flatmap(lambda rows: st.tuples(st.just(rows), cuts(rows, empty=False))))
def test_a_cut_has_every_row_once_and_in_order(drawn: tuple[int, list[list[int]]]) -> None:
    rows, cut = drawn
    assert [row for part in cut for row in part] == list(range(rows))
    assert all(cut)


@given(
    cuts(4, empty=False).flatmap(lambda cut: st.tuples(st.just(cut), ranks(cut, 3), orders(cut)))
)
def test_ranks_and_orders_keep_every_microbatch(
    drawn: tuple[list[list[int]], list[list[list[int]]], list[list[int]]],
) -> None:
    cut, shares, other = drawn
    assert sorted(part for share in shares for part in share) == sorted(cut)
    assert sorted(map(sorted, other)) == sorted(cut)


def test_even_ranks_hold_equally_many() -> None:
    @given(ranks([[0], [1], [2], [3]], 3, uneven=False))
    def even(shares: list[list[list[int]]]) -> None:
        assert len({len(share) for share in shares}) == 1
        assert [part for share in shares for part in share] == [[0], [1], [2], [3]]

    even()


@pytest.mark.parametrize("kind", ["mask", "whole", "any"])
def test_exact_weights_sum_to_a_power_of_two(kind: Any) -> None:
    @given(weights(2, 3, kind))
    def exact(drawn: list[list[float]]) -> None:
        total = Fraction(sum(map(sum, drawn)))
        assert total > 0
        assert (
            (total.numerator & (total.numerator - 1))
            == (total.denominator & (total.denominator - 1))
            == 0
        )

    exact()


@pytest.mark.parametrize("kind", ["mask", "whole", "any"])
def test_other_sums_are_drawn_too(kind: Any) -> None:
    assert (
        sum(map(sum, find(weights(1, 3, kind, exact=False), lambda w: sum(map(sum, w)) == 3))) == 3
    )


@given(exact_batches().flatmap(lambda b: st.tuples(st.just(b), regrouped(b, most_ranks=3))))
def test_a_group_has_every_token_once(drawn: tuple[Batch, tuple[list[list[Batch]], str]]) -> None:
    batch, (group, _) = drawn
    whole = together([part for share in group for part in share])
    assert whole is not None

    def tokens(batch: Batch) -> list[Any]:
        counted = batch["w"] > 0
        flat = torch.cat([batch["x"], batch["y"][..., None], batch["w"][..., None]], -1)
        return sorted(flat[counted].tolist())

    assert tokens(whole) == tokens(batch)


def test_failures_shrink_to_what_a_person_can_read() -> None:
    def mean_of_means(
        model: Any, optimizer: Any, microbatches: Sequence[Batch], problem: Problem
    ) -> None:
        optimizer.zero_grad()
        for batch in microbatches:
            counted = problem.weights(batch)
            loss = (problem.losses(model, batch) * counted).sum() / counted.sum().clamp(min=1)
            (loss / len(microbatches)).backward()
        optimizer.step()

    trainer = ps.testing.loop(mean_of_means, abilities=Abilities(weights="mask"))
    (verdict,) = ps.testing.judge(trainer, ["T1"])
    assert verdict.finding == "wrong"
    assert verdict.case is not None
    # Two means of equally many tokens are no mistake: a row more, or more tokens in one row, is the least that shows it.
    least = ("rows [0] | [1, 2];", "rows [0] | [1];")
    assert any(rows in verdict.case.words() for rows in least), verdict.case.words()
    with pytest.raises(AssertionError, match=r"T1 .cut. does not hold") as raised:
        ps.testing.check(trainer, ["T1"])
    code = str(raised.value).split("To see it with a trainer of yours:")[1]
    seen: dict[str, Any] = {"trainer": trainer, "print": lambda told: outcomes.append(told)}
    outcomes: list[Any] = []
    exec(code, seen)
    (first,), (second,) = outcomes
    apart = [(first.params[name] - second.params[name]).norm() for name in first.params]
    assert max(apart) > 0.01, "the code to paste does not show what was found"


def _float32(problem: Problem, batches: list[Batch]) -> dict[str, Tensor]:
    """The equation in float32, divided and summed in as many steps as anybody would."""
    params, moments = (
        problem.params(),
        {n: torch.zeros_like(p) for n, p in problem.params().items()},
    )
    for batch in batches:
        total = batch["w"].sum().to(torch.float32)
        x, y, w = (batch[key].to(torch.float32) for key in ("x", "y", "w"))
        sums = {name: torch.zeros_like(p) for name, p in params.items()}
        for row in range(len(w)):
            for column in range(w.shape[1]):
                residual = x[row, column] @ params["weight"] + params["bias"] - y[row, column]
                scale = 2 * residual * (w[row, column] / w[row].sum().clamp(min=1))
                share = scale * (w[row].sum().clamp(min=1) / total)
                sums["weight"] += share * x[row, column]
                sums["bias"] += share
        for name in params:
            moments[name] = problem.momentum * moments[name] + (
                sums[name] + problem.weight_decay * params[name]
            )
            params[name] = params[name] - problem.learning_rate * moments[name]
    return params


@given(
    problems(Abilities(dtype=torch.float32)),
    st.lists(exact_batches(exact=False, kind="whole", dtype=torch.float32), min_size=1, max_size=3),
)
def test_the_bound_holds_for_float32(problem: Problem, batches: list[Batch]) -> None:
    """Against the same polynomial in rational numbers."""
    exact = {
        name: [Fraction(v) for v in p.flatten().tolist()] for name, p in problem.params().items()
    }
    moments = {name: [Fraction(0)] * len(values) for name, values in exact.items()}
    numbers = [Fraction(v) for v in (problem.momentum, problem.weight_decay, problem.learning_rate)]
    for batch in batches:
        total = Fraction(int(batch["w"].sum()))
        sums = {name: [Fraction(0)] * len(values) for name, values in exact.items()}
        for row, (xs, ys, ws) in enumerate(
            zip(*(batch[k].tolist() for k in ("x", "y", "w")), strict=True)
        ):
            assert row < len(batch["w"])
            for x, y, w in zip(xs, ys, ws, strict=True):
                features = [Fraction(v) for v in x]
                residual = sum(a * b for a, b in zip(features, exact["weight"], strict=True))
                residual += exact["bias"][0] - Fraction(y)
                for at, feature in enumerate([*features, Fraction(1)]):
                    name, place = ("weight", at) if at < len(features) else ("bias", 0)
                    sums[name][place] += 2 * residual * feature * Fraction(w) / total
        for name, values in exact.items():
            moments[name] = [
                numbers[0] * m + g + numbers[1] * p
                for m, g, p in zip(moments[name], sums[name], values, strict=True)
            ]
            exact[name] = [p - numbers[2] * m for p, m in zip(values, moments[name], strict=True)]
    found = _float32(problem, batches)
    tokens = sum(batch["w"].numel() for batch in batches)
    allowed = bound(problem, [*batches], tokens, torch.float32)
    for name, values in exact.items():
        off = [
            float(Fraction(have) - want)
            for have, want in zip(found[name].flatten().tolist(), values, strict=True)
        ]
        assert torch.tensor(off, dtype=torch.float64).norm() <= allowed.params[name]


def test_a_trainer_in_float32_is_accepted_and_its_bugs_are_seen() -> None:
    abilities = Abilities(dtype=torch.float32)
    assert all(
        v.finding in ("holds", "not asked")
        for v in ps.testing.judge(
            ps.testing.loop(right, abilities=abilities),
            cases=30,
            laws=["T0", "T1", "T3", "T4", "T5"],
        )
    )
    (verdict,) = ps.testing.judge(ps.testing.loop(unscaled, abilities=abilities), ["T0"])
    assert verdict.finding == "wrong"


def right(
    model: Any, optimizer: Any, microbatches: Sequence[Batch], problem: Problem
) -> dict[str, Any]:
    """The loop by hand, on one rank or on several processes."""
    optimizer.zero_grad()
    count = torch.stack(
        [problem.weights(b).sum().to(torch.float64) for b in microbatches]
        or [torch.zeros((), dtype=torch.float64)]
    ).sum()
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


def unscaled(model: Any, optimizer: Any, microbatches: Sequence[Batch], problem: Problem) -> None:
    """Never divides."""
    optimizer.zero_grad()
    for batch in microbatches:
        (problem.losses(model, batch) * problem.weights(batch)).sum().backward()
    optimizer.step()


def local_count(
    model: Any, optimizer: Any, microbatches: Sequence[Batch], problem: Problem
) -> None:
    """Divides by its own count, and averages over ranks."""
    optimizer.zero_grad()
    count = sum(problem.weights(b).sum() for b in microbatches) if microbatches else torch.zeros(())
    for batch in microbatches:
        ((problem.losses(model, batch) * problem.weights(batch)).sum() / max(count, 1)).backward()
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        torch.distributed.all_reduce(p.grad)
        p.grad /= torch.distributed.get_world_size()
    optimizer.step()


@pytest.mark.parametrize(("update", "finding"), [(right, "holds"), (local_count, "wrong")])
def test_programs_in_processes_are_judged(update: Any, finding: str) -> None:
    trainer = ps.testing.loop(update, abilities=Abilities(ranks=2))
    verdicts = ps.testing.judge(trainer, ["T2", "T6"], cases=15, shrink=15)
    assert [v.finding for v in verdicts] == [finding, "holds"], [str(v) for v in verdicts]


class Broken(PlainLoop):
    """Does something beside the update."""

    what = ""
    calls = 0

    def update(self, group: Sequence[Sequence[Batch]]) -> None:
        with torch.enable_grad():
            super().update(group)
        if self.what == "torch's global generator":
            torch.rand(1)
        if self.what == "Python's global generator":
            random.random()
        if self.what == "whether gradients are recorded":
            torch.set_grad_enabled(False)
        if self.what == "the default dtype":
            torch.set_default_dtype(torch.float64)
        if self.what == "the microbatch's y":
            group[0][0]["y"] += 1
        if self.what == "different bits":
            with torch.no_grad():
                self.calls += 1
                self.models[0].weight *= 1 + 2**-52 * (self.calls % 3)


@pytest.mark.parametrize(
    "what",
    [
        "torch's global generator",
        "Python's global generator",
        "whether gradients are recorded",
        "the default dtype",
        "the microbatch's y",
        "different bits",
    ],
)
def test_purity_sees(what: str) -> None:
    trainer = Broken()
    trainer.what = what
    state, kept = random.getstate(), torch.get_rng_state()
    try:
        (verdict,) = ps.testing.judge(trainer, ["T6"], cases=20, shrink=0)
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        random.setstate(state)
        torch.set_rng_state(kept)
    assert verdict.finding == "wrong"
    assert what in verdict.why


class Refusing(PlainLoop):
    """Takes one microbatch at most."""

    def update(self, group: Sequence[Sequence[Batch]]) -> None:
        if len(group[0]) > 1:
            raise ValueError("one microbatch, please")
        super().update(group)


def test_a_refusal_is_told_apart_from_a_wrong_number() -> None:
    (verdict,) = ps.testing.judge(Refusing(), ["T1"], cases=40)
    assert verdict.finding == "refuses"
    assert verdict.why == "ValueError: one microbatch, please"
    with pytest.raises(AssertionError, match=r"T1 .cut. is refused"):
        ps.testing.check(Refusing(), ["T1"], cases=40)


@pytest.mark.parametrize("wrong", [lambda *given: None, PlainLoop, None])
def test_what_is_no_trainer_is_told_how_to_become_one(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"ps.testing.loop\(update\)"):
        ps.testing.judge(wrong, ["T1"])


def test_unknown_laws_are_told_the_known_ones() -> None:
    asks: list[Any] = [ps.testing.judge, ps.testing.check, ps.testing.laws]
    for ask in asks:
        with pytest.raises(ValueError, match="no law 'T8': they are T0, T1"):
            ask(PlainLoop(), ["T8"])


def test_a_law_that_asks_for_too_much_is_not_asked() -> None:
    (ranks, resume, settings) = ps.testing.judge(Specification(), ["T15", "T16", "T17"], cases=5)
    assert {ranks.finding, resume.finding, settings.finding} == {"not asked"}


class Words(nn.Module):
    """Next tokens by a table."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Embedding(
            5,
            5,
            dtype=torch.float64,
            _weight=torch.randn(5, 5, generator=generator, dtype=torch.float64),
        )

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        from types import SimpleNamespace

        return SimpleNamespace(logits=self.table(input_ids))


def test_language_models_are_judged() -> None:
    task = ps.testing.causal_lm(Words())
    abilities = Abilities(weights="mask", task=task)
    for update, finding in ((right, "holds"), (unscaled, "wrong")):
        trainer = ps.testing.loop(update, abilities=abilities)
        verdicts = ps.testing.judge(trainer, ["T0", "T1", "T3", "T4", "T14"], cases=20, shrink=0)
        assert verdicts[0].finding == finding, verdicts[0].why
        assert all(v.finding == "holds" for v in verdicts[1:]), [str(v) for v in verdicts]


def test_plain_sgd_is_not_asked_for_more() -> None:
    def plain(model: Any, optimizer: Any, batches: Sequence[Batch], problem: Problem) -> None:
        model.zero_grad()
        count = sum(problem.weights(batch).sum() for batch in batches)
        for batch in batches:
            ((problem.losses(model, batch) * problem.weights(batch)).sum() / count).backward()
        for p in model.parameters():
            p.data -= problem.learning_rate * p.grad

    for momentum, finding in ((False, "holds"), (True, "wrong")):
        trainer = ps.testing.loop(plain, abilities=Abilities(momentum=momentum))
        (verdict,) = ps.testing.judge(trainer, ["T0"], cases=40, shrink=0)
        assert verdict.finding == finding, verdict


def test_no_number_in_both_runs_is_the_same_in_both() -> None:
    """A trainer that divides by zero is wrong about the equation, and right about the order."""

    def nothing(model: Any, optimizer: Any, batches: Sequence[Batch], problem: Problem) -> None:
        for p in model.parameters():
            p.data.fill_(float("nan"))

    verdicts = ps.testing.judge(ps.testing.loop(nothing), ["T0", "T3"], cases=5, shrink=0)
    assert [verdict.finding for verdict in verdicts] == ["wrong", "holds"]


def test_evaluation_is_compared_with_the_equation() -> None:
    class Wrong(PlainLoop):
        def evaluate(self, group: Sequence[Sequence[Batch]]) -> float:
            return 2 * super().evaluate(group)

    (verdict,) = ps.testing.judge(Wrong(), ["T0"], cases=10, shrink=0)
    assert verdict.finding == "wrong"
    assert "evaluation" in verdict.why


def test_a_loss_near_zero_is_evaluated_with_the_rounding_of_what_it_is_made_of() -> None:
    """One update in float32 at a large rate fits such a model, whose loss was large before."""

    class Single(PlainLoop):
        def __init__(self, model: nn.Module) -> None:
            task = ps.testing.causal_lm(model)
            self.abilities = Abilities(dtype=torch.float32, weights="mask", task=task)

        def dropped(self, batch: Batch) -> Batch:
            return batch

    class Steep(Words):
        def __init__(self) -> None:
            super().__init__()
            self.table.weight.data.mul_(8)
            torch.manual_seed(0)
            self.out = nn.Linear(5, 5, dtype=torch.float64)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
            seen = super().forward(input_ids, attention_mask)
            seen.logits = self.out(seen.logits)
            return seen

    (verdict,) = ps.testing.judge(Single(Steep().to(torch.float32)), ["T0"], cases=30, shrink=0)
    assert verdict.finding == "holds", verdict


def test_pytest_has_one_test_for_each_law(tmp_path: Any) -> None:
    (tmp_path / "test_mine.py").write_text(
        "import purestep as ps\n"
        "from proofs.plain_loop import PlainLoop\n"
        "test_my_trainer = ps.testing.laws(PlainLoop, cases=3)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert f"{len(LAWS) - 1} passed, 1 skipped" in ran.stdout, ran.stdout + ran.stderr
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


def test_the_specification_is_the_step_of_torch() -> None:
    """``torch.optim.SGD`` on the mean over all tokens."""

    @given(problems(Abilities()), st.lists(exact_batches(), min_size=1, max_size=3))
    def same(problem: Problem, batches: list[Batch]) -> None:
        specification = Specification()
        specification.start(problem, 1)
        module = problem.module()
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

    same()


def test_a_model_is_told_as_code() -> None:
    model = Linear([1.0, 0.0], 0.5, torch.float64)
    assert repr(model) == "ps.testing.Linear([1.0, 0.0], 0.5, torch.float64)"
    again = eval(repr(model), {"ps": ps, "torch": torch})
    assert torch.equal(again.weight, model.weight)
    assert torch.equal(again.bias, model.bias)
