"""Tests ``benchmarks.gpu`` at tiny sizes: it runs, and keeps its results if it is stopped."""

import importlib
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as program, schedule
from benchmarks.gpu.entries import Run, find_errors
from benchmarks.gpu.orchestrate import Orchestrator
from benchmarks.gpu.processes import Settings
from benchmarks.gpu.report import make_table
from benchmarks.gpu.schedule import SECTIONS, Section, select_sections, time_limit
from benchmarks.gpu.theorems import read_outcomes, read_reasons

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "gpu.sh"


def test_every_section_has_a_function_and_a_limit() -> None:
    names = [section.name for section in SECTIONS]
    assert len(names) == len({*names})
    for section in SECTIONS:
        module = importlib.import_module(f"benchmarks.gpu.{section.module}")
        assert callable(getattr(module, f"run_{section.name}"))
        assert (section.turn > 0) == (section.phase == "prepared")
    assert select_sections("") == SECTIONS
    with pytest.raises(ValueError, match=r"no sections are called \['glo'\]"):
        select_sections("glo")


def test_correctness_always_fits_and_jax_is_dropped_first() -> None:
    """If each section takes all of its time, the first ones still have their limits."""
    total = schedule.TOTAL_SECONDS
    side_by_side = [s for s in SECTIONS if s.phase in ("together", "prepared")]
    longest = max(section.limit for section in side_by_side)
    spent = SECTIONS[0].limit + longest
    assert spent < total - schedule.LEAST_SECONDS
    dropped = []
    for section in SECTIONS:
        if section.phase == "alone":
            limit = time_limit(section.limit, spent, total)
        elif section.phase == "prepared":
            limit = time_limit(section.turn, spent, total)
        else:
            continue
        if limit is None:
            dropped.append(section.name)
        else:
            spent += limit
    assert dropped[-1] == SECTIONS[-1].name == "jax"
    assert "gpt" not in dropped
    # The script ends it later than it ends itself.
    assert f" {round(total) + 35} " in SCRIPT.read_text()


def test_a_section_has_no_more_than_what_is_left() -> None:
    assert time_limit(100.0, 0.0, 385.0) == 100.0
    assert time_limit(100.0, 365.0, 385.0) == 20.0
    assert time_limit(100.0, 371.0, 385.0) is None
    assert time_limit(10.0, 374.0, 385.0) == 10.0


@pytest.mark.parametrize("section", ["env", "exact", "losses", "prefetch", "jax"])
def test_a_tiny_section_has_no_errors(section: str) -> None:
    run = Run(section, device="cpu", tiny=True)
    program.call_section(run)
    assert run.entries
    assert not find_errors(run.entries)


def test_no_setting_waits_for_lazy_tensors() -> None:
    """Runs the section that counts waits, on a device for which the host can wait."""
    run = Run("waits", device="lazy", tiny=True)
    program.call_section(run)
    assert not find_errors(run.entries)
    steps = run.entries["steps"]
    assert len(steps) > 20
    waiting = [name for name, values in steps.items() if values["waits"]]
    assert waiting == ["from_torch"]


def test_the_program_runs_each_phase(tmp_path: Path) -> None:
    """One section is first, one beside another that is compiled and has its turn."""
    only = "labels,gpt_by_hand_compiled"
    arguments = ["--device", "cpu", "--tiny", "--only", only, "--out", str(tmp_path)]
    assert program.main(arguments) == 0
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert not find_errors(results)
    assert results["env"]["torch"] == torch.__version__
    assert {*results["labels"]} >= {"cross_entropy", "linear_cross_entropy"}
    way = results["gpt_by_hand_compiled"]["ways"]["by hand, compiled"]
    assert {"ms", "host_ms", "tokens_per_s"} <= {*way["K=1"]}
    files = {file.name for file in tmp_path.iterdir()}
    assert files == {"gpu.json", "gpu.md", "gpu.log"}
    assert "by hand, compiled" in (tmp_path / "gpu.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_machine_without_a_card_is_an_error(tmp_path: Path) -> None:
    assert program.main(["--only", "env", "--out", str(tmp_path)]) == 1
    results = json.loads((tmp_path / "gpu.json").read_text())
    assert "env" in find_errors(results)
    assert results["env"]["torch"] == torch.__version__, (
        "what came before the error is there"
    )


def test_a_section_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    """The next one runs."""
    settings = Settings("cpu", True, tmp_path)
    orchestrator = Orchestrator(
        settings, tmp_path / "out", seconds=300.0, jobs=1, slowness=1.0
    )
    orchestrator.run([Section("exact", "exact", "alone", 0.05)])
    orchestrator.stop_all()
    assert "it took longer than 0 s" in find_errors(orchestrator.results)["exact"]
    assert orchestrator.print_summary() == 1


def test_errors_broken_claims_and_fallbacks_are_entries(tmp_path: Path) -> None:
    """They are on the disk at once, with the entries before them."""
    run = Run("env", folder=tmp_path)
    with run.attempt("a"):
        run.add("a", ms=1.0)
        raise RuntimeError("broken")
    run.check("b", holds=True, same_bits=False)
    with run.attempt("c"):
        message = "compile=True: torch.compile cannot make one graph of f"
        warnings.warn(message, stacklevel=1)
    assert not run.has_time(1e9, "d")
    entries = json.loads((tmp_path / "env.json").read_text())
    assert entries["a"]["ms"] == 1.0
    assert entries["d"] == {"skipped": "no time was left"}
    errors = find_errors(entries)
    assert {*errors} == {"a", "b", "c"}
    assert errors["a"].startswith("RuntimeError: broken")
    assert errors["b"] == "does not hold: same_bits"


LOG = """
proofs/a.py::test_b[T1 cut]
[gw0] [ 50%] PASSED proofs/a.py::test_b[T1 cut]
[gw1] [100%] FAILED proofs/a.py::test_b[T10 ensembles]
____ test_b[T10 ensembles] ____
E   AssertionError: not near
"""


def test_outcomes_are_read_from_a_log_that_may_end_anywhere() -> None:
    outcomes = read_outcomes(LOG)
    assert outcomes == {
        "proofs/a.py::test_b[T1 cut]": "PASSED",
        "proofs/a.py::test_b[T10 ensembles]": "FAILED",
    }
    assert read_reasons(LOG) == {"test_b[T10 ensembles]": "AssertionError: not near"}
    assert read_outcomes(LOG[: LOG.index("FAILED")]) == {
        "proofs/a.py::test_b[T1 cut]": "PASSED"
    }


def test_the_table_takes_whatever_there_is() -> None:
    """No results, parts of them, errors, and ratios to the loop by hand."""
    results: dict[str, Any] = {
        "device": "cuda",
        "env": {"gpu": "NVIDIA H100", "torch": "2.11.0"},
    }
    assert "NVIDIA H100, torch 2.11.0" in make_table(results)
    by_hand = {
        "K=1": {"ms": 2.0, "host_ms": 1.0, "peak_mib": 10.0},
        "error": "later | broken",
    }
    purestep = {
        "K=1": {"ms": 1.0, "host_ms": 0.5, "peak_mib": 5.0},
        "first_seconds": 1.0,
    }
    results["gpt"] = {
        "seconds": 3.0,
        "ways": {"by hand": by_hand, "purestep": purestep},
    }
    results["mlp"] = {"K=1": {"by hand": {"error": "x"}}, "error": "y"}
    results["jax"] = {"K=1": {"attention by xla": {"ms": 1.5, "tokens_per_s": 7}}}
    results["theorems"] = {"tests": 2, "passed": 1, "error": "z"}
    table = make_table(results)
    assert "| purestep | 1 | 1.000 | 0.500 | 0.500 |  |  | 5.0 | 0.500 |" in table
    assert "| gpt | 3.0 | 1 | ways/by hand: later / broken |" in table
    assert "| theorems |  | 1 | 1 of 2 tests pass |" in table
    assert "| attention by xla | 1 | 1.5 | 7 |  |" in table
