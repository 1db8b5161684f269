"""What is downloaded of a repository of the hub: the config, and the files its checkpoint is made of, nothing else."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from glob import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .index import read_weight_map
from .layout import first_files, nothing_found

# What huggingface_hub's downloads take beside the names: handed on as it is.
OPTIONS = ("cache_dir", "token", "local_files_only", "force_download")
NONE: Mapping[str, Any] = MappingProxyType({})


def download(
    repository: str,
    subfolder: str | None,
    variant: str | None,
    revision: str | None,
    options: Mapping[str, Any] = NONE,
) -> Path:
    """The local folder of a model of a repository, with all its files in it; without a network, from the hub's cache.

    The ranks of a node may all call it: huggingface_hub locks each file, so one downloads it and the others find it.
    `options` are some of OPTIONS.

    Raises:
        ImportError: huggingface_hub is not there.
        OSError: there is no such repository, revision or file, it may not be read, or the hub cannot be reached and the
            file is not in the cache.
    """
    from huggingface_hub import errors, hf_hub_download

    first = first_files(variant)
    try:
        config = Path(hf_hub_download(repository, "config.json", subfolder=subfolder, revision=revision, **options))
        source = _Source(repository, subfolder, config.parent, options)
        # generate() has a config of its own; a diffusers model has none.
        if _is_of_transformers(config):
            source.fetch("generation_config.json")
        found = next((file for name in first if (file := source.fetch(name))), None)
        if found is None:
            names, where = source.names()
            raise FileNotFoundError(nothing_found(names, variant, where))
        if found.suffix == ".json":
            source.fetch_all(sorted(set(read_weight_map(found).values())), found.name)
    except (errors.HFValidationError, errors.EntryNotFoundError, errors.HTTPError) as error:
        raise _told(error, repository, revision) from error
    return config.parent


def _is_of_transformers(config: Path) -> bool:
    """Whether this is the config of a model of transformers; what is no config at all is refused when it is read."""
    with suppress(ValueError, RecursionError):
        told = json.loads(config.read_bytes())
        return isinstance(told, dict) and "_class_name" not in told
    return False


class _Source:
    """A folder of a repository, at the commit that the revision stood for: all files are of one commit."""

    def __init__(self, repository: str, subfolder: str | None, folder: Path, options: Mapping[str, Any]) -> None:
        self.repository, self.subfolder, self.folder, self.options = repository, subfolder, folder, options
        self.inside = f"{subfolder}/" if subfolder else ""
        self.commit = folder.parents[len(Path(subfolder).parts) - 1].name if subfolder else folder.name

    def fetch(self, name: str) -> Path | None:
        """The local path of a file, None where there is no such file."""
        from huggingface_hub import errors, hf_hub_download

        place: dict[str, Any] = {"subfolder": self.subfolder, "revision": self.commit}
        try:
            return Path(hf_hub_download(self.repository, name, **place, **self.options))
        except errors.EntryNotFoundError:
            return None

    def fetch_all(self, names: list[str], index: str) -> None:
        """Downloads several files at once."""
        from huggingface_hub import snapshot_download

        if self.options.get("force_download") or any(not (self.folder / name).is_file() for name in names):
            patterns = [escape(self.inside + name) for name in names]
            snapshot_download(self.repository, revision=self.commit, allow_patterns=patterns, **self.options)
        lacking = [name for name in names if not (self.folder / name).is_file()]
        if lacking:
            raise FileNotFoundError(f"'{self.repository}' has no {self.inside}{lacking[0]}, which its {index} names")

    def names(self) -> tuple[list[str], str]:
        """The files of the folder, for a message, and where they are: in the cache where the hub does not answer."""
        from huggingface_hub import list_repo_files

        token = {"token": self.options["token"]} if "token" in self.options else {}
        try:
            files = list_repo_files(self.repository, revision=self.commit, **token)
        except Exception:
            return os.listdir(self.folder), f"the cache of '{self.repository}' (the hub cannot be reached)"
        inside = [file.removeprefix(self.inside) for file in files if file.startswith(self.inside)]
        return inside, f"'{self.repository}'"


def _told(error: Exception, repository: str, revision: str | None) -> OSError:
    """An error of the hub, with the repository's name and what to do."""
    from huggingface_hub import errors

    of = "" if revision is None else f" of revision '{revision}'"
    url = f"https://huggingface.co/{repository}"
    if isinstance(error, errors.HFValidationError):
        return FileNotFoundError(f"{repository} is neither a folder nor the id of a repository")
    if isinstance(error, errors.GatedRepoError):
        return PermissionError(f"'{repository}' is gated: ask for access at {url}, then run `hf auth login`")
    if isinstance(error, errors.RepositoryNotFoundError):
        return FileNotFoundError(f"there is no '{repository}' at {url}; if it is private, run `hf auth login`")
    if isinstance(error, errors.RevisionNotFoundError):
        return FileNotFoundError(f"'{repository}' has no revision '{revision}'")
    if isinstance(error, errors.LocalEntryNotFoundError):
        return FileNotFoundError(f"'{repository}'{of} is not in the cache, and the hub cannot be reached: {error}")
    if isinstance(error, errors.EntryNotFoundError):
        return FileNotFoundError(f"'{repository}'{of} has no config.json there: is the model in a subfolder of it?")
    return OSError(f"cannot download '{repository}'{of}: {error}")
