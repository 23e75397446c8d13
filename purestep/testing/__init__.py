"""For tests of training: ranks as threads and as processes, and laws that any trainer keeps.

pip install "purestep[testing]"
"""

import importlib
from typing import TYPE_CHECKING, Any

from purestep.testing.threads import ThreadAxis

if TYPE_CHECKING:
    from purestep.testing.kit import *  # noqa: F403

__all__ = ["ThreadAxis"]


def __getattr__(name: str) -> Any:
    """The kit, which needs Hypothesis, is imported when it is first asked for."""
    if not name.startswith("_"):
        try:
            kit = importlib.import_module("purestep.testing.kit")
        except ModuleNotFoundError as error:
            raise ImportError(
                f'ps.testing.{name} needs {error.name}: pip install "purestep[testing]"'
            ) from error
        if name in kit.__all__:
            return getattr(kit, name)
    raise AttributeError(f"module 'purestep.testing' has no attribute {name!r}")


def __dir__() -> list[str]:
    try:
        return [*__all__, *importlib.import_module("purestep.testing.kit").__all__]
    except ModuleNotFoundError:
        return __all__
