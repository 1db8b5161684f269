"""A hub without a network: repositories are folders, and what is downloaded is copied into a cache and noted."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects

COMMIT = "0" * 40


def failure(error: Any, message: str = "the hub's own words") -> Exception:
    """An error as the hub's client raises it."""
    if issubclass(error, errors.HfHubHTTPError):
        return error(message, response=SimpleNamespace(headers={}, request=None))
    return error(message)


class FakeHub:
    """Stands in for huggingface_hub's functions; `asked` are the files looked for, `got` those downloaded.

    `options` are the further options of each call, but for those without any.
    """

    def __init__(self, monkeypatch: Any, repository: Path, cache: Path) -> None:
        self.repository, self.snapshot = repository, cache / "snapshots" / COMMIT
        self.asked: list[str] = []
        self.got: list[str] = []
        self.revisions: list[str | None] = []
        self.options: list[dict[str, Any]] = []
        self.error: Exception | None = None
        for name in ("hf_hub_download", "snapshot_download", "list_repo_files"):
            monkeypatch.setattr(huggingface_hub, name, getattr(self, name))

    def hf_hub_download(
        self, repository: str, filename: str, *, subfolder: str | None, revision: str | None, **options: Any
    ) -> str:
        self._answer(revision, options)
        name = f"{subfolder}/{filename}" if subfolder else filename
        self.asked.append(name)
        if not (self.repository / name).is_file():
            raise failure(errors.RemoteEntryNotFoundError)
        return str(self._copy(name))

    def snapshot_download(self, repository: str, *, revision: str, allow_patterns: list[str], **options: Any) -> str:
        self._answer(revision, options)
        for name in filter_repo_objects(self.list_repo_files(repository), allow_patterns=allow_patterns):
            self._copy(name)
        return str(self.snapshot)

    def list_repo_files(self, repository: str, *, revision: str | None = None) -> list[str]:
        files = sorted(path for path in self.repository.rglob("*") if path.is_file())
        return [path.relative_to(self.repository).as_posix() for path in files]

    def _answer(self, revision: str | None, options: dict[str, Any]) -> None:
        self.revisions.append(revision)
        self.options += [options] if options else []
        if self.error is not None:
            raise self.error

    def _copy(self, name: str) -> Path:
        self.got.append(name)
        (self.snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(self.repository / name, self.snapshot / name))
