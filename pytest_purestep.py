"""Adds ``pytest --trainer MODULE:TRAINER``, which has one test for each law of a trainer.

Every run of pytest imports this module. So it imports neither purestep nor torch before the option
is used, and stands beside the package, whose import brings both.
"""

import pytest

HELP = {
    "--trainer-laws": ("T1,T4", "asks these laws alone"),
    "--trainer-cases": ("N", "tries N cases for each law; 100 if left out"),
    "--trainer-seed": ("S", 'draws from another seed; "today" draws others each day'),
    "--trainer-accept": ("FILE", "names the failures that you know"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--trainer``, and options that say how it is tested."""
    group = parser.getgroup("purestep", "laws for trainers")
    group.addoption(
        "--trainer",
        dest="purestep_trainer",
        metavar="MODULE:TRAINER",
        help="tests this trainer of yours against the laws of purestep.testing",
    )
    for option, (metavar, text) in HELP.items():
        dest = option.removeprefix("--").replace("-", "_")
        group.addoption(option, dest=f"purestep_{dest}", metavar=metavar, help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Adds the tests of the trainer, if there is one."""
    if config.getoption("purestep_trainer"):
        from purestep.testing.pytest_laws import LawPlugin

        config.pluginmanager.register(LawPlugin(config), "purestep laws")
