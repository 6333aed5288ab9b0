"""The competitors: one module each, one registry. A new competitor is one file in this folder.

A module ``pwbench/variants/<name with _ for ->.py`` defines ``VARIANT``, an instance of
`Variant`. Its name is the command-line value and the result column. Modules that begin with an
underscore are shared machinery, not competitors.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import lru_cache

from pwbench.errors import InputError
from pwbench.variants._base import Options, Prepared, Stage, Variant

__all__ = ["Options", "Prepared", "Stage", "Variant", "get", "names"]


@lru_cache(maxsize=1)
def _registry() -> dict[str, Variant]:
    found: dict[str, Variant] = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")):
        variant: Variant = importlib.import_module(f"{__name__}.{module}").VARIANT
        if variant.name != module.replace("_", "-"):
            raise RuntimeError(f"module {module} defines variant {variant.name}; the names must match")
        found[variant.name] = variant
    return found


def names() -> list[str]:
    """Every registered variant, sorted."""
    return list(_registry())


def get(name: str) -> Variant:
    """The variant called ``name``.

    Raises:
        InputError: no such variant; the message lists those there are.
    """
    try:
        return _registry()[name]
    except KeyError:
        raise InputError(f"No variant is called {name!r}; there are {', '.join(names())}.") from None
