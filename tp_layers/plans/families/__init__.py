"""One file per family of models. A file holds two tables, of which the second may be missing:

    PLANS       class name -> its plan, or a function of the model that returns it
    PUBLISHED   name of a published model -> (class name, the config's entries that differ from the class's defaults)

A new file is found by being there.
"""

import importlib
import pkgutil
from typing import Any

from ..shared import Published

_FILES = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]

PLANS: dict[str, Any] = {}
PUBLISHED: Published = {}
for _file in _FILES:
    for _table, _own in ((PLANS, _file.PLANS), (PUBLISHED, getattr(_file, "PUBLISHED", {}))):
        _twice = _table.keys() & _own.keys()
        if _twice:
            raise ValueError(f"{_file.__name__} names {sorted(_twice)}, which another family has already")
        _table.update(_own)
