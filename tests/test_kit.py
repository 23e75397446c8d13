"""The kit for trainers: what it draws, what it allows for rounding, and how it reports.

That it accepts right trainers and finds the bugs that happened is in proofs/test_kit.py.
"""

import itertools
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purestep as ps
from benchmarks.kit import adamw, divided_first as right
from proofs.plain_loop import PlainLoop
from purestep.testing import (
    Abilities,
    Linear,
    Problem,
    Specification,
    __main__ as command_line,
)
from purestep.testing.draws import Draw, counterexample
from purestep.testing.writing import KINDS, microbatches

Batch = dict[str, Tensor]
Batches = Sequence[Batch]


def judged(trainer: Any, *laws: str, cases: int = 20) -> list[str]:
    """The findings, with the law's own words where it does not hold."""
    verdicts = ps.testing.judge(trainer, laws, cases=cases, shrink=0)
    return [f"{v.finding}: {v.why}" if v.why else v.finding for v in verdicts]


def mean_of_means(
    model: Any, optimizer: Any, microbatches: Batches, problem: Problem
) -> None:
    """Each microbatch by its own count."""
    optimizer.zero_grad()
    for batch in microbatches:
        counted = problem.weights(batch)
        loss = (problem.losses(model, batch) * counted).sum() / counted.sum().clamp(
            min=1
        )
        (loss / len(microbatches)).backward()
    optimizer.step()


def unshifted(
    model: Any, optimizer: Any, microbatches: Batches, problem: Problem
) -> None:
    """All labels count, also that of the first token, which no logits predict."""
    asked: Any = SimpleNamespace(
        losses=problem.losses, weights=lambda m: m["labels"] != -100
    )
    right(model, optimizer, microbatches, asked)


def decaying(
    model: Any, optimizer: Any, microbatches: Batches, problem: Problem
) -> None:
    """The rate sinks with each microbatch."""
    right(model, optimizer, microbatches, problem)
    optimizer.param_groups[0]["lr"] *= 0.9 ** len(microbatches)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", ["mask", "whole", "any"])
def test_microbatches_differ_as_their_kind_says(kind: str, weights: Any) -> None:
    sums = set()
    for seed in range(60):
        draw = Draw({}, random.Random(seed))
        parts = draw.many(range(2, 10))
        batch, cut = microbatches(draw, Abilities(weights=weights), parts, kind)
        rows = batch["w"].double().sum(1)
        totals, sizes = (
            {float(rows[part].sum()) for part in cut},
            {len(part) for part in cut},
        )
        assert len(cut) == len(parts)
        assert (0.0 in totals) == (kind == "empty ones")
        assert len(totals) == 1 or kind != "equal tokens"
        assert len(totals) > 1 or kind == "equal tokens"
        if kind in ("equal tokens", "unequal rows"):
            assert len({*rows.tolist()}) == 1
            assert (len(sizes) == 1) == (kind == "equal tokens")
        total = Fraction(float(rows.sum()))
        sums.add(total.numerator & (total.numerator - 1) == 0)
    assert sums == {True, False} or kind in KINDS[:2], (
        "sums are powers of two, and others"
    )


def test_two_runs_are_never_the_same() -> None:
    """What a law draws differs in what the law is about."""
    for name in ("T1", "T2", "T3", "T4", "T5", "T7", "T14", "T16"):
        law = ps.testing.LAWS[name]
        for able in (PlainLoop.abilities, PlainLoop.abilities._replace(uneven=False)):
            trainer = SimpleNamespace(abilities=able)
            for part, seed in itertools.product(law.parts, range(20)):
                case = law.cases(Draw({(0,): seed}, random.Random(seed)), trainer, part)
                runs: list[Any] = [case.first, case.second]
                codes = [
                    replace(case, first=None, second=r._replace(how="")).code()
                    for r in runs
                ]
                assert codes[0] != codes[1], case.words()
                if name == "T2":
                    assert case.second.ranks > 1
                if not able.uneven:
                    assert all(
                        len({*map(len, group)}) == 1 for group in case.second.groups
                    )


def test_every_number_of_microbatches_is_drawn() -> None:
    (verdict,) = ps.testing.judge(Specification(), ["T1"])
    assert {*verdict.coverage["microbatches"]} == {*range(2, 10)}
    assert min(verdict.coverage["microbatches"].values()) >= 8
    assert {*verdict.coverage["updates"]} == {*range(1, 7)}
    assert {*verdict.coverage["weights"]} == {"0 and 1", "whole", "fractions"}
    assert [part.cases for part in verdict.parts.values()] == [25] * 4


def test_choices_become_simpler() -> None:
    def claim(numbers: list[int]) -> None:
        if sum(numbers) >= 12:
            raise AssertionError(sum(numbers))

    def case(draw: Draw) -> list[int]:
        return [each.one(range(9)) for each in draw.many(range(9))]

    smallest = counterexample(case, claim, most=20, shrink=200, seed=0)
    assert smallest is not None
    assert smallest.args == (12,)
    assert counterexample(case, claim, most=20, shrink=0, seed=0) is not None
    assert counterexample(case, lambda numbers: None, most=20, shrink=0, seed=0) is None


def test_failures_shrink_to_what_a_person_can_read() -> None:
    trainer = ps.testing.loop(mean_of_means, abilities=Abilities(weights="mask"))
    with pytest.raises(
        AssertionError, match=r"T1 .cut, unequal \w+. does not hold"
    ) as raised:
        ps.testing.check(trainer, ["T1"])
    # Two means of equally many tokens are no mistake: the least that shows it has a row more, or
    # more tokens in one row.
    assert re.search(
        r"rows \[0(, 1)?\] \| \[[12](, 2)?\]; start weight \[", str(raised.value)
    )
    outcomes: list[Any] = []
    code = str(raised.value).split("To see it with a trainer of yours:")[1]
    exec(code, {"trainer": trainer, "print": outcomes.append})
    (first,), (second,) = outcomes
    apart = [(first.params[name] - second.params[name]).norm() for name in first.params]
    assert max(apart) > 0.01, "the code to paste does not show what was found"


@pytest.mark.parametrize(
    ("update", "finding"), [(right, "holds"), (mean_of_means, "wrong")]
)
def test_programs_in_processes_are_judged(update: Any, finding: str) -> None:
    """One that adds gradients up over them, and one on which each goes its way."""
    trainer = ps.testing.loop(update, abilities=Abilities(ranks=2))
    for found in judged(trainer, "T2", "T6", cases=10):
        assert found.startswith(finding)


CALLS = itertools.count()
BESIDE: dict[str, Any] = {
    "Python's global generator": lambda trainer, group: random.random(),
    "whether gradients are recorded": lambda trainer, group: torch.set_grad_enabled(
        False
    ),
    "the default dtype": lambda trainer, group: torch.set_default_dtype(torch.float64),
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

    state = random.getstate()
    try:
        (found,) = judged(Broken(), "T6")
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        random.setstate(state)
    assert found.startswith("wrong")
    assert what in found


def test_a_refusal_is_no_wrong_number() -> None:
    class Refusing(PlainLoop):
        def update(self, group: Sequence[Sequence[Batch]]) -> None:
            if len(group[0]) > 1:
                raise ValueError("only one, please")
            super().update(group)

    (found,) = judged(Refusing(), "T1")
    assert re.match(
        r"refuses: ValueError: only one, please \(test_kit.py:\d+, in update\)", found
    )
    with pytest.raises(AssertionError, match=r"T1 .cut, equal tokens. is refused"):
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
        table = torch.randn(
            5, 5, generator=torch.Generator().manual_seed(0), dtype=dtype
        )
        self.table = nn.Embedding(5, 5, _weight=scale * table)
        self.out = (
            nn.Linear(5, 5, bias=False, dtype=dtype) if scale > 1 else nn.Identity()
        )

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return SimpleNamespace(logits=self.out(self.table(input_ids)))


LANGUAGE = Abilities(weights="mask", task=ps.testing.causal_lm(Words()))
TRAINERS: dict[str, tuple[Any, Abilities, list[str], Any]] = {
    "float32": (
        None,
        Abilities(dtype=torch.float32),
        ["T1", "T0", "T4", "T5"],
        mean_of_means,
    ),
    "a language model": (None, LANGUAGE, ["T0", "T1", "T4", "T14"], unshifted),
    "another update than SGD": (
        adamw,
        Abilities(sgd=False),
        ["T1", "T3", "T4", "T7"],
        decaying,
    ),
}


@pytest.mark.parametrize("kind", TRAINERS)
def test_trainers_of_other_kinds_are_accepted_and_their_bugs_are_seen(
    kind: str,
) -> None:
    prepare, able, laws, bug = TRAINERS[kind]
    assert (
        judged(ps.testing.loop(right, prepare, able), *laws, cases=10) == ["holds"] * 4
    )
    (found,) = judged(ps.testing.loop(bug, prepare, able), laws[0])
    assert found.startswith("wrong")


def test_a_loss_near_zero_is_evaluated_with_the_rounding_of_what_it_is_made_of() -> (
    None
):
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
    def plain(model: Any, optimizer: Any, batches: Batches, problem: Problem) -> Any:
        model.zero_grad()
        count = sum(problem.weights(batch).sum() for batch in batches)
        for batch in batches:
            (
                (problem.losses(model, batch) * problem.weights(batch)).sum() / count
            ).backward()
        for p in model.parameters():
            p.data -= problem.learning_rate * p.grad
        return {"num_tokens": count}

    trainer = ps.testing.loop(plain, abilities=Abilities(momentum=momentum))
    assert judged(trainer, "T0", cases=40)[0].startswith(finding)


def test_no_number_in_both_runs_is_the_same_in_both() -> None:
    """A trainer that divides by zero is wrong about the equation, and right about the order."""

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

    (found,) = judged(Wrong(), "T0", cases=10)
    assert found.startswith("wrong")
    assert "evaluation" in found


def test_pytest_has_one_test_for_each_law() -> None:
    test: Any = ps.testing.laws(PlainLoop, ["T0", "T17"], cases=3)
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
    """Right, but for what is beside it."""
    right(model, optimizer, microbatches, problem)
    torch.manual_seed(0)
    for batch in microbatches:
        batch["y"].zero_()


@pytest.mark.parametrize("ranks", [1, 2])
def test_purity_is_asked_inside_of_each_rank(ranks: int) -> None:
    (verdict,) = ps.testing.judge(
        ps.testing.loop(impure, abilities=Abilities(ranks=ranks)),
        ["T6"],
        cases=6,
        shrink=0,
    )
    findings = {part: each.finding for part, each in verdict.parts.items()}
    assert findings == {"bits": "holds", "inputs": "wrong", "global state": "wrong"}
    assert "microbatch's y" in verdict.parts["inputs"].why
    assert "torch's global generator" in verdict.parts["global state"].why


def test_verdicts_say_how_far_the_cut_may_go() -> None:
    loop = ps.testing.loop(mean_of_means, abilities=Abilities(weights="mask"))
    (verdict,) = ps.testing.judge(loop, ["T1"], cases=40, shrink=0)
    assert str(verdict).startswith(
        "T1 cut: holds for equal tokens, wrong for unequal rows, unequal tokens, empty ones. "
    )


def test_another_dtype_than_declared_is_a_refusal_that_says_what_to_declare() -> None:
    def single(module: nn.Module, problem: Problem) -> tuple[Any, Any]:
        return module.float(), problem.optimizer(module)

    def update(
        model: Any, optimizer: Any, microbatches: Batches, problem: Problem
    ) -> None:
        narrow = [{**batch, "x": batch["x"].float()} for batch in microbatches]
        right(model, optimizer, narrow, problem)

    (found,) = judged(ps.testing.loop(update, single), "T0")
    assert found.startswith(
        "refuses: its parameters are torch.float32, its abilities say"
    )
    assert "declare Abilities(dtype=torch.float32)" in found


def failing(
    model: Any, optimizer: Any, microbatches: Batches, problem: Problem
) -> None:
    """Hides its cause."""
    try:
        raise KeyError("the cause")
    except KeyError as error:
        raise RuntimeError("compilation failed\n\nsee the log") from error


@pytest.mark.parametrize("ranks", [1, 2])
def test_refusals_tell_their_cause(ranks: int) -> None:
    trainer = ps.testing.loop(failing, abilities=Abilities(ranks=ranks))
    (found,) = judged(trainer, "T3", cases=2)
    assert re.match(
        r"refuses: KeyError: 'the cause' \(test_kit.py:\d+, in failing\); then", found
    )


def test_an_update_that_is_not_sgd_is_not_asked_for_the_equation() -> None:
    (equation,) = judged(ps.testing.loop(right, adamw, Abilities(sgd=False)), "T0")
    assert equation == "not asked: its update is not plain SGD"
    with pytest.raises(ValueError, match=r"torch.float32 rounds so much"):
        judged(
            ps.testing.loop(right, adamw, Abilities(sgd=False, dtype=torch.float32)),
            "T1",
        )


def test_what_joins_its_microbatches_is_not_asked_about_the_cut() -> None:
    trainer = ps.testing.loop(right, abilities=Abilities(joins=True))
    cut, order, repartition = judged(trainer, "T1", "T3", "T14", cases=5)
    assert cut == repartition == "not asked: it joins its microbatches into one"
    assert order == "holds"


def test_each_seed_draws_other_cases() -> None:
    def cases(seed: Any) -> list[str]:
        seen: list[str] = []

        class Telling(PlainLoop):
            def update(self, group: Sequence[Sequence[Batch]]) -> None:
                seen.append(str(group))
                super().update(group)

        judged_by = ps.testing.judge(Telling(), ["T5"], cases=5, seed=seed)
        assert judged_by[0].finding == "holds"
        return seen

    assert cases(0) == cases(0) != cases(1)
    assert cases("today") == cases("today") != cases(0)


def test_words_have_all_numbers() -> None:
    (verdict,) = ps.testing.judge(ps.testing.loop(mean_of_means), ["T1"], cases=40)
    assert verdict.case is not None
    words = verdict.case.words()
    assert re.search(
        r"start weight \[-?\d, -?\d\]; start bias -?\d; learning rate 0\.", words
    )
    assert re.search(r"update 1: x \[\[\[.*\]\]\], y \[\[.*\]\], w \[\[.*\]\]$", words)


TEN_LINES = """
import purestep as ps

def update(model, optimizer, microbatches, problem):
    optimizer.zero_grad()
    for batch in microbatches:
        counts = problem.weights(batch)
        mean = (problem.losses(model, batch) * counts).sum() / counts.sum()
        (mean / len(microbatches)).backward()
    optimizer.step()

trainer = ps.testing.loop(update)
"""


def test_the_command_line_in_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(TEN_LINES)
    laws = "mine:trainer", "--laws", "T1,T3", "--cases", "40"
    command = [sys.executable, "-m", "purestep.testing", *laws, "--json", "found.json"]
    how: Any = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": os.getcwd()}}
    failed = subprocess.run(command, capture_output=True, text=True, timeout=120, **how)
    assert failed.returncode == 1, failed.stderr
    assert re.search(r"^T1 equal tokens +cut +holds: in 10 cases", failed.stdout, re.M)
    assert re.search(r"^T1 unequal rows +cut +wrong: ", failed.stdout, re.M)
    assert "The smallest case found: rows [0" in failed.stdout
    rows = json.loads((tmp_path / "found.json").read_text())
    known = {f"{row['law']} {row['parts']}".strip(): row["finding"] for row in rows}
    assert known["T1 unequal tokens"] == known["T1 empty ones"] == "wrong"
    assert known["T3"] == "holds"

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def run(*given: str) -> tuple[Any, str]:
        """The exit status, and what is said, of the same in this process."""
        monkeypatch.setattr(sys, "argv", ["purestep.testing", *given])
        try:
            status: Any = command_line.main()
        except SystemExit as end:
            status = end.code
        return status, "".join(capsys.readouterr())

    wrong = [
        f"{law}: {finding}  # a mean"
        for law, finding in known.items()
        if finding != "holds"
    ]
    accepted = tmp_path / "accepted.txt"
    accepted.write_text("\n".join(["# what we know", "", *wrong]))
    status, said = run(*laws, "--accept", "accepted.txt")
    assert status == 0, said
    assert "wrong (accepted: wrong)" in said

    accepted.write_text("\n".join([*wrong[1:], "T1 equal tokens: refuses"]))
    status, said = run(*laws, "--accept", "accepted.txt")
    assert status == 1
    assert "T1 equal tokens is accepted as 'refuses', and 'holds' now" in said
    assert "T1 (cut, unequal rows) does not hold" in said

    for usage in (
        ["mine:nothing"],
        ["nothing:trainer"],
        ["mine:trainer", "--laws", "T8"],
    ):
        assert run(*usage)[0] == 2
    accepted.write_text("T1 equal: wrong")
    assert "T1 equal" in run(*laws, "--accept", "accepted.txt")[1]
