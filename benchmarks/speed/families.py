"""How far from one big batch of plain transformers is a step over ``from_module``, for each family of models in each setting?

    python -m benchmarks.speed.families

The cases are those of ``tests/model_families.py``, which says what is compared. Compiling takes most of the time.
"""

import argparse
import warnings

from tests.model_families import FAMILIES, SETTINGS, measure_step, supported_cases


def main() -> None:
    """Prints a table, line by line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "settings", nargs="*", default=[*SETTINGS], help="which of them; all"
    )
    options = parser.parse_args()
    # Of a missing batching rule, and of names that peft has yet to change.
    warnings.simplefilter("ignore")
    known = {*supported_cases()}
    print("|".join(["", " ", *(f" {family} " for family in FAMILIES), ""]))
    print("|---" * (len(FAMILIES) + 1) + "|")
    for setting in options.settings:
        errors = [
            f"{measure_step(family, SETTINGS[setting]).error:.1e}"
            if (family, setting) in known
            else ""
            for family in FAMILIES
        ]
        print(f"| {' | '.join([setting, *errors])} |", flush=True)


if __name__ == "__main__":
    main()
