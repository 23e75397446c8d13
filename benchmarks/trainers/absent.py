"""Empty modules in the place of packages that a trainer imports and does not use here."""

import importlib.machinery
import sys
import types
from typing import Any


class Empty(types.ModuleType):
    """A module in which each name is an empty class."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Finder:
    """Finds the absent packages empty."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, name: str, *_: Any) -> Any:
        """A module of them."""
        if name.split(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> Any:
        """An empty one."""
        return Empty(spec.name)

    def exec_module(self, module: Any) -> None:
        """There is nothing in it."""


def find_empty(*names: str) -> None:
    """From here on, these packages are empty, unless they are installed."""
    known = [each.names for each in sys.meta_path if isinstance(each, Finder)]
    if names not in known:
        sys.meta_path.append(Finder(names))
