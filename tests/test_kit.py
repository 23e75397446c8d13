"""Tests the kit for trainers: its draws, its bounds for rounding, and its reports.

proofs/test_kit.py tests that it accepts right trainers, and finds bugs that have happened.
"""

import itertools
import json
import math
import os
import random
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import purestep as ps
from benchmarks.mistakes.right_loops import adamw, divided_first as right
from purestep.testing import (
    Capabilities,
    Linear,
    Problem,
    ReferenceTrainer,
    __main__ as command_line,
    accepting,
)
from purestep.testing.adapters import OneRank, PureTrainer
from purestep.testing.bounds import compute_bound
from purestep.testing.case import Run, describe_cause
from purestep.testing.draws import Draw, counterexample
from purestep.testing.pairs import draw_pair
from purestep.testing.processes import World
from purestep.testing.watch import Watch
from purestep.testing.writing import KINDS, microbatches
from support.plain_loop import PlainLoop
from support.programs import run_program
from tests.judged_programs import MEAN_OF_MEANS

Batch = dict[str, Tensor]
Batches = Sequence[Batch]


def judged(trainer: Any, *laws: str, cases: int = 20) -> list[str]:
    """Returns the findings, with the law's own words where it does not hold."""
    verdicts = ps.testing.run_laws(trainer, laws, cases=cases, shrink=0)
    findings = []
    for verdict in verdicts:
        if verdict.reason:
            findings.append(f"{verdict.status}: {verdict.reason}")
        else:
            findings.append(verdict.status)
    return findings


def mean_of_means(
    model: Any, optimizer: Any, microbatches: Batches, problem: Problem
) -> None:
    """Divides each microbatch by its own count."""
    optimizer.zero_grad()
    for batch in microbatches:
        weights = problem.weights(batch)
        total = (problem.losses(model, batch) * weights).sum()
        loss = total / weights.sum().clamp(min=1)
        (loss / len(microbatches)).backward()
    optimizer.step()


def unshifted(
    model: Any, optimizer: Any, microbatches: Batches, problem: Problem
) -> None:
    """Counts all labels, also that of the first token, which no logits predict."""
    all_labels: Any = SimpleNamespace(
        losses=problem.losses,
        weights=lambda m: m["labels"] != -100,
    )
    right(model, optimizer, microbatches, all_labels)


def decaying(
    model: Any, optimizer: Any, microbatches: Batches, problem: Problem
) -> None:
    """Lowers the learning rate with each microbatch."""
    right(model, optimizer, microbatches, problem)
    optimizer.param_groups[0]["lr"] *= 0.9 ** len(microbatches)


def is_power_of_two(number: float) -> bool:
    """Looks at the numerator: dividing by a power of two is exact as well."""
    numerator = Fraction(number).numerator
    return numerator & (numerator - 1) == 0


@pytest.mark.parametrize("cut_kind", KINDS)
@pytest.mark.parametrize("weights", ["mask", "whole", "any"])
def test_microbatches_differ_as_their_kind_says(cut_kind: str, weights: Any) -> None:
    sums = set()
    for seed in range(60):
        draw = Draw({}, random.Random(seed))
        parts = draw.many(range(2, 10))
        batch, cut = microbatches(draw, Capabilities(weights=weights), parts, cut_kind)
        rows = batch["w"].double().sum(1)
        totals = {float(rows[part].sum()) for part in cut}
        sizes = {len(part) for part in cut}
        assert len(cut) == len(parts)
        assert (0.0 in totals) == (cut_kind == "empty ones")
        assert len(totals) == 1 or cut_kind != "equal tokens"
        assert len(totals) > 1 or cut_kind == "equal tokens"
        if cut_kind in ("equal tokens", "unequal rows"):
            assert len({*rows.tolist()}) == 1
            assert (len(sizes) == 1) == (cut_kind == "equal tokens")
        sums.add(is_power_of_two(float(rows.sum())))
    if cut_kind not in KINDS[:2]:
        assert sums == {True, False}, "sums are powers of two, and others"


def test_two_runs_are_never_the_same() -> None:
    """Draws two runs that differ in the subject of the law."""
    uneven = PlainLoop.capabilities
    for name in ("T1", "T2", "T3", "T4", "T5", "T7", "T14", "T16"):
        law = ps.testing.LAWS[name]
        for able in (uneven, uneven._replace(uneven_ranks=False)):
            trainer = SimpleNamespace(capabilities=able)
            for part, seed in itertools.product(law.parts, range(20)):
                draw = Draw({(0,): seed}, random.Random(seed))
                case = law.draw_case(draw, trainer, part)
                assert_runs_differ(case)
                if name == "T2":
                    assert case.second.ranks > 1
                if not able.uneven_ranks:
                    assert_even(case)


def test_a_reproducer_names_another_task() -> None:
    able = SimpleNamespace(capabilities=PlainLoop.capabilities)
    case = ps.testing.LAWS["T3"].draw_case(Draw({}, random.Random(0)), able, "")
    of_regression = case.reproducer()
    assert "Problem(ps.testing.REGRESSION, ps.testing.Linear(" in of_regression
    other = replace(case.problem, task=replace(ps.testing.REGRESSION, roundings=3))
    of_task = replace(case, problem=other).reproducer()
    assert of_task == of_regression.replace("ps.testing.REGRESSION", "task")


def test_a_reproducer_has_a_learning_rate_of_zero() -> None:
    able = SimpleNamespace(capabilities=PlainLoop.capabilities)
    case = ps.testing.LAWS["T3"].draw_case(Draw({}, random.Random(0)), able, "")
    still = replace(case.problem, learning_rate=0.0)
    assert "learning_rate=0.0" in replace(case, problem=still).reproducer()


def test_a_cause_that_was_not_raised_is_passed_over() -> None:
    with pytest.raises(ValueError, match="after") as caught:
        raise ValueError("after") from KeyError("before")
    described = describe_cause(caught.value)
    assert described.startswith("ValueError: after (test_kit.py:")
    assert "before" not in described
    assert described.count("after") == 1


def assert_runs_differ(case: Any) -> None:
    """Compares the code that reproduces each run, but for the words that describe it."""
    runs: list[Any] = [case.first, case.second]
    first, second = [
        replace(case, first=None, second=run._replace(label="")).reproducer()
        for run in runs
    ]
    assert first != second, case.describe()


def assert_even(case: Any) -> None:
    """Checks that all ranks have equally many microbatches."""
    for group in case.second.groups:
        assert len({len(microbatches) for microbatches in group}) == 1


@pytest.mark.parametrize("plain_sgd", [True, False])
@pytest.mark.parametrize("name", ["T1", "T2", "T14"])
def test_both_runs_of_a_case_count_the_same_tokens_in_every_update(
    name: str, plain_sgd: bool
) -> None:
    """As a learning rate that follows the tokens consumed asks for; there are earlier updates."""
    law = ps.testing.LAWS[name]
    trainer = SimpleNamespace(capabilities=Capabilities(ranks=2, plain_sgd=plain_sgd))
    written_differently = 0
    for part, seed in itertools.product(law.parts, range(20)):
        draw = Draw({(0,): seed}, random.Random(seed))
        case: Any = law.draw_case(draw, trainer, part)
        for first, second in zip(case.first.groups, case.second.groups, strict=True):
            assert sum_weights(first) == pytest.approx(sum_weights(second))
        earlier = str(case.first.groups[:-1]) != str(case.second.groups[:-1])
        written_differently += earlier
    assert written_differently > 5


@pytest.mark.parametrize("name", ["T2", "T14"])
def test_a_language_model_on_ranks_has_an_earlier_update(name: str) -> None:
    """Under AdamW, a schedule that goes on once for each rank shows in the second update."""
    task = ps.testing.causal_lm(Words())
    capabilities = Capabilities(ranks=2, plain_sgd=False, weights="mask", task=task)
    numbers = set()
    for seed in range(20):
        draw = Draw({(0,): seed}, random.Random(seed))
        trainer = SimpleNamespace(capabilities=capabilities)
        case = ps.testing.LAWS[name].draw_case(draw, trainer, "")
        numbers.add((case.second.ranks, len(case.second.groups)))
    assert (2, 2) in numbers


def sum_weights(group: Any) -> float:
    """Sums the weights of all microbatches of all ranks."""
    return sum(float(batch["w"].sum()) for share in group for batch in share)


def test_every_update_of_a_model_that_drops_has_keys() -> None:
    trainer = SimpleNamespace(
        capabilities=Capabilities(
            ranks=2,
            weights="mask",
            task=ps.testing.causal_lm(Words()),
            dropout=True,
            plain_sgd=False,
        )
    )
    num_updates = set()
    for seed in range(40):
        draw = Draw({(0,): seed}, random.Random(seed))
        case = ps.testing.LAWS["T15"].draw_case(draw, trainer, "")
        num_updates.add(len(case.second.groups))
        assert case.first is not None
        for run in (case.first, case.second):
            batches = [b for group in run.groups for share in group for b in share]
            assert all("key" in batch for batch in batches)
    assert num_updates == {1, 2}


def test_every_number_of_microbatches_is_drawn() -> None:
    (verdict,) = ps.testing.run_laws(ReferenceTrainer(), ["T1"])
    coverage = verdict.coverage
    assert {*coverage["microbatches"]} == {*range(2, 10)}
    assert min(coverage["microbatches"].values()) >= 8
    assert {*coverage["updates"]} == {*range(1, 7)}
    assert {*coverage["weights"]} == {"0 and 1", "whole", "fractions"}
    assert [part.cases for part in verdict.parts.values()] == [25] * 4


def test_choices_become_simpler() -> None:
    def claim(numbers: list[int]) -> None:
        if sum(numbers) >= 12:
            raise AssertionError(sum(numbers))

    def case(draw: Draw) -> list[int]:
        parts = draw.many(range(9))
        return [part.one(range(9)) for part in parts]

    def true_claim(numbers: list[int]) -> None:
        pass

    smallest = counterexample(case, claim, most=20, shrink=200, seed=0)
    assert smallest is not None
    assert smallest.args == (12,)
    assert counterexample(case, claim, most=20, shrink=0, seed=0) is not None
    assert counterexample(case, true_claim, most=20, shrink=0, seed=0) is None


def test_failures_shrink_to_what_a_person_can_read() -> None:
    trainer = ps.testing.loop(mean_of_means, capabilities=Capabilities(weights="mask"))
    message = r"T1 .cut, unequal \w+. does not hold"
    with pytest.raises(AssertionError, match=message) as raised:
        ps.testing.check(trainer, ["T1"])
    text = str(raised.value)
    # Two means of equally many tokens are no mistake: the least that shows it has a row more, or
    # more tokens in one row.
    smallest = r"rows \[0(, 1)?\] \| \[[12](, 2)?\]; start weight \["
    assert re.search(smallest, text)

    # The code to paste shows the mistake.
    outcomes: list[Any] = []
    code = text.split("To see it with a trainer of yours:")[1]
    exec(code, {"trainer": trainer, "print": outcomes.append})
    (first,), (second,) = outcomes
    distances = [
        (first.params[name] - second.params[name]).norm() for name in first.params
    ]
    assert max(distances) > 0.01, "the code to paste does not show what was found"


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        (right, "holds"),
        (mean_of_means, "wrong"),
    ],
)
def test_programs_in_processes_are_judged(update: Any, expected: str) -> None:
    """Judges one that sums gradients over ranks, and one that does not."""
    trainer = ps.testing.loop(update, capabilities=Capabilities(ranks=2))
    for finding in judged(trainer, "T2", "T6", cases=10):
        assert finding.startswith(expected)


CALLS = itertools.count()


def draw_number(trainer: Any) -> None:
    random.random()


def stop_recording(trainer: Any) -> None:
    torch.set_grad_enabled(False)


def set_dtype(trainer: Any) -> None:
    torch.set_default_dtype(torch.float64)


def change_bits(trainer: Any) -> None:
    """Scales a weight by a few roundings, of which each call takes another number."""
    factor = 1 + 2**-52 * (next(CALLS) % 3)
    trainer.models[0].weight.data.mul_(factor)


IMPURITIES: dict[str, Any] = {
    "Python's global generator": draw_number,
    "whether gradients are recorded": stop_recording,
    "the default dtype": set_dtype,
    "different bits": change_bits,
}


@pytest.mark.parametrize("what", IMPURITIES)
def test_purity_sees(what: str) -> None:
    class Broken(PlainLoop):
        def update(self, group: Sequence[Sequence[Batch]]) -> None:
            with torch.enable_grad():
                super().update(group)
            IMPURITIES[what](self)

    state = random.getstate()
    try:
        (finding,) = judged(Broken(), "T6")
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        random.setstate(state)
    assert finding.startswith("wrong")
    assert what in finding


def test_a_refusal_is_no_wrong_number() -> None:
    class Refusing(PlainLoop):
        def update(self, group: Sequence[Sequence[Batch]]) -> None:
            if len(group[0]) > 1:
                raise ValueError("only one, please")
            super().update(group)

    (finding,) = judged(Refusing(), "T1")
    expected = r"refuses: ValueError: only one, please \(test_kit.py:\d+, in update\)"
    assert re.match(expected, finding)
    with pytest.raises(AssertionError, match=r"T1 .cut, equal tokens. is refused"):
        ps.testing.check(Refusing(), ["T1"], cases=20)


@pytest.mark.parametrize("wrong", [lambda *args: None, PlainLoop, None])
def test_an_object_that_is_no_trainer(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"ps.testing.loop\(update\)"):
        ps.testing.run_laws(wrong, ["T1"])
    test: Any = ps.testing.law_tests(lambda: wrong, ["T2"])
    with pytest.raises(TypeError, match=r"ps.testing.loop\(update\)"):
        test("T2")


@pytest.mark.parametrize(
    "ask", [ps.testing.run_laws, ps.testing.check, ps.testing.law_tests]
)
def test_unknown_laws(ask: Any) -> None:
    with pytest.raises(ValueError, match="no law 'T8': they are T0, T1"):
        ask(PlainLoop(), ["T8"])


@pytest.mark.parametrize(
    "ask", [ps.testing.run_laws, ps.testing.check, ps.testing.law_tests]
)
@pytest.mark.parametrize("cases", [0, -1])
def test_no_cases(ask: Any, cases: int) -> None:
    """Every law would hold in them."""
    with pytest.raises(ValueError, match=f"cases is {cases}, .* try 1 or more"):
        ask(PlainLoop(), ["T1"], cases=cases)


@pytest.mark.parametrize("ask", [ps.testing.run_laws, ps.testing.check])
def test_an_unknown_law_is_refused_before_others_are_judged(ask: Any) -> None:
    has_started = False

    class Watched(PlainLoop):
        def start(self, *args: Any) -> None:
            nonlocal has_started
            has_started = True

    with pytest.raises(ValueError, match="no law 'T8'"):
        ask(Watched(), ["T1", "T8"])
    assert not has_started


def test_one_rank_is_not_asked_for_two() -> None:
    program: Any = None
    with pytest.raises(ValueError, match=r"capabilities.ranks=2: take Processes"):
        OneRank(program, Capabilities(ranks=2))


def test_a_saved_state_can_be_loaded_twice() -> None:
    """Also if the step writes over the state that it is given."""

    def make(problem: Any, axis: Any) -> Any:
        def step(params: Any, opt_state: Any, microbatches: Any) -> Any:
            for leaf in params.values():
                leaf += 1
            return params, opt_state, None

        return {"w": torch.zeros(2)}, (), step

    problem: Any = None
    trainer = PureTrainer(make, Capabilities())
    trainer.start(problem, 1)
    saved = trainer.save()
    for _ in range(2):
        trainer.load(saved)
        trainer.update([[]])
        (seen,) = trainer.observe()
        assert seen.params["w"].tolist() == [1, 1]


def test_laws_beyond_the_abilities_are_not_asked() -> None:
    for finding in judged(ReferenceTrainer(), "T15", "T16", "T17", cases=5):
        assert finding.startswith("not asked")


class Words(nn.Module):
    """Predicts next tokens by a table, and perhaps a layer behind it."""

    def __init__(self, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        table = torch.randn(5, 5, generator=generator, dtype=dtype)
        self.table = nn.Embedding(5, 5, _weight=scale * table)
        self.out: nn.Module = nn.Identity()
        if scale > 1:
            self.out = nn.Linear(5, 5, bias=False, dtype=dtype)

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        hidden = self.table(input_ids)
        return SimpleNamespace(logits=self.out(hidden))


class OtherTrainer(NamedTuple):
    """Describes a trainer, the laws that it obeys, and a bug that the first of them finds."""

    capabilities: Capabilities
    laws: list[str]
    bug: Any
    prepare: Any = None


TRAINERS: dict[str, OtherTrainer] = {
    "float32": OtherTrainer(
        capabilities=Capabilities(dtype=torch.float32),
        laws=["T1", "T0", "T4", "T5"],
        bug=mean_of_means,
    ),
    "a language model": OtherTrainer(
        capabilities=Capabilities(weights="mask", task=ps.testing.causal_lm(Words())),
        laws=["T0", "T1", "T4", "T14"],
        bug=unshifted,
    ),
    "another update than SGD": OtherTrainer(
        capabilities=Capabilities(plain_sgd=False),
        laws=["T1", "T3", "T4", "T7"],
        bug=decaying,
        prepare=adamw,
    ),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_trainers_of_other_kinds_are_accepted_and_their_bugs_are_seen(
    name: str,
) -> None:
    capabilities, laws, bug, prepare = TRAINERS[name]
    right_trainer = ps.testing.loop(right, prepare, capabilities)
    assert judged(right_trainer, *laws, cases=10) == ["holds"] * 4
    wrong_trainer = ps.testing.loop(bug, prepare, capabilities)
    (finding,) = judged(wrong_trainer, laws[0])
    assert finding.startswith("wrong")


def test_a_loss_near_zero_is_evaluated_with_the_rounding_of_what_it_is_made_of() -> (
    None
):
    """Fits the model by one update in float32 at a large rate: its loss was large before."""
    torch.manual_seed(0)
    task = ps.testing.causal_lm(Words(8.0, torch.float32))

    class Single(PlainLoop):
        capabilities = Capabilities(dtype=torch.float32, weights="mask", task=task)

        def dropped(self, batch: Batch) -> Batch:
            return batch

    assert judged(Single(), "T0", cases=30) == ["holds"]


@pytest.mark.parametrize(
    ("momentum", "expected"),
    [
        (False, "holds"),
        (True, "wrong"),
    ],
)
def test_plain_sgd_is_not_asked_for_more(momentum: bool, expected: str) -> None:
    def plain(model: Any, optimizer: Any, batches: Batches, problem: Problem) -> Any:
        model.zero_grad()
        count = sum(problem.weights(batch).sum() for batch in batches)
        for batch in batches:
            weighted = problem.losses(model, batch) * problem.weights(batch)
            (weighted.sum() / count).backward()
        for p in model.parameters():
            p.data -= problem.learning_rate * p.grad
        return {"num_tokens": count}

    trainer = ps.testing.loop(plain, capabilities=Capabilities(momentum=momentum))
    (finding,) = judged(trainer, "T0", cases=40)
    assert finding.startswith(expected)


def test_no_number_in_both_runs_is_the_same_in_both() -> None:
    """Finds a trainer whose params are NaN wrong about the equation, not about the order."""

    def nothing(model: Any, optimizer: Any, batches: Batches, problem: Problem) -> None:
        for p in model.parameters():
            p.data.fill_(float("nan"))

    equation, order = judged(ps.testing.loop(nothing), "T0", "T3", cases=5)
    assert equation.startswith("wrong")
    assert order == "holds"


def test_evaluation_is_compared_with_the_equation() -> None:
    class Wrong(PlainLoop):
        def evaluate(self, group: Sequence[Sequence[Batch]]) -> float:
            return 2 * super().evaluate(group)

    (finding,) = judged(Wrong(), "T0", cases=10)
    assert finding.startswith("wrong")
    assert "evaluation" in finding


def test_pytest_has_one_test_for_each_law() -> None:
    test: Any = ps.testing.law_tests(PlainLoop, ["T0", "T17"], cases=3)
    (mark,) = test.pytestmark
    assert mark.args == ("law", ["T0", "T17"])
    with pytest.raises(pytest.skip.Exception, match="not asked: it has one way"):
        test("T17")


def test_a_model_is_printed_as_code() -> None:
    model = Linear([1.0, 0.0], 0.5, torch.float64)
    assert repr(model) == "ps.testing.Linear([1.0, 0.0], 0.5, torch.float64)"
    again = eval(repr(model), {"ps": ps, "torch": torch})
    assert torch.equal(again.weight, model.weight)
    assert torch.equal(again.bias, model.bias)


def impure(model: Any, optimizer: Any, microbatches: Batches, problem: Problem) -> None:
    """Updates correctly, but seeds torch's generator and writes to its inputs."""
    right(model, optimizer, microbatches, problem)
    torch.manual_seed(0)
    for batch in microbatches:
        batch["y"].zero_()


def widen(model: Any, optimizer: Any, microbatches: Batches, problem: Problem) -> None:
    """Updates correctly, but changes a setting that stays changed after the first call."""
    torch.set_default_dtype(torch.float64)
    right(model, optimizer, microbatches, problem)


@pytest.mark.parametrize("ranks", [1, 2])
def test_global_state_that_the_first_run_changes(ranks: int) -> None:
    """It is put back before the next run, in each process."""
    trainer = ps.testing.loop(widen, capabilities=Capabilities(ranks=ranks))
    (verdict,) = ps.testing.run_laws(trainer, ["T6"], cases=6, shrink=0)
    assert verdict.parts["global state"].status == "wrong"


@pytest.mark.parametrize("ranks", [1, 2])
def test_purity_is_asked_inside_of_each_rank(ranks: int) -> None:
    trainer = ps.testing.loop(impure, capabilities=Capabilities(ranks=ranks))
    (verdict,) = ps.testing.run_laws(trainer, ["T6"], cases=6, shrink=0)
    assert {*verdict.parts} == {"bits", "inputs", "global state"}
    assert verdict.parts["bits"].status == "holds"
    assert verdict.parts["inputs"].status == "wrong"
    assert verdict.parts["global state"].status == "wrong"
    assert "microbatch's y" in verdict.parts["inputs"].reason
    assert "torch's global generator" in verdict.parts["global state"].reason


def test_a_single_setting_is_nothing_to_compare() -> None:
    class Single(ReferenceTrainer):
        settings: ClassVar = ["only"]

        def select_setting(self, setting: str) -> None:
            raise AssertionError("nothing is selected")

    assert judged(Single(), "T17") == ["not asked: it has one way"]


def test_updates_of_bfloat16_that_are_looked_at_are_called_updates() -> None:
    able = Capabilities(dtype=torch.bfloat16)
    trainer = SimpleNamespace(capabilities=able)
    labels = set()
    for seed in range(20):
        draw = Draw({}, random.Random(seed))
        case: Any = draw_pair(draw, trainer, "look", "bits")
        if len(case.first.groups) > 1:
            labels.add((case.first.label, case.second.label))
    assert labels == {("these updates", "the same again, and looked at")}


def test_verdicts_say_how_far_the_cut_may_go() -> None:
    loop = ps.testing.loop(mean_of_means, capabilities=Capabilities(weights="mask"))
    (verdict,) = ps.testing.run_laws(loop, ["T1"], cases=40, shrink=0)
    assert str(verdict).startswith(
        "T1 cut: holds for equal tokens, wrong for unequal rows, unequal tokens, empty ones. "
    )


def test_another_dtype_than_declared_is_a_refusal_that_says_what_to_declare() -> None:
    def single(module: nn.Module, problem: Problem) -> tuple[Any, Any]:
        return module.float(), problem.optimizer(module)

    def update(
        model: Any, optimizer: Any, microbatches: Batches, problem: Problem
    ) -> None:
        narrow = []
        for batch in microbatches:
            x = batch["x"].float()
            narrow.append({**batch, "x": x})
        right(model, optimizer, narrow, problem)

    (finding,) = judged(ps.testing.loop(update, single), "T0")
    refusal = "refuses: its parameters are torch.float32, its capabilities say"
    assert finding.startswith(refusal)
    assert "declare Capabilities(dtype=torch.float32)" in finding


def failing(
    model: Any, optimizer: Any, microbatches: Batches, problem: Problem
) -> None:
    """Raises an error whose cause is another."""
    try:
        raise KeyError("the cause")
    except KeyError as error:
        raise RuntimeError("compilation failed\n\nsee the log") from error


@pytest.mark.parametrize("ranks", [1, 2])
def test_refusals_tell_their_cause(ranks: int) -> None:
    trainer = ps.testing.loop(failing, capabilities=Capabilities(ranks=ranks))
    (finding,) = judged(trainer, "T3", cases=2)
    expected = r"refuses: KeyError: 'the cause' \(test_kit.py:\d+, in failing\); then"
    assert re.match(expected, finding)


class Reporter(NamedTuple):
    """Steps as ``right`` does, and reports the mean loss of all updates, or of the last one."""

    forgets: bool
    means: list[Tensor]

    def update(
        self, model: Any, optimizer: Any, microbatches: Batches, problem: Problem
    ) -> dict[str, Tensor]:
        """Makes an update, and reports the loss before it."""
        if self.forgets:
            self.means.clear()
        weights = torch.cat([problem.weights(batch) for batch in microbatches])
        losses = [problem.losses(model, batch).detach() for batch in microbatches]
        total = (torch.cat(losses) * weights).sum()
        self.means.append(total / weights.sum() if weights.any() else total)
        right(model, optimizer, microbatches, problem)
        return {"loss": torch.stack(self.means).mean()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_reports_of_an_update_that_is_not_sgd_are_those_of_the_equation(
    dtype: torch.dtype,
) -> None:
    """A loss that averages all updates is seen in the second one."""
    capabilities = Capabilities(plain_sgd=False, weights="mask", dtype=dtype)
    findings = []
    for forgets in (True, False):
        reporter = Reporter(forgets, [])
        trainer = ps.testing.loop(reporter.update, adamw, capabilities)
        findings += judged(trainer, "T0")
    holds, wrong = findings
    assert holds == "holds"
    assert re.match(r"wrong: loss: .* is not ", wrong)


def test_an_update_that_is_not_sgd_and_reports_nothing_is_not_asked() -> None:
    trainer = ps.testing.loop(right, adamw, Capabilities(plain_sgd=False))
    (equation,) = judged(trainer, "T0")
    reason = "its update is not plain SGD, and it reports nothing"
    assert equation == f"not asked: {reason}"
    test: Any = ps.testing.law_tests(lambda: trainer, ["T0"], cases=3)
    with pytest.raises(pytest.skip.Exception, match=f"not asked: {reason}"):
        test("T0")


def test_a_report_that_is_missing_once_is_judged_where_it_is_there() -> None:
    """The loop reports the loss of the update before, which the first one lacks."""
    capabilities = Capabilities(plain_sgd=False, weights="mask")
    reporter = Reporter(True, [])
    losses: list[Tensor] = []

    def update(
        model: Any, optimizer: Any, microbatches: Batches, problem: Problem
    ) -> dict[str, Tensor] | None:
        reported = reporter.update(model, optimizer, microbatches, problem)
        losses.append(reported["loss"])
        return {"loss": losses[-2]} if len(losses) > 1 else None

    def begin(module: Any, problem: Problem) -> Any:
        losses.clear()
        return adamw(module, problem)

    (finding,) = judged(ps.testing.loop(update, begin, capabilities), "T0")
    assert re.match(r"wrong: loss: .* is not ", finding)


def test_an_observation_that_is_no_list_is_a_refusal() -> None:
    class Single(PlainLoop):
        evaluate: Any = None

        def observe(self) -> Any:
            return super().observe()[0]

    (finding,) = judged(Single(), "T1")
    assert finding.startswith("refuses: ")


def test_a_dtype_of_three_bits_is_refused() -> None:
    trainer = ps.testing.loop(
        right, capabilities=Capabilities(dtype=torch.float8_e4m3fn)
    )
    with pytest.raises(ValueError, match=r"torch.float8_e4m3fn rounds so much"):
        judged(trainer, "T1")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ranks": 0}, "capabilities.ranks is 0: a trainer runs on 1 or more"),
        (
            {"weights": "masks"},
            r"capabilities.weights is 'masks': it is one of \('mask'",
        ),
    ],
)
def test_capabilities_that_no_trainer_has(wrong: Any, message: str) -> None:
    trainer: Any = PlainLoop()
    trainer.capabilities = Capabilities(**wrong)
    with pytest.raises(ValueError, match=message):
        ps.testing.run_laws(trainer, ["T1"])


def step_by_sign(
    model: Any, optimizer: Any, microbatches: Batches, problem: Problem
) -> None:
    """Moves each parameter by the sign of its gradient, as Lion does."""
    right(
        model,
        SimpleNamespace(step=int, zero_grad=model.zero_grad),
        microbatches,
        problem,
    )
    for p in model.parameters():
        p.data -= 0.25 * p.grad.sign()


def write_order(targets: Sequence[float]) -> Run:
    """Writes one update on a microbatch for each target, all at x = (1, 1)."""
    batches = []
    for y in targets:
        tensors = {"x": [[[1.0, 1.0]]], "y": [[y]], "w": [[1.0]]}
        batches.append(
            {key: torch.tensor(x, dtype=torch.float64) for key, x in tensors.items()}
        )
    return Run([[batches]], "in an order")


def test_the_sign_of_a_gradient_near_zero_is_rounding() -> None:
    """0.1 + 0.7 - 0.8 is zero in one order, and not in another."""
    trainer = ps.testing.loop(step_by_sign, None, Capabilities(plain_sgd=False))
    start = Linear([0.0, 0.0], 0.0, torch.float64)
    problem = Problem(ps.testing.REGRESSION, start, 0.25)
    claim = ps.testing.LAWS["T3"].claim
    first = write_order([0.1, 0.7, -0.8])
    reordered = ps.testing.Case(problem, first, write_order([0.1, -0.8, 0.7]))
    assert claim(trainer, reordered) is False
    # The sign of a gradient that is not near zero is no rounding.
    first = write_order([0.1, 0.7, -0.81])
    other = ps.testing.Case(problem, first, write_order([0.1, 0.7, -0.79]))
    with pytest.raises(AssertionError, match="weight"):
        claim(trainer, other)


def scale_randomly(
    model: Any, optimizer: Any, microbatches: Batches, problem: Problem
) -> None:
    """Steps by AdamW at a rate that is drawn anew each time."""
    optimizer.param_groups[0]["lr"] = 0.1 + 0.1 * random.random()
    right(model, optimizer, microbatches, problem)


def test_what_cannot_be_repeated_is_no_rounding() -> None:
    trainer = ps.testing.loop(scale_randomly, adamw, Capabilities(plain_sgd=False))
    (finding,) = judged(trainer, "T3", cases=5)
    assert finding.startswith("wrong")


@pytest.mark.parametrize("cut_kind", KINDS)
@pytest.mark.parametrize("weights", ["mask", "any"])
def test_numbers_for_bfloat16_are_exact(cut_kind: str, weights: Any) -> None:
    """The gradient's sums in bfloat16 are those of float64, whatever the cut."""
    capabilities = Capabilities(weights=weights, dtype=torch.bfloat16)
    for seed in range(40):
        draw = Draw({}, random.Random(seed))
        parts = draw.many([2, 4, 8])
        batch, _ = microbatches(draw, capabilities, parts, cut_kind)
        count = batch["w"].double().sum()
        assert is_power_of_two(float(count))
        x = batch["x"].flatten(0, 1)
        slopes = (batch["y"] * batch["w"] / count.bfloat16()).flatten()
        total = torch.zeros(2, dtype=torch.bfloat16)
        for slope, features in zip(slopes, x, strict=True):
            total += slope * features
        assert torch.equal(total.double(), slopes.double() @ x.double())


def test_what_joins_its_microbatches_is_not_asked_about_the_cut() -> None:
    trainer = ps.testing.loop(
        right, capabilities=Capabilities(merges_microbatches=True)
    )
    cut, order, repartition = judged(trainer, "T1", "T3", "T14", cases=5)
    assert cut == repartition == "not asked: it joins its microbatches into one"
    assert order == "holds"


def test_each_seed_draws_other_cases() -> None:
    def cases(seed: Any) -> list[str]:
        seen: list[str] = []

        class Recording(PlainLoop):
            def update(self, group: Sequence[Sequence[Batch]]) -> None:
                seen.append(str(group))
                super().update(group)

        (verdict,) = ps.testing.run_laws(Recording(), ["T5"], cases=5, seed=seed)
        assert verdict.status == "holds"
        return seen

    assert cases(0) == cases(0) != cases(1)
    assert cases("today") == cases("today") != cases(0)


def test_words_have_all_numbers() -> None:
    trainer = ps.testing.loop(mean_of_means)
    (verdict,) = ps.testing.run_laws(trainer, ["T1"], cases=40)
    assert verdict.case is not None
    words = verdict.case.describe()
    start = r"start weight \[-?\d, -?\d\]; start bias -?\d; learning rate 0\."
    update = r"update 1: x \[\[\[.*\]\]\], y \[\[.*\]\], w \[\[.*\]\]$"
    assert re.search(start, words)
    assert re.search(update, words)


def test_json_of_an_infinite_error_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as that of params that move without a token. JSON has no number for it."""
    verdict = ps.testing.Verdict(ps.testing.LAWS["T1"], "wrong", size=math.inf)
    monkeypatch.setattr(command_line, "run_laws", lambda *_, **__: [verdict])
    monkeypatch.setattr(command_line, "load_trainer", lambda *_: None)
    monkeypatch.setattr(accepting, "report", lambda verdict: "wrong")
    file = tmp_path / "found.json"
    trainer = "purestep.testing:ReferenceTrainer"
    arguments = ["purestep.testing", trainer, "--laws", "T1", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert command_line.main() == 1
    rows = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert {row["size"] for row in rows} == {None}


LAWS_OF_MINE = ["mine:trainer", "--laws", "T1,T3", "--cases", "40"]


@pytest.fixture
def folder_of_mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enters a folder that holds mine.py alone, from which it can be imported."""
    (tmp_path / "mine.py").write_text(MEAN_OF_MEANS)
    # Before the folder is entered: the repository, for processes that run there.
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_command_line_in_an_empty_folder(
    folder_of_mine: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["-m", "purestep.testing", *LAWS_OF_MINE, "--json", "found.json"]
    failed = run_program(command, folder_of_mine)
    assert failed.returncode == 1, failed.stderr
    assert re.search(r"^T1 equal tokens +cut +holds: in 10 cases", failed.stdout, re.M)
    assert re.search(r"^T1 unequal rows +cut +wrong: ", failed.stdout, re.M)
    assert "The smallest case found: rows [0" in failed.stdout
    rows = json.loads((folder_of_mine / "found.json").read_text())
    findings = {f"{row['law']} {row['parts']}".strip(): row["status"] for row in rows}
    assert findings["T1 unequal tokens"] == findings["T1 empty ones"] == "wrong"
    assert findings["T3"] == "holds"

    def run(*arguments: str) -> tuple[Any, str]:
        """Runs the same in this process; returns the exit status and the output."""
        monkeypatch.setattr(sys, "argv", ["purestep.testing", *arguments])
        try:
            status: Any = command_line.main()
        except SystemExit as end:
            status = end.code
        return status, "".join(capsys.readouterr())

    accept = [*LAWS_OF_MINE, "--accept", "accepted.txt"]
    wrong = [
        f"{law}: {finding}  # a mean"
        for law, finding in findings.items()
        if finding != "holds"
    ]
    accepted = folder_of_mine / "accepted.txt"
    accepted.write_text("\n".join(["# what we know", "", *wrong]))
    status, output = run(*accept)
    assert status == 0, output
    assert "wrong (accepted: wrong)" in output

    accepted.write_text("\n".join([*wrong[1:], "T1 equal tokens: refuses"]))
    status, output = run(*accept)
    assert status == 1
    assert "T1 equal tokens is accepted as 'refuses', and 'holds' now" in output
    assert "T1 (cut, unequal rows) does not hold" in output

    for arguments in (
        ["mine:nothing"],
        ["nothing:trainer"],
        ["mine:trainer", "--laws", "T8"],
    ):
        status, _ = run(*arguments)
        assert status == 2

    accepted.write_text("T1 equal: wrong")
    _, output = run(*accept)
    assert "T1 equal" in output


def test_other_names_than_the_problem_has_are_a_refusal() -> None:
    class Adapted(PlainLoop):
        def observe(self) -> list[ps.testing.Observation]:
            observations = []
            for seen in super().observe():
                params = {**seen.params, "adapter": torch.zeros(2)}
                observations.append(seen._replace(params=params))
            return observations

    (finding,) = judged(Adapted(), "T3", cases=3)
    assert finding.startswith("refuses: observe() has the names ['adapter', 'bias', 'w")
    assert "return the parameters of the problem's module alone" in finding


def test_a_smaller_case_of_a_failure_is_no_case_asked() -> None:
    trainer = ps.testing.loop(mean_of_means, capabilities=Capabilities(weights="mask"))
    counts = []
    for shrink in (0, 100):
        (verdict,) = ps.testing.run_laws(trainer, ["T14"], cases=40, shrink=shrink)
        counts.append((verdict.cases, verdict.num_bitwise))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_global_generators_start_alike_in_every_session(ranks: int) -> None:
    """So a wrong verdict on a program that draws from them can be repeated."""
    trainer = ps.testing.loop(shake, capabilities=Capabilities(ranks=ranks))
    first, second = [judged(trainer, "T3", cases=4) for _ in range(2)]
    assert first == second
    assert first[0].startswith("wrong")


def test_any_seed_of_torch_seeds_all_generators() -> None:
    """Its own first one is too large for NumPy: processes get it from a program that starts them."""
    import numpy

    states = []
    for _ in range(2):
        watch = Watch(torch.iinfo(torch.int64).max)
        states.append((random.random(), numpy.random.random(), float(torch.rand(()))))
        watch.end()
    assert states[0] == states[1]


def test_a_watch_ends_if_numpy_was_imported_after_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import numpy

    monkeypatch.delitem(sys.modules, "numpy")
    watch = Watch(1)
    monkeypatch.setitem(sys.modules, "numpy", numpy)
    before = numpy.random.get_state()
    watch.end()
    numpy.testing.assert_equal(numpy.random.get_state(), before)


def shake(model: Any, optimizer: Any, microbatches: Batches, problem: Problem) -> None:
    """Adds noise of torch's global generator, the same on all ranks."""
    right(model, optimizer, microbatches, problem)
    model.weight.data += torch.rand(2, dtype=torch.float64)


def test_each_rank_is_compared_with_its_like_to_the_bit() -> None:
    """Ranks that round differently, but each time alike, are pure."""

    class Rounding(PlainLoop):
        def update(self, group: Sequence[Sequence[Batch]]) -> None:
            super().update(group)
            for model in self.models[1:]:
                model.weight.data *= 1 + 2**-52

    (verdict,) = ps.testing.run_laws(Rounding(), ["T6"], cases=30, shrink=0)
    assert verdict.parts["bits"].status == "holds", verdict


def test_moments_take_part_in_the_bound_of_a_model() -> None:
    """Each of four equal gradients moves the params by the sum of all before it."""
    task = ps.testing.causal_lm(Words())
    batch = {
        "input_ids": torch.tensor([[0, 1, 2]]),
        "attention_mask": torch.ones(1, 3, dtype=torch.int64),
        "labels": torch.tensor([[0, 1, 2]]),
    }
    problem = Problem(task, Words(), 1000.0, momentum=1.0)
    bound = compute_bound(problem, [batch] * 4, 12, Capabilities(task=task))
    once = compute_bound(problem, [batch], 12, Capabilities(task=task))
    # Moments of 1, 2, 3 and 4 gradients, which more roundings follow on.
    assert bound.params["table.weight"] > 9.9 * once.params["table.weight"]
    again = compute_bound(problem, [batch] * 4, 12, Capabilities(task=task))
    assert again == bound


def return_error(rank: int) -> Exception:
    return ValueError("no number")


def test_an_exception_that_is_returned_ends_no_rank() -> None:
    """A rank that goes on is not waited for."""
    with World(1, timeout=30, strict=False) as world:
        world.run(return_error)  # Started, with all imports.
        start = time.monotonic()
        (error,) = world.run(return_error)
        seconds = time.monotonic() - start
    assert str(error) == "no number"
    assert seconds < 15
