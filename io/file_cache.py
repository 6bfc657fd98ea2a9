"""Local copies of files from slow storage, shared by all processes of a machine.

A cache is a folder with a sub-folder per version of a file, which holds the copy under its own name
and `entry.json`. Locks are `flock`s on files beside them, which the system releases when a process
dies. Whoever makes or uses a copy holds a shared lock on `.lock`, whoever removes one an exclusive
lock, without waiting. Makers take turns by a second lock, `.making.lock`, held for no longer
than a copy takes: nobody ever waits for those who use one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable
from typing import BinaryIO, NamedTuple

import msgspec
import xxhash

from . import storage
from .errors import (
    CacheBusyError,
    CacheFullError,
    ConfigError,
    ShardIntegrityError,
    SourceFormatError,
    SourceNotFoundError,
    redact,
)

DIRECTORY_VARIABLE = "SEQSHARD_FILE_CACHE"
LIMIT_VARIABLE = "SEQSHARD_FILE_CACHE_BYTES"
FREE_FRACTION = 0.2
ENTRY_FILE = "entry.json"
PARTIAL_SUFFIX = ".partial"


class _Entry(msgspec.Struct, frozen=True):
    """What `entry.json` says about a copy; also whether it is still like the original."""

    source: str
    num_bytes: int
    version: str
    xxh3_128: str


class _Place(NamedTuple):
    folder: str
    copy: str
    lock: str
    making: str


class Lease:
    """Keeps copies from being removed, until it is closed or no longer referred to.

    Attributes:
        paths: the local files.
    """

    def __init__(self, held: dict[str, int]) -> None:
        self.paths = tuple(held)
        self._handles = list(held.values())

    def close(self) -> None:
        """Lets go of the copies; they stay as long as there is room."""
        while self._handles:
            os.close(self._handles.pop())

    def __del__(self) -> None:
        self.close()


class FileCache:
    """Copies files to a local folder of limited size.

    A copy is used as long as size and version (mtime or etag) of the original are those of the
    copy. Copies that nobody uses are removed when there is no room for a new one, the longest
    unused first; originals never are. A file is copied once per machine, and checked by its hash.

    Attributes:
        directory: the folder.
        max_bytes: limit on all copies; None keeps a fifth of the disk free.
    """

    def __init__(self, directory: str | None = None, max_bytes: int | None = None) -> None:
        """Does not touch the disk.

        Args:
            directory: default: $SEQSHARD_FILE_CACHE, or a folder of the user in the system's
                folder for temporary files.
            max_bytes: default: $SEQSHARD_FILE_CACHE_BYTES, or so much that a fifth stays free.

        Raises:
            ConfigError: if $SEQSHARD_FILE_CACHE_BYTES is no number.
        """
        default = os.path.join(tempfile.gettempdir(), f"seqshard-files-{os.getuid()}")
        chosen = directory or os.environ.get(DIRECTORY_VARIABLE) or default
        self.directory = os.path.abspath(os.path.expandvars(chosen))
        self.max_bytes = _limit_from_environment() if max_bytes is None else max_bytes

    def get(
        self,
        source: str | os.PathLike[str],
        num_bytes: int | None = None,
        xxh3_128: str | None = None,
    ) -> Lease:
        """A local copy of a file; made if there is none yet.

        Args:
            source: path or URL. A file that lies in the cache is its own copy.
            num_bytes, xxh3_128: size and hash, if they are known: then the original is not asked
                for its version, and the copy is checked by them.

        Raises:
            SourceNotFoundError: if the original does not exist.
            StorageError: if a remote store fails.
            CacheFullError: if it is larger than the cache.
            CacheBusyError: if it does not fit beside the copies that are in use, at once.
            OutputError: if the disk refuses.
            SourceFormatError: if the copy is not equal to the original, or that changes.
            ShardIntegrityError: if the original does not have the size and hash that are known.
        """
        source = os.fspath(source)
        if not storage.is_url(source):
            source = os.path.realpath(source)
            if source.startswith(os.path.realpath(self.directory) + os.sep):
                return self._lease_own(source)
        if num_bytes is None or xxh3_128 is None:
            stamp, xxh3_128 = storage.stamp(source), None
        else:
            stamp = storage.Stamp(num_bytes, xxh3_128)
        place = self._place(source, stamp)
        with storage.output_errors(place.folder):
            os.makedirs(place.folder, exist_ok=True)
        use = _lock(place.lock, fcntl.LOCK_SH)
        try:
            if not self._is_current(place, stamp):
                making = _lock(place.making, fcntl.LOCK_EX)
                try:
                    if not self._is_current(place, stamp):
                        self._make(source, stamp, place, xxh3_128)
                finally:
                    os.close(making)
            os.utime(place.lock)
            return Lease({place.copy: use})
        except BaseException:
            os.close(use)
            raise

    def _lease_own(self, path: str) -> Lease:
        folder = os.path.dirname(path)
        handle = _lock(folder + ".lock", fcntl.LOCK_SH)
        if os.path.exists(path):
            return Lease({path: handle})
        os.close(handle)
        raise SourceNotFoundError("this copy is no longer in the cache", path)

    def _place(self, source: str, stamp: storage.Stamp) -> _Place:
        name = os.path.basename(source.rstrip("/")) or "file"
        # Who asks with another signature asks for the same file.
        key = "\0".join((redact(source), str(stamp.num_bytes), stamp.version))
        folder = os.path.join(self.directory, xxhash.xxh3_128_hexdigest(key.encode()))
        return _Place(folder, os.path.join(folder, name), folder + ".lock", folder + ".making.lock")

    def _is_current(self, place: _Place, stamp: storage.Stamp) -> bool:
        entry = _read_entry(place.folder)
        if entry is None or (entry.num_bytes, entry.version) != (stamp.num_bytes, stamp.version):
            return False
        with contextlib.suppress(FileNotFoundError):
            return os.stat(place.copy).st_size == stamp.num_bytes
        return False

    def _make(self, source: str, stamp: storage.Stamp, place: _Place, known: str | None) -> None:
        """Copies the file; the caller holds both locks."""
        partial = place.copy + PARTIAL_SUFFIX
        _clear(place.folder)
        self._reserve(partial, stamp.num_bytes, place)
        try:
            # One byte more than expected would show that the file has grown.
            blocks = storage.read_blocks(source, stamp.num_bytes + (not storage.is_url(source)))
            with storage.output_errors(place.copy):
                digest = _copy(blocks, partial, stamp.num_bytes, source)
            if known is None and storage.stamp(source) != stamp:
                raise SourceFormatError("the file changed while it was copied", source)
            if known not in (None, digest):
                raise ShardIntegrityError(
                    "the file is not the one of the manifest",
                    source,
                    expected=f"hash {known}",
                    found=digest,
                    hint="Run the build again; it repairs what is damaged.",
                )
            if _hash_file(partial) != digest:
                raise SourceFormatError(
                    "the copy differs from the original", place.copy, hint="Check the disk."
                )
            entry = _Entry(redact(source), stamp.num_bytes, stamp.version, digest)
            os.replace(partial, place.copy)
            storage.commit_bytes(os.path.join(place.folder, ENTRY_FILE), msgspec.json.encode(entry))
        except BaseException:
            _clear(place.folder)
            raise

    def _reserve(self, partial: str, num_bytes: int, place: _Place) -> None:
        """Makes room, and takes it: from then on other processes see the file's full size."""
        handle = _lock(os.path.join(self.directory, "cache.lock"), fcntl.LOCK_EX)
        try:
            self._make_room(num_bytes, place)
            with storage.output_errors(partial), open(partial, "wb") as file:
                if num_bytes:
                    _allocate(file, num_bytes)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial)
            raise
        finally:
            os.close(handle)

    def _make_room(self, num_bytes: int, place: _Place) -> None:
        sizes = {
            entry.path: _folder_bytes(entry.path)
            for entry in os.scandir(self.directory)
            if entry.is_dir() and entry.path != place.folder
        }
        used = sum(sizes.values())
        limit = self._limit(used)
        if num_bytes > limit:
            raise CacheFullError(
                "the file is larger than the whole cache",
                place.copy,
                expected=f"at most {limit} bytes",
                found=f"{num_bytes}",
                hint=f"Raise ${LIMIT_VARIABLE}, or use another disk (${DIRECTORY_VARIABLE}).",
            )
        for folder in sorted(sizes, key=_last_use):
            if used + num_bytes <= limit:
                return
            if _evict(folder):
                used -= sizes[folder]
        if used + num_bytes > limit:
            raise CacheBusyError(
                "the files in use leave no room in the cache",
                place.copy,
                expected=f"{num_bytes} bytes",
                found=f"{limit - used} of {limit}",
                hint=f"Raise ${LIMIT_VARIABLE}, or read fewer files at once.",
            )

    def _limit(self, used: int) -> int:
        if self.max_bytes is not None:
            return self.max_bytes
        disk = shutil.disk_usage(self.directory)
        return max(0, used + disk.free - int(FREE_FRACTION * disk.total))


def _limit_from_environment() -> int | None:
    text = os.environ.get(LIMIT_VARIABLE)
    if text and not text.isdecimal():
        raise ConfigError(f"${LIMIT_VARIABLE} must be a number of bytes", found=repr(text))
    return int(text) if text else None


def _lock(path: str, how: int) -> int:
    """A handle that holds the lock until it is closed.

    Raises:
        BlockingIOError: if `how` forbids to wait, and somebody else holds it.
    """
    with storage.output_errors(path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(handle, how)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _copy(blocks: Iterable[bytes], target: str, num_bytes: int, source: str) -> str:
    """Copies a file into an allocated one and returns the hash of what was read."""
    digest = xxhash.xxh3_128()
    copied = 0
    with open(target, "r+b") as file:
        for block in blocks:
            copied += len(block)
            if copied > num_bytes:
                break
            digest.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    if copied != num_bytes:
        raise SourceFormatError(
            "the file has another size than the system says",
            source,
            expected=f"{num_bytes} bytes",
            found=f"{copied}",
        )
    return digest.hexdigest()


def _hash_file(path: str) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(storage.BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _allocate(file: BinaryIO, num_bytes: int) -> None:
    try:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        file.truncate(num_bytes)


def _read_entry(folder: str) -> _Entry | None:
    try:
        with open(os.path.join(folder, ENTRY_FILE), "rb") as file:
            return msgspec.json.decode(file.read(), type=_Entry)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _folder_bytes(folder: str) -> int:
    with contextlib.suppress(FileNotFoundError):
        return sum(e.stat().st_size for e in os.scandir(folder) if e.name != ENTRY_FILE)
    return 0


def _last_use(folder: str) -> float:
    with contextlib.suppress(FileNotFoundError):
        return os.stat(folder + ".lock").st_mtime
    return 0.0


def _evict(folder: str) -> bool:
    """Removes a copy unless somebody uses it; never a folder that is not one of the cache."""
    if not os.path.exists(folder + ".lock"):
        return False
    try:
        handle = _lock(folder + ".lock", fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    try:
        _clear(folder)
    finally:
        os.close(handle)
    return True


def _clear(folder: str) -> None:
    """Removes a copy; what it says about the copy first."""
    for name in (ENTRY_FILE, *storage.list_names(folder)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, name))
