"""Remote files through fsspec: requests that are repeated while there is hope, and large.

fsspec is imported when a path has "://". What the client libraries of the stores raise, which is
nearly anything, comes out of here as an `OSError`: `FileNotFoundError` and `PermissionError` where
the store says so, `RemoteError` otherwise.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from .errors import ConfigError, SeqshardError, redact

ATTEMPTS = 5
FIRST_WAIT_SECONDS = 0.5
MAX_WAIT_SECONDS = 20.0
REQUEST_BYTES = 8 << 20
# At once, by one reader: bounds its memory, and the connections to the store.
BATCH_BYTES = 64 << 20
BATCH_REQUESTS = 32

_MAGIC = re.compile(r"[*?\[]")

_Result = TypeVar("_Result")
# Answers of a store that may be different the next time.
_PASSING_STATUS = frozenset((408, 425, 429, 500, 502, 503, 504))
_PASSING_CODES = frozenset(("RequestTimeout", "SlowDown", "Throttling", "ThrottlingException"))
# Names of exceptions, as most of their libraries need not be installed: botocore's, aiohttp's,
# requests', fsspec's, gcsfs' and Python's own.
_PASSING_TYPES = frozenset(
    (
        "ConnectionError",
        "TimeoutError",
        "HTTPClientError",
        "IncompleteReadError",
        "ResponseParserError",
        "ClientConnectionError",
        "ClientPayloadError",
        "IncompleteRead",
        "ConnectTimeout",
        "ReadTimeout",
        "ChunkedEncodingError",
        "ContentDecodingError",
        "TransportError",
        "ChecksumError",
    )
)


class RemoteError(OSError):
    """A store cannot be reached, or refuses, or keeps failing; the text says which."""


class ByteRange(NamedTuple):
    """Bytes [begin, end) of a remote file."""

    url: str
    begin: int
    end: int


def filesystem(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it.

    Raises:
        ConfigError: if fsspec does not know the protocol, or lacks the package for it.
    """
    import fsspec
    from fsspec.asyn import AsyncFileSystem

    try:
        kind = fsspec.get_filesystem_class(fsspec.core.split_protocol(url)[0])
        # Other processes write too: a listing must not be remembered.
        options = {"use_listings_cache": False} if issubclass(kind, AsyncFileSystem) else {}
        return fsspec.core.url_to_fs(url, **options)
    except (ValueError, ImportError) as error:
        raise ConfigError(
            f"this URL cannot be opened: {error}", url, hint="Check it, or install its protocol."
        ) from error


def store_of(url: str) -> str:
    """Protocol with bucket or host: what URLs of one file system have in common."""
    return "/".join(url.split("/", 3)[:3])


def is_object_store(fs: Any) -> bool:
    """Whether a file appears only when its upload is complete, and folders do not exist."""
    from fsspec.asyn import AsyncFileSystem

    return isinstance(fs, AsyncFileSystem) and not _protocols(fs) & {"ssh", "sftp"}


def _protocols(fs: Any) -> set[str]:
    return {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)


def call(url: str, action: Callable[[Any, str], _Result]) -> _Result:
    """Runs `action(file system, path in it)`, again and again while the failure may pass.

    Raises:
        FileNotFoundError, PermissionError, RemoteError: see the module.
    """
    import tenacity

    fs, path = filesystem(url)
    attempts = tenacity.Retrying(
        retry=tenacity.retry_if_exception(may_pass),
        stop=tenacity.stop_after_attempt(ATTEMPTS),
        wait=tenacity.wait_random_exponential(FIRST_WAIT_SECONDS, MAX_WAIT_SECONDS),
        reraise=True,
    )
    try:
        return attempts(action, fs, path)
    except SeqshardError:
        raise
    except Exception as error:
        raise _translate(error, attempts.statistics.get("attempt_number", 1)) from error


def may_pass(error: BaseException) -> bool:
    """Whether the same request may succeed a little later."""
    chain = list(_causes(error))
    codes = {_error_code(item) for item in chain}
    statuses = {status for item in chain if (status := _http_status(item)) is not None}
    if statuses:
        return bool(statuses & _PASSING_STATUS or codes & _PASSING_CODES)
    if any(isinstance(item, socket.gaierror) for item in chain):
        return False  # no such host
    return any(kind.__name__ in _PASSING_TYPES for item in chain for kind in type(item).__mro__)


def read_whole(url: str) -> bytes:
    """The content of a small file, by one request."""

    def read(fs: Any, path: str) -> bytes:
        try:
            # With a start, s3fs does not ask for the size first.
            return bytes(fs.cat_file(path, start=0))
        except Exception as error:
            if any(_http_status(item) == 416 for item in _causes(error)):
                return b""  # there is no first byte
            raise

    return call(url, read)


def glob(pattern: str) -> list[str]:
    """URLs of all files that match a pattern, sorted; its fixed folder is listed once."""
    from fsspec.utils import glob_translate

    def find(fs: Any, path: str) -> list[str]:
        fixed = _MAGIC.split(path, maxsplit=1)[0]
        if fixed == path or not is_object_store(fs):
            found = fs.glob(path, detail=True)
        else:
            root = fixed.rpartition("/")[0]
            deep = "/" in path[len(root) + 1 :] or "**" in path
            listed = fs.find(root, detail=True).values() if deep else fs.ls(root, detail=True)
            matches = re.compile(glob_translate(path)).match
            found = {info["name"]: info for info in listed if matches(info["name"])}
        files = (name for name, info in found.items() if info["type"] == "file")
        return sorted(map(fs.unstrip_protocol, files))

    try:
        return call(pattern, find)
    except FileNotFoundError:
        return []


def read_ranges(ranges: Sequence[ByteRange]) -> list[bytes]:
    """The bytes of ranges of one file system, requested at the same time.

    Raises:
        RemoteError: also if a file ends before the end of a range.
    """
    found: dict[int, bytes] = {}
    if not ranges:
        return []

    def read(fs: Any, _: str) -> None:
        missing = [i for i in range(len(ranges)) if i not in found]
        paths = [fs._strip_protocol(ranges[i].url) for i in missing]
        starts, ends = [ranges[i].begin for i in missing], [ranges[i].end for i in missing]
        results = fs.cat_ranges(paths, starts, ends, on_error="return")
        failed = [item for item in results if isinstance(item, BaseException)]
        found.update(
            (i, item)
            for i, item in zip(missing, results, strict=True)
            if not isinstance(item, BaseException)
        )
        for error in sorted(failed, key=may_pass):  # what will not pass first
            raise error

    call(ranges[0].url, read)
    for i, item in enumerate(ranges):
        if len(found[i]) != item.end - item.begin:
            raise RemoteError(
                f"{redact(item.url)} ends at byte {item.begin + len(found[i])}, "
                f"where byte {item.end} was expected"
            )
    return [found[i] for i in range(len(ranges))]


def batches(ranges: Sequence[ByteRange]) -> Iterator[list[ByteRange]]:
    """The ranges in groups that are requested at once."""
    batch: list[ByteRange] = []
    num_bytes = 0
    for item in ranges:
        size = item.end - item.begin
        if batch and (num_bytes + size > BATCH_BYTES or len(batch) == BATCH_REQUESTS):
            yield batch
            batch, num_bytes = [], 0
        batch.append(item)
        num_bytes += size
    if batch:
        yield batch


def read_blocks(url: str, num_bytes: int) -> Iterator[bytes]:
    """The content of a file of known size, block by block."""
    cuts = [*range(0, num_bytes, REQUEST_BYTES), num_bytes]
    for batch in batches([ByteRange(url, a, b) for a, b in itertools.pairwise(cuts)]):
        yield from read_ranges(batch)


def write(url: str, data: bytes) -> None:
    """Writes a small file, which appears only when it is complete."""

    def put(fs: Any, path: str) -> None:
        with _target(fs, path) as target:
            fs.pipe_file(target, data)

    call(url, put)


def upload(local: str, url: str) -> None:
    """Copies a local file, which appears only when it is complete."""

    def put(fs: Any, path: str) -> None:
        with _target(fs, path) as target:
            fs.put_file(local, target)

    call(url, put)


@contextlib.contextmanager
def _target(fs: Any, path: str) -> Iterator[str]:
    """Where to write what shall become `path`: that itself only if nobody sees it before its end.

    No object store can rename, but uploads to them are atomic; elsewhere it is the other way round.
    """
    if is_object_store(fs):
        yield path
        return
    folder, name = os.path.split(path)
    temporary = f"{folder}/.{name}.{uuid.uuid4().hex[:12]}.tmp"
    try:
        yield temporary
        fs.mv(temporary, path)
    except BaseException:
        with contextlib.suppress(Exception):
            fs.rm_file(temporary)
        raise


def remove(url: str, recursive: bool = False) -> None:
    """Removes a file, or a folder with all that is in it, if it is there."""

    def rm(fs: Any, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            if recursive:
                fs.rm(path, recursive=True)
            else:
                fs.rm_file(path)

    call(url, rm)


def abort_uploads(folder: str) -> int:
    """Gives up what killed writers left unfinished in a folder of S3; returns how many uploads.

    Such parts are no objects and nobody sees them, but they are stored and paid for. Other stores
    drop them by themselves.
    """

    def abort(fs: Any, path: str) -> int:
        if "s3" not in _protocols(fs):
            return 0
        bucket, _, key = path.partition("/")
        prefix = f"{key.rstrip('/')}/" if key else ""
        found = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix)
        uploads = found.get("Uploads", [])
        for upload in uploads:
            name, number = upload["Key"], upload["UploadId"]
            fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=name, UploadId=number)
        return len(uploads)

    return call(folder, abort)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(10):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _http_status(error: BaseException) -> int | None:
    """The status in an exception of botocore, aiohttp, gcsfs or requests."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    number = getattr(error, "status", None) or getattr(error, "code", None)
    number = number or getattr(response, "status_code", None)
    if isinstance(number, str) and number.isdecimal():
        number = int(number)
    return number if isinstance(number, int) and 100 <= number < 600 else None


def _error_code(error: BaseException) -> str | None:
    """The name that S3 gives to an error."""
    response = getattr(error, "response", None)
    return response.get("Error", {}).get("Code") if isinstance(response, dict) else None


def _translate(error: Exception, attempts: int) -> OSError:
    """What a client library raised as one of the three kinds of errors, in one line."""
    if isinstance(error, RemoteError) or (isinstance(error, OSError) and error.errno in _LOCAL):
        return error
    plain = error.strerror if isinstance(error, OSError) else None
    text = redact(" ".join((plain or str(error)).split())) or type(error).__name__
    statuses = {_http_status(item) for item in _causes(error)}
    if isinstance(error, FileNotFoundError) or 404 in statuses:
        return FileNotFoundError(text if " " in text else "no such object or bucket")
    if isinstance(error, PermissionError) or statuses & {401, 403} or text.startswith("Forbidden"):
        return PermissionError(text)
    return RemoteError(f"{text}, after {attempts} attempts" if attempts > 1 else text)


# The disk on this side is full or broken.
_LOCAL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
