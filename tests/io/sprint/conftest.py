"""Writes archives byte by byte, independently of the package's own writer."""

from __future__ import annotations

import pathlib
import struct
import zlib
from types import SimpleNamespace

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[3]
START = b"\x55\xaa\x55\xaa"
END = b"\xaa\x55\xaa\x55"


def string(text):
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<I", len(data)) + data


def member(data):
    """One gzip member with the header that RASR writes."""
    raw = zlib.compressobj(6, wbits=-15)
    body = raw.compress(data) + raw.flush()
    head = bytes([0x1F, 0x8B, 8, 0, 0, 0, 0, 0, 0, 3])
    return head + body + struct.pack("<II", zlib.crc32(data), len(data) & 0xFFFFFFFF)


def entry(name, data, compressed=False, checksum=0):
    """Bytes of an entry, and its sizes for the table."""
    stored = member(data) if compressed else data
    sizes = (len(data), len(stored) if compressed else 0)
    head = START + string(name) + struct.pack("<III", *sizes, checksum)
    return head + stored + END, sizes


def archive(entries, *, closed=True, compressed=(), extra=b"", checksum=None, order=None):
    """A complete archive of (name, payload) pairs."""
    body, rows = bytearray(b"SP_ARC1\0" + bytes([closed])), []
    for i, (name, data) in enumerate(entries):
        name = name.encode() if isinstance(name, str) else name
        wanted = compressed if isinstance(compressed, bool) else i in compressed
        data, sizes = entry(name, data, wanted, (checksum or {}).get(i, 0))
        rows.append((name, len(body) + 8 + len(name), *sizes))
        body += data
    body += extra
    if closed:
        table = len(body)
        body += struct.pack("<I", len(rows))
        for i in range(len(rows)) if order is None else order:
            name, position, size, comp = rows[i]
            body += string(name) + struct.pack("<QII", position, size, comp)
        holes = len(body)
        body += struct.pack("<IQQ", 0, holes, table)
    return bytes(body)


def block(datatype, packets):
    return string(datatype) + struct.pack("<I", len(packets)) + b"".join(packets)


def vector(values, times=(0.0, 0.025)):
    values = np.asarray(values)
    data = values.astype(values.dtype.newbyteorder("<")).tobytes()
    return struct.pack("<I", len(values)) + data + struct.pack("<dd", *times)


def features(matrix, datatype="vector-f32"):
    packets = [vector(row, (0.01 * t, 0.01 * t + 0.025)) for t, row in enumerate(matrix)]
    return block(datatype, packets)


def packed(value):
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def rle_codes(items):
    """Naive codes for (time, label) items: repeats if the label stays, else single items."""
    out, clock, i = bytearray(), 0, 0
    while i < len(items):
        time, label = items[i]
        if time != clock:
            out += b"\0" + struct.pack("<I", time)
            clock = time
        run = 1
        while i + run < len(items) and run < 128 and items[i + run] == (clock + run, label):
            run += 1
        if run > 1:
            out += struct.pack("<bI", -run, label & 0xFFFFFFFF)
        else:
            out += struct.pack("<bI", 1, label & 0xFFFFFFFF)
        clock += run
        i += run
    return bytes(out)


def rle(items, magic=b"ALIGNRLE", alphabet=None, codes=None):
    """One packet of hard items."""
    tail = b""
    if magic == b"AALPHRLE":
        tail = packed(len(alphabet)) + b"".join(packed(k) + string(v) for k, v in alphabet.items())
    codes = rle_codes(items) if codes is None else codes
    return magic + struct.pack("<I", len(items)) + codes + tail + struct.pack("<dd", 0, 1)


def weighted(frames, magic=b"ALIGNRLE", version=2):
    """One packet of (explicit time or None, [(label, weight)]) frames."""
    count = sum(len(items) for _, items in frames)
    out = magic + struct.pack("<I", 0x80000000 | version) + packed(count)
    for time, items in frames:
        out += packed(len(items) << 1 | (time is not None))
        out += b"" if time is None else packed(time)
        for label, weight in items:
            value = struct.pack("<H", round(weight * 65535)) if version == 1 else None
            out += packed(label & 0xFFFFFFFF) + (value or struct.pack("<f", weight))
    return out + struct.pack("<dd", 0, 1)


def alignment(*packets):
    return block("flow-alignment", packets)


WRITER = SimpleNamespace(
    START=START,
    END=END,
    string=string,
    member=member,
    entry=entry,
    archive=archive,
    block=block,
    vector=vector,
    features=features,
    packed=packed,
    rle=rle,
    weighted=weighted,
    alignment=alignment,
)


@pytest.fixture(scope="session")
def writer():
    return WRITER


@pytest.fixture(scope="session")
def rasr():
    """Archives that RASR wrote, and what they hold."""
    return ROOT / "tests" / "data" / "rasr"


@pytest.fixture(scope="session")
def demo():
    return ROOT / "examples" / "demo"


@pytest.fixture
def make(tmp_path):
    """Writes bytes to a file and returns its path."""

    def write(data, name="test.cache"):
        path = tmp_path / name
        path.write_bytes(data)
        return str(path)

    return write
