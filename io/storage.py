"""Files and folders, local or remote. Everything else in the package goes through here.

Local paths use the operating system directly; a path with "://" goes through remote.py and fsspec,
which are imported only then. A file appears under its final name only when it is complete: on
object stores because an upload is visible only when it has finished, elsewhere by rename.
"""

from __future__ import annotations

import contextlib
import errno
import glob as _glob
import itertools
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

from .errors import OutputError, OutputFolderError, SourceNotFoundError, StorageError, redact

BLOCK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Stamp:
    """What tells a file's version without reading it: size in bytes, and mtime (ns) or etag."""

    num_bytes: int
    version: str


def is_url(path: str) -> bool:
    """Whether fsspec must open the path."""
    return "://" in path


def join(folder: str, name: str) -> str:
    """`name` inside `folder`; `name` itself if it is absolute or a URL."""
    if is_url(name):
        return name
    return f"{folder.rstrip('/')}/{name}" if is_url(folder) else os.path.join(folder, name)


def stamp(path: str) -> Stamp:
    """Size and version of an existing file, or of all files in a local folder.

    Raises:
        SourceNotFoundError: if there is no such file, or it may not be read.
        StorageError: if a remote store fails.
    """
    with source_errors(path):
        if not is_url(path):
            status = os.stat(path)
            if stat.S_ISDIR(status.st_mode):
                return _stamp_folder(path)
            return Stamp(status.st_size, str(status.st_mtime_ns))
        from . import remote

        info = remote.call(path, lambda fs, inner: fs.info(inner))
        version = next((info[k] for k in ("ETag", "etag", "mtime", "created") if info.get(k)), "")
        return Stamp(int(info["size"] or 0), str(version))


def _stamp_folder(folder: str) -> Stamp:
    total, hasher = 0, xxhash.xxh3_64()
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(parent, name)
            if os.path.isfile(path):
                status = os.stat(path)
                line = f"{os.path.relpath(path, folder)}\0{status.st_size}\0{status.st_mtime_ns}\n"
                hasher.update(os.fsencode(line))
                total += status.st_size
    return Stamp(total, hasher.hexdigest())


def glob(pattern: str, folders: bool = False) -> list[str]:
    """All files that match, sorted. A pattern without wildcards matches itself if it exists.

    Args:
        pattern: path or URL.
        folders: whether local folders count as well, unless other matches are inside of them.
    """
    if not is_url(pattern):
        found = {path.rstrip("/") for path in _glob.glob(pattern, recursive=True)}
        # With the slash, what is inside of a folder comes right behind it.
        ordered = sorted(f"{path}/" for path in found)
        leaves = {
            path.rstrip("/")
            for path, following in itertools.zip_longest(ordered, ordered[1:], fillvalue="")
            if not following.startswith(path)
        }
        return sorted(p for p in found if not os.path.isdir(p) or (folders and p in leaves))
    from . import remote

    with source_errors(pattern):
        return remote.glob(pattern)


def relative(path: str, folder: str) -> str:
    """The path seen from a folder, if it was given relative to it or lies in it; else as it is.

    It is a name to be written down: without the secrets that a URL may have.
    """
    if is_url(path) != is_url(folder):
        return redact(path)
    if is_url(path):
        from . import remote

        (fs, inner), (_, base) = remote.filesystem(path), remote.filesystem(folder)
        base = f"{base.rstrip('/')}/"
        inside = fs.unstrip_protocol(inner).startswith(fs.unstrip_protocol(base))
        return redact(inner.removeprefix(base) if inside else path)
    bases = (os.path.join(base, "") for base in (folder, os.path.abspath(folder)))
    outside = os.path.isabs(path) and not path.startswith(tuple(bases))
    return path if outside else os.path.relpath(path, folder)


def exists(path: str) -> bool:
    """Whether a file or folder stands there."""
    if not is_url(path):
        return os.path.exists(path)
    from . import remote

    with source_errors(path):
        return bool(remote.call(path, lambda fs, inner: fs.exists(inner)))


def is_folder(path: str) -> bool:
    """Whether a folder stands there."""
    if not is_url(path):
        return os.path.isdir(path)
    from . import remote

    with source_errors(path):
        return bool(remote.call(path, lambda fs, inner: fs.isdir(inner)))


def list_names(folder: str) -> list[str]:
    """Names of the entries of a folder, sorted; empty if there is no such folder."""
    if not is_url(folder):
        return sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    from . import remote

    with source_errors(folder):
        try:
            found = remote.call(folder, lambda fs, inner: fs.ls(inner, detail=False))
        except FileNotFoundError:
            return []
    return sorted(name.rstrip("/").rsplit("/", 1)[-1] for name in found)


def read_bytes(path: str) -> bytes:
    """The whole content of a small file.

    Raises:
        SourceNotFoundError: if there is no such file, or it may not be read.
        StorageError: if a remote store fails.
    """
    with source_errors(path):
        if not is_url(path):
            with open(path, "rb") as file:
                return file.read()
        from . import remote

        return remote.read_whole(path)


def read_blocks(path: str, num_bytes: int) -> Iterator[bytes]:
    """The first `num_bytes` of a file, block by block.

    Raises:
        SourceNotFoundError, StorageError: as `read_bytes`; also if a remote file is shorter.
    """
    with source_errors(path):
        if is_url(path):
            from . import remote

            yield from remote.read_blocks(path, num_bytes)
            return
        with open(path, "rb") as file:
            while num_bytes > 0 and (block := file.read(min(BLOCK_BYTES, num_bytes))):
                num_bytes -= len(block)
                yield block


def make_folder(path: str) -> None:
    """Creates a folder and its parents. Object stores have none: there it does nothing.

    Raises:
        OutputFolderError: if it cannot be created.
    """
    with output_errors(path, OutputFolderError):
        if not is_url(path):
            os.makedirs(path, exist_ok=True)
            return
        from . import remote

        if not remote.is_object_store(remote.filesystem(path)[0]):
            remote.call(path, lambda fs, inner: fs.makedirs(inner, exist_ok=True))


def check_writable(folder: str) -> None:
    """Writes and removes a probe, so that a build does not fail after hours of work.

    Raises:
        OutputFolderError: if nothing can be written there.
    """
    probe = join(folder, f".probe.{uuid.uuid4().hex[:12]}.tmp")
    with output_errors(folder, OutputFolderError):
        make_folder(folder)
        if not is_url(folder):
            with open(probe, "wb"):
                pass
            os.unlink(probe)
        else:
            from . import remote

            remote.write(probe, b"")
            remote.remove(probe)


def commit_bytes(path: str, data: bytes) -> None:
    """Writes a small file so that it is either absent (or old) or complete.

    Raises:
        OutputError: if it cannot be written.
    """
    with output_errors(path):
        if is_url(path):
            from . import remote

            remote.write(path, data)
            return
        temporary = temporary_name(path)
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            publish(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


def temporary_name(path: str) -> str:
    """A fresh hidden name beside `path`; two attempts at one file never share it."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.{uuid.uuid4().hex[:12]}.tmp")


def publish(local: str, path: str) -> None:
    """Moves a complete, synced local file to its final name, and makes the rename durable.

    Raises:
        OutputError: if it cannot be written.
    """
    with output_errors(path):
        if is_url(path):
            from . import remote

            remote.upload(local, path)
            os.unlink(local)
            return
        os.replace(local, path)
        sync(os.path.dirname(path) or ".")


@contextlib.contextmanager
def local_target(path: str) -> Iterator[str]:
    """A fresh local name for a file that will be published as `path`; removed if it is not."""
    with contextlib.ExitStack() as stack:
        if is_url(path):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="seqshard-"))
            target = os.path.join(folder, os.path.basename(path))
        else:
            target = temporary_name(path)
            stack.callback(lambda: os.path.exists(target) and os.unlink(target))
        with output_errors(path):
            yield target


def sync(path: str) -> None:
    """Makes the content of a local file durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: str) -> None:
    """Removes a file if it is there."""
    with output_errors(path):
        if not is_url(path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return
        from . import remote

        remote.remove(path)


def remove_folder(path: str) -> None:
    """Removes a folder with all that is in it, if it is there."""
    with output_errors(path):
        if not is_url(path):
            if os.path.isdir(path):
                shutil.rmtree(path)
            return
        from . import remote

        remote.remove(path, recursive=True)


@contextlib.contextmanager
def local_copy(path: str) -> Iterator[str]:
    """A local path with the content of `path`: itself, or a temporary download of a URL.

    Raises:
        SourceNotFoundError: if there is no such file, or it may not be read.
        StorageError: if a remote store fails.
    """
    if not is_url(path):
        yield path
        return
    num_bytes = stamp(path).num_bytes
    with tempfile.TemporaryDirectory(prefix="seqshard-") as folder:
        local = os.path.join(folder, os.path.basename(path))
        with output_errors(local), open(local, "wb") as file:
            for block in read_blocks(path, num_bytes):
                file.write(block)
        yield local


def abort_uploads(folder: str) -> None:
    """Gives up uploads into a remote folder that killed writers never finished.

    Raises:
        OutputError: if the store refuses.
    """
    if is_url(folder):
        from . import remote

        with output_errors(folder):
            remote.abort_uploads(folder)


@contextlib.contextmanager
def source_errors(path: str) -> Iterator[None]:
    """Turns a refusal to read into one sentence about `path`.

    Raises:
        SourceNotFoundError, StorageError: see `source_error`.
    """
    try:
        yield
    except OSError as error:
        raise source_error(path, error) from error


def source_error(path: str, error: OSError) -> SourceNotFoundError | StorageError:
    """What to raise when `path` cannot be read: one sentence.

    Returns:
        SourceNotFoundError: if there is no such file, or it may not be read.
        StorageError: if a remote store fails.
    """
    found = _reason(error)
    if is_url(path) and not isinstance(error, FileNotFoundError | PermissionError):
        hint = "Check the connection, and run the same command again."
        return StorageError("the store fails", path, found=found, hint=hint)
    secret = is_url(path) and isinstance(error, PermissionError)
    hint = "Check the path and your credentials." if secret else "Check the path."
    return SourceNotFoundError("cannot read this file", path, found=found, hint=hint)


@contextlib.contextmanager
def output_errors(path: str, kind: type[OutputError] = OutputError) -> Iterator[None]:
    """Turns an operating system's refusal into one sentence about `path`."""
    try:
        yield
    except OSError as error:
        full = _error_number(error) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise kind(
            "cannot write the output",
            path,
            found=_reason(error),
            hint="Free some space and run the same command again; finished shards are kept."
            if full
            else "Check the path and its permissions.",
        ) from error


def _reason(error: OSError) -> str:
    number = _error_number(error)
    return os.strerror(number) if number else str(error) or type(error).__name__


def _error_number(error: OSError) -> int | None:
    """The system's error number; the HDF library has it only in its text."""
    match = re.search(r"\berrno = (\d+)", str(error))
    return int(match[1]) if match else error.errno
