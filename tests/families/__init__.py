"""Tiny models of the registered families, every parameter drawn, and inputs for them: one file per family.

Head counts and blocks divide by 1, 2 and 4; `heads=3` gives a thorough family's model that divides by 3. Widths are
chosen so that no two dims of a weight are equal by accident. Timesteps and guidance stay exact in bfloat16 when a model
multiplies them by 1000: a rounded timestep would be another input.
"""

import importlib
import pkgutil

from .family import Family, digest, run

__all__ = ["FAMILIES", "ONE_OF_EACH", "REGISTERED", "Family", "digest", "run"]

_FILES = [
    importlib.import_module(f"{__name__}.{found.name}")
    for found in pkgutil.iter_modules(__path__)
    if found.name != "family"
]

# Every class (and variant) that has a test config, by label.
REGISTERED: dict[str, Family] = {family.label: family for file in _FILES for family in file.FAMILIES}
# The first of every file.
ONE_OF_EACH = [file.FAMILIES[0].label for file in _FILES]
# Those that go through every test there is.
FAMILIES: dict[str, Family] = {label: family for label, family in REGISTERED.items() if family.thorough}
