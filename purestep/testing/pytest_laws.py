"""Tests a trainer in pytest: one test for each law, without a file of tests."""

import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from purestep.testing.accepting import read_accepted, split_verdict
from purestep.testing.case import describe_cause
from purestep.testing.catalogue import LAWS
from purestep.testing.judging import FAILURES, Seed, check_cases, run_laws
from purestep.testing.loading import load_trainer, parse_cases, parse_laws, parse_seed


class Settings(NamedTuple):
    """Holds what the options ``--trainer`` and ``--trainer-...`` say."""

    path: str
    trainer: Any
    laws: list[str]
    cases: int
    seed: Seed
    accepted: dict[str, str]


class LawPlugin:
    """Adds the tests of the trainer that ``--trainer`` names to those that pytest collects.

    Raises ``pytest.UsageError`` if an option is wrong, or if the trainer cannot be made.
    """

    def __init__(self, config: pytest.Config) -> None:
        path = config.getoption("purestep_trainer")
        try:
            self._settings = _read_settings(config)
        except Exception as error:
            message = f"--trainer {path}: {describe_cause(error)}"
            raise pytest.UsageError(message) from error

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Adds the trainer's ``TrainerCollector`` to the report of a ``pytest.Session``.

        Returns reports of other collectors as they are.
        """
        report = yield
        if isinstance(collector, pytest.Session) and report.result is not None:
            name = self._settings.path
            trainer = TrainerCollector.from_parent(
                collector, name=name, nodeid=name, settings=self._settings
            )
            report.result.append(trainer)
        return report


class TrainerCollector(pytest.Collector):
    """Collects one test for each law of a trainer."""

    def __init__(self, *, settings: Settings, **others: Any) -> None:
        super().__init__(**others)
        self._settings = settings

    def collect(self) -> Iterator[pytest.Item]:
        """Yields the tests, with names such as "T1_cut"."""
        for law in self._settings.laws:
            name = f"{law}_{LAWS[law].title}"
            yield LawItem.from_parent(self, name=name, law=law, settings=self._settings)


class LawItem(pytest.Item):
    """Tests one law.

    It fails where the verdict is not as expected. A failure that is accepted is xfailed, and a law
    that is not asked is skipped.
    """

    def __init__(self, *, law: str, settings: Settings, **others: Any) -> None:
        super().__init__(**others)
        self._law = law
        self._settings = settings

    def runtest(self) -> None:
        """Judges the law, and passes, fails, skips or xfails the test by the verdict.

        It fails, with the part's complaint, for a failure that is not accepted. It also fails for
        an accepted failure that no longer occurs. Else it skips a law that the trainer cannot be
        asked about, and gives the reason. A law whose failures are all accepted is xfailed.
        """
        (verdict,) = run_laws(
            self._settings.trainer,
            [self._law],
            cases=self._settings.cases,
            seed=self._settings.seed,
        )
        parts = split_verdict(verdict, self._settings.accepted)
        complaints = [part.complaint for part in parts if part.complaint]
        if complaints:
            pytest.fail("\n".join(complaints), pytrace=False)
        if verdict.status == "not asked":
            pytest.skip(f"not asked: {verdict.reason}")
        failures = []
        for part in parts:
            if part.verdict.status in FAILURES:
                failures.append(f"{part.name}: {part.accepted}")
        if failures:
            pytest.xfail(f"accepted: {', '.join(failures)}")

    def reportinfo(self) -> tuple[Path, None, str]:
        """Returns a path, no line, and the test's name, such as "T1_cut", for pytest to show."""
        return self.path, None, self.name


def _read_settings(config: pytest.Config) -> Settings:
    """Returns the options and the trainer that they name, as ``python -m purestep.testing`` does.

    It puts the folder of the call first in ``sys.path``, if it is not in there. Raises what reading
    an option, or making the trainer, raises.
    """
    # The folder of the call, as with python -m: `pytest` alone does not look there.
    folder = str(config.invocation_params.dir)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    path = config.getoption("purestep_trainer")
    laws = parse_laws(config.getoption("purestep_trainer_laws") or ",".join(LAWS))
    accept = config.getoption("purestep_trainer_accept")
    cases = parse_cases(config.getoption("purestep_trainer_cases") or "100")
    check_cases(cases)
    return Settings(
        path=path,
        trainer=load_trainer(path, laws),
        laws=laws,
        cases=cases,
        seed=parse_seed(config.getoption("purestep_trainer_seed") or "0"),
        accepted=read_accepted(Path(folder) / accept) if accept else {},
    )
