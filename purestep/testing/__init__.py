"""Tests training: ranks as threads and as processes, and laws that any trainer keeps."""

import importlib
from typing import TYPE_CHECKING, Any

from purestep.testing.threads import ThreadAxis

if TYPE_CHECKING:
    from purestep.testing.kit import *  # noqa: F403

__all__ = ["ThreadAxis"]


def __getattr__(name: str) -> Any:
    """Returns a public name of the kit, which is imported at the first use of any of them.

    Raises ``AttributeError`` for other names.
    """
    kit = importlib.import_module("purestep.testing.kit")
    if name in kit.__all__:
        return getattr(kit, name)
    raise AttributeError(f"module 'purestep.testing' has no attribute {name!r}")


def __dir__() -> list[str]:
    kit = importlib.import_module("purestep.testing.kit")
    return [*__all__, *kit.__all__]
