"""One save at a time in a folder: a lock that ends with its process, whatever ends that."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

NAME = ".tp_layers.lock"
# Each try after the first follows the end of another save, so one is nearly always enough.
TRIES = 100


class SaveLock:
    """Held by the rank of a group that puts the files in place, from before it looks at `folder` until all is done.

    What two saves would do to each other: each removes the files of the other as those of an earlier checkpoint.

    The lock is on a file, as over NFS a folder cannot be locked. The file is removed by its holder alone, while it is
    locked; who has opened it before gets the lock of a file that is no longer there, and tries again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / NAME
        self._descriptor: int | None = None
        self._made: list[Path] = []

    def take(self) -> None:
        """Makes the folder and locks it. Nothing is locked where the file system cannot, or where the folder cannot be
        made or written to, which the save itself then finds out.

        Raises:
            ValueError: another save has the lock.
        """
        try:
            for _ in range(TRIES):
                if self._taken():
                    return
        except BlockingIOError:
            pass
        except OSError:
            return
        raise ValueError(
            f"another save is writing to {self.folder}: let one group of ranks save, or each to a folder of its own"
        )

    def release(self) -> None:
        """Removes the lock, and the folders that were made for it if nothing else is in them."""
        if self._descriptor is not None:
            with suppress(OSError):
                self.path.unlink()
            # Not by closing alone: a process forked meanwhile has the file open too.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None
        with suppress(OSError):
            while self._made:
                self._made.pop(0).rmdir()
        self._made = []

    def __enter__(self) -> "SaveLock":
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _taken(self) -> bool:
        """Whether the lock is that of the file that is in the folder now."""
        folders = (self.folder, *self.folder.parents)
        self._made += [folder for folder in folders if not folder.exists() and folder not in self._made]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:
            return False
        try:
            if self._locked(descriptor):
                self._descriptor = descriptor
        finally:
            if self._descriptor is None:
                os.close(descriptor)
        return self._descriptor is not None

    def _locked(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            # The file system has no locks, so nobody holds that of this file.
            self.path.unlink(missing_ok=True)
            raise
        return self.path.exists() and os.path.samestat(os.fstat(descriptor), os.stat(self.path))
