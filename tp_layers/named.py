"""What a command line names: a model's class, and objects in Python files."""

import importlib
import sys
from pathlib import Path
from typing import Any

from torch import nn

from .loader.folder import read_config


def class_of(folder: Path) -> type[Any]:
    """The class of the model in `folder`, by its config: diffusers' `_class_name`, or transformers' `architectures`.

    Raises:
        ValueError: it names none, or none that the library has.
    """
    config = read_config(folder)
    if isinstance(name := config.get("_class_name"), str):
        return model_class(name)
    names = config.get("architectures")
    if not (isinstance(names, list) and names and isinstance(names[0], str)):
        raise ValueError(f"{folder / 'config.json'} names neither a _class_name nor architectures: whose model is it?")
    return model_class(names[0], "transformers")


def model_class(name: str, library: str = "diffusers") -> type[Any]:
    """The model class called `name` of a library.

    Raises:
        ValueError: the library is not there, or has no such class.
    """
    try:
        module = importlib.import_module(library)
    except ImportError as error:
        raise ValueError(f"this command needs {library}: pip install 'tp_layers[{library}]'") from error
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ValueError(f"'{name}' is neither a folder nor a model class of {library} {module.__version__}")
    return found


def imported(reference: str) -> Any:
    """The object called NAME in a Python file or module, from "FILE.py:NAME" or "package.module:NAME"."""
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise ValueError(f"expected FILE.py:NAME, got '{reference}'")
    if place.endswith(".py"):
        file = Path(place).resolve()
        if not file.is_file():
            raise FileNotFoundError(f"there is no file {place}")
        # By its folder on the path, so that the ranks' processes can import what they are sent; at its end, or a file
        # called as a module of Python's own would take that module's place.
        sys.path.append(str(file.parent))
        place = file.stem
    try:
        module = importlib.import_module(place)
        found = getattr(module, "__file__", None)
        if reference.rpartition(":")[0].endswith(".py") and found and Path(found).resolve() != file:
            raise ValueError(f"another module called '{place}' is {found}: rename {file.name}")
        return getattr(module, name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot import '{reference}': {error}") from error
