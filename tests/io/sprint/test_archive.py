from __future__ import annotations

import itertools
import struct
import tracemalloc
import zlib

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from seqshard.io.errors import (
    MissingSequenceError,
    SeqshardError,
    SourceFormatError,
    SourceNotFoundError,
)
from seqshard.io.sprint.archive import Archive

NAMES = [f"r/seg{i}" for i in range(10)]


def names_of(archive):
    return archive.names.to_pylist()


def payloads(archive):
    return [bytes(archive.payload(i)) for i in range(len(archive))]


@pytest.fixture(scope="session")
def reference(rasr):
    with Archive(rasr / "robust" / "reference.cache") as archive:
        return dict(zip(names_of(archive), payloads(archive), strict=True))


# What RASR wrote.


def test_plain_entries_equal_truth(rasr):
    truth = np.load(rasr / "truth" / "plain" / "plain.cache.npz")
    with Archive(rasr / "plain" / "plain.cache") as archive:
        assert names_of(archive) == truth["names"].tolist()
        assert b"".join(payloads(archive)) == truth["contents_blob"].tobytes()
        assert archive.table.size.tolist() == np.diff(truth["contents_off"]).tolist()


def test_names_in_utf8_with_nul_newline_and_blanks(rasr):
    truth = np.load(rasr / "truth" / "features" / "names-utf8.cache.npz")
    blob, offsets = truth["names_blob"].tobytes(), truth["names_off"].tolist()
    expected = [blob[a:b].decode() for a, b in itertools.pairwise(offsets)]
    with Archive(rasr / "features" / "names-utf8.cache") as archive:
        assert names_of(archive) == expected
        assert "nul\0byte" in expected
        assert "newline\nname" in expected


def test_attributes_are_no_sequences_but_readable(rasr):
    with Archive(rasr / "features" / "f32-dim16.cache") as archive:
        assert len(archive) == 400
        assert len(archive.sequences) == 200
        names = names_of(archive)
        assert not any(names[i].endswith(".attribs") for i in archive.sequences)
        xml = archive.attributes(int(archive.sequences[0]))
        assert xml.startswith(b"<flow-attributes><flow-attribute name=")
        assert xml == bytes(archive.payload(archive.find("corpus/rec-0001/1.attribs")))


def test_uncompressed_payload_is_a_view(rasr):
    with Archive(rasr / "robust" / "reference.cache") as archive:
        view = archive.payload(0)
        assert isinstance(view, memoryview)
        assert view.readonly
        assert len(view) == 138
        view.release()


def test_views_outlive_the_archive(rasr):
    with Archive(rasr / "robust" / "reference.cache") as archive:
        view = archive.payload(0)
    assert bytes(view[4:14]) == b"vector-f32"


def test_find(rasr):
    with Archive(rasr / "robust" / "reference.cache") as archive:
        assert archive.find("r/seg3") == 3
        with pytest.raises(MissingSequenceError, match="no such entry"):
            archive.find("seg3")


# Damage, as docs/sprint-format.md says that RASR reads it.


def test_no_entries(rasr):
    with Archive(rasr / "robust" / "zero-entries.cache") as archive:
        assert len(archive) == 0
        assert names_of(archive) == []
        assert archive.complete


def test_first_of_duplicate_names_wins(rasr, reference):
    with Archive(rasr / "robust" / "dup-in-table.cache") as archive:
        assert names_of(archive) == [name for name in NAMES if name != "r/seg2"]
        assert bytes(archive.payload(archive.find("r/seg1"))) == reference["r/seg1"]


def test_removed_entries_and_holes(rasr, reference):
    with Archive(rasr / "robust" / "removed.cache") as archive:
        assert names_of(archive) == ["r/seg1", "r/seg2", *NAMES[5:9]]
        for name in names_of(archive):
            assert bytes(archive.payload(archive.find(name))) == reference[name]


def test_checksum_makes_an_entry_unreadable(rasr, reference):
    path = rasr / "robust" / "bad-checksum.cache"
    with Archive(path) as archive:
        for name in ("r/seg1", "r/seg3"):
            with pytest.raises(SourceFormatError, match=f"{name}.*checksum.*found 67305985"):
                archive.payload(archive.find(name))
        assert sorted(archive.damage(archive.sequences)) == [1, 3]
        assert bytes(archive.payload(0)) == reference["r/seg0"]
    with Archive(path, ignore_checksum=True) as archive:
        assert payloads(archive) == list(reference.values())


def test_damaged_gzip_data(rasr, reference):
    path = rasr / "robust" / "bad-gzip-data.cache"
    with Archive(path) as archive:
        with pytest.raises(SourceFormatError, match=r"r/seg3.*compressed data is damaged"):
            archive.payload(3)
        assert bytes(archive.payload(2)) == reference["r/seg2"]
    with Archive(path, ignore_gzip_trailer=True) as archive:
        tolerated = bytes(archive.payload(3))
        assert len(tolerated) == len(reference["r/seg3"])
        assert tolerated != reference["r/seg3"]


def test_size_of_the_table_counts(rasr):
    with Archive(rasr / "robust" / "size-mismatch-table.cache") as archive:
        assert len(archive.payload(1)) == 278


@pytest.mark.parametrize("recover", [True, "rasr"])
def test_archive_without_table(rasr, reference, recover):
    with Archive(rasr / "robust" / "no-table.cache", recover=recover) as archive:
        assert not archive.complete
        assert archive.lost == ()
        assert dict(zip(names_of(archive), payloads(archive), strict=True)) == reference


@pytest.mark.parametrize("recover", [True, "rasr"])
def test_crashed_writer(rasr, recover):
    with Archive(rasr / "robust" / "crash-exit.cache", recover=recover) as archive:
        assert len(archive) == 119
        assert archive.damage(np.arange(119)) == {}


@pytest.mark.parametrize("recover", [True, "rasr"])
def test_truncated_in_the_last_entry(rasr, reference, recover):
    with Archive(rasr / "robust" / "truncated-mid-data.cache", recover=recover) as archive:
        assert dict(zip(names_of(archive), payloads(archive), strict=True)) == {
            name: reference[name] for name in NAMES[:9]
        }
        ((name, error),) = archive.lost
        assert name == "r/seg9"
        assert "found 100 bytes" in str(error)


def test_recovery_can_be_refused(rasr):
    with pytest.raises(SourceFormatError, match="no file table: its writer crashed"):
        Archive(rasr / "robust" / "no-table.cache", recover=False)


def cut(data, position):
    return data[:8] + b"\0" + data[9:position]


@pytest.mark.parametrize("place", ["tag", "length", "name", "sizes", "data", "end"])
def test_truncation_in_every_part_of_an_entry(make, writer, place):
    data = writer.archive([("first", b"abcd"), ("second", b"efghij")])
    second = data.index(b"second") - 8
    offset = {"tag": 2, "length": 5, "name": 10, "sizes": 20, "data": 28, "end": 34}[place]
    path = make(cut(data, second + offset))
    with Archive(path) as archive:
        assert names_of(archive) == ["first"]
        assert len(archive.lost) == 1
    if place in ("length", "name", "sizes"):
        with pytest.raises(SourceFormatError, match="inside an entry's header, which RASR refuses"):
            Archive(path, recover="rasr")
    else:
        with Archive(path, recover="rasr") as archive:
            assert names_of(archive) == ["first"]


def test_truncation_right_behind_an_entry_loses_nothing(make, writer):
    data = writer.archive([("first", b"abcd"), ("second", b"efghij")])
    path = make(cut(data, data.index(b"second") - 8))
    with Archive(path) as archive:
        assert (names_of(archive), archive.lost) == (["first"], ())


@pytest.mark.parametrize(("garbage", "rasr_finds"), [(8, True), (7, False)])
def test_garbage_between_entries(make, writer, garbage, rasr_finds):
    first, _ = writer.entry("first", b"abcd")
    second, _ = writer.entry("second", b"efgh")
    path = make(b"SP_ARC1\0\0" + first + b"x" * garbage + second)
    with Archive(path) as archive:
        assert names_of(archive) == ["first", "second"]
        assert "belong to no entry" in str(archive.lost[0][1])
    with Archive(path, recover="rasr") as archive:
        assert names_of(archive) == (["first", "second"] if rasr_finds else ["first"])


def test_recovery_steps_over_tags_inside_payload_and_holes(make, writer):
    inner, _ = writer.entry("inner", b"no entry")
    hole = writer.START + struct.pack("<IIII", 0, 6, 0, 0) + b"stale!" + writer.END
    outer, _ = writer.entry("outer", b"12" + inner)
    last, _ = writer.entry("last", b"", compressed=True)
    path = make(b"SP_ARC1\0\0" + outer + hole + last)
    for recover in (True, "rasr"):
        with Archive(path, recover=recover) as archive:
            assert names_of(archive) == ["outer", "last"]
            assert payloads(archive) == [b"12" + inner, b""]


def test_recovery_ignores_the_rest_of_an_overwritten_table(make, writer):
    closed = writer.archive([("one", b"1234"), ("a-long-name-of-two", b"5678")])
    (table,) = struct.unpack("<Q", closed[-8:])
    third, _ = writer.entry("3", b"x")
    data = bytearray(closed)
    data[8] = 0
    data[table : table + len(third)] = third
    with Archive(make(bytes(data))) as archive:
        assert names_of(archive) == ["one", "a-long-name-of-two", "3"]
        assert archive.lost == ()


def test_damaged_tag_loses_no_entry(make, writer):
    parts = [writer.entry(name, b"12345")[0] for name in ("a", "b", "c")]
    for flipped in (0, len(parts[1]) - 1):
        middle = bytearray(parts[1])
        middle[flipped] ^= 1
        path = make(b"SP_ARC1\0\0" + parts[0] + bytes(middle) + parts[2])
        with Archive(path) as archive:
            assert names_of(archive) == ["a", "b", "c"]


def test_damaged_size_loses_one_entry_and_names_it(make, writer):
    parts = [bytearray(writer.entry(name, b"12345")[0]) for name in ("a", "b", "c")]
    parts[1][9] += 3
    with Archive(make(b"SP_ARC1\0\0" + b"".join(parts))) as archive:
        assert names_of(archive) == ["a", "c"]
        assert [name for name, _ in archive.lost] == ["b"]


def test_forced_scan_of_a_damaged_table(make, writer):
    data = writer.archive([("a", b"1"), ("b", b"2")])[:-3]
    path = make(data)
    with pytest.raises(SourceFormatError, match="recover='force' reads its intact entries"):
        Archive(path)
    with Archive(path, recover="force") as archive:
        assert names_of(archive) == ["a", "b"]
        assert not archive.complete


# Files that are no archives, and bad tables.


def test_files_that_are_no_archives(tmp_path, make):
    with h5py.File(tmp_path / "x.hdf", "w") as file:
        file["x"] = 1
    cases = {
        str(tmp_path / "x.hdf"): 'not a Sprint archive .*found an HDF file.*kind "hdf"',
        make(b"", "empty"): "the file is empty",
        make(b"a.cache\nb.cache\n", "text"): "found text: 'a.cache.*must be named \\*.bundle",
        make(zlib.compress(b"x" * 99, wbits=31), "gz"): "found a gzip file.*Decompress it first",
        make(b"SP_ARC1\0", "short"): "not a Sprint archive",
        make(b"SP_ARC1\0\1" + bytes(10), "tiny"): "too short for a file table",
        str(tmp_path): "a folder where a single file is due.*ArchiveWriter packs them",
    }
    for path, message in cases.items():
        with pytest.raises(SourceFormatError, match=message):
            Archive(path)
    with pytest.raises(SourceNotFoundError, match="no such archive"):
        Archive(tmp_path / "nothing")


def table_of(data):
    return struct.unpack("<Q", data[-8:])[0]


def test_damaged_table_fields_name_their_bytes(make, writer):
    good = writer.archive([("name", b"1234"), ("other", b"56")])
    table = table_of(good)

    def patched(position, data):
        return make(good[:position] + data + good[position + len(data) :])

    big = struct.pack("<I", 0xFFFFFFFF)
    cases = [
        (len(good) - 8, struct.pack("<Q", len(good)), "do not point to a file table"),
        (len(good) - 8, struct.pack("<Q", 2**64 - 1), "do not point to a file table"),
        (len(good) - 8, struct.pack("<Q", 3), "do not point to a file table"),
        (table, big, f"byte {table}: the file table has no room"),
        (table + 4, big, "the file table ends before entry 1 of 2"),
        (table + 4 + 24, big, "an entry reaches behind the file table"),
        (len(good) - 20, big, "the table of holes has no room"),
    ]
    for position, data, message in cases:
        with pytest.raises(SourceFormatError, match=message):
            Archive(patched(position, data))


def test_entry_without_a_name(make, writer):
    with pytest.raises(SourceFormatError, match="byte 38: an entry in the file table has no name"):
        Archive(make(writer.archive([("", b"1")])))


def test_entries_outside_the_file_are_damaged_alone(make, writer):
    good = writer.archive([("name", b"1234"), ("other", b"56")])
    position = table_of(good) + 4 + 8
    for value in (2**64 - 1, 2**63, len(good), 0):
        path = make(good[:position] + struct.pack("<Q", value) + good[position + 8 :])
        with Archive(path) as archive:
            with pytest.raises(SourceFormatError, match=r"entry 'name'.*is not inside the file"):
                archive.payload(0)
            assert bytes(archive.payload(1)) == b"56"


def test_names_in_other_encodings(make, writer):
    path = make(writer.archive([("ok", b""), ("grüß".encode("latin-1"), b"1")]))
    with Archive(path) as archive:
        position = archive.data.rfind(b"\xfc")
        with pytest.raises(SourceFormatError, match=rf"byte {position}: .* is not utf-8"):
            _ = archive.names
    with Archive(path, encoding="latin-1") as archive:
        assert names_of(archive) == ["ok", "grüß"]
    with Archive(path, encoding="ascii") as archive, pytest.raises(SourceFormatError, match="asc"):
        _ = archive.names


def test_long_names(make, writer):
    entries = [("a" * 70_000, b"1"), ("/b//c", b"2"), ("..", b"3")]
    with Archive(make(writer.archive(entries))) as archive:
        assert list(zip(names_of(archive), payloads(archive), strict=True)) == entries


def test_decompression_is_bounded(make, writer):
    bomb = writer.member(bytes(50_000_000))
    data = bytearray(writer.archive([("x", b"12345678")], compressed=True))
    entry, _ = writer.entry("x", b"")
    body = b"SP_ARC1\0\1" + entry[:9] + struct.pack("<III", 8, len(bomb), 0) + bomb + writer.END
    table = struct.pack("<I", 1) + writer.string("x") + struct.pack("<QII", 18, 8, len(bomb))
    data = body + table + struct.pack("<IQQ", 0, len(body) + len(table), len(body))
    with (
        Archive(make(data)) as archive,
        pytest.raises(SourceFormatError, match=r"another length .expected 8 bytes, found more"),
    ):
        archive.payload(0)


def test_claims_that_compression_cannot_keep_are_damage(make, writer):
    """So that nobody provides space for 4 GiB because of a few bytes."""
    data = bytearray(writer.archive([("x", b"abc"), ("y", b"z" * 100_000)], compressed=True))
    at = data.rindex(writer.string("x")) + 5 + 8
    assert struct.unpack_from("<I", data, at) == (3,)
    struct.pack_into("<I", data, at, 2**32 - 1)
    with Archive(make(bytes(data))) as archive:
        with pytest.raises(SourceFormatError, match=r"'x', byte .*cannot hold .*found 4294967295"):
            archive.payload(0)
        assert archive.payload(1) == b"z" * 100_000


@pytest.mark.parametrize("place", [-1, -5])
def test_gzip_trailer_is_verified(make, writer, place):
    data = bytearray(writer.archive([("x", b"hello" * 20)], compressed=True))
    end = data.index(writer.END)
    data[end + place] ^= 1
    path = make(bytes(data))
    with Archive(path) as archive, pytest.raises(SourceFormatError, match=r"entry 'x'.*incorrect"):
        archive.payload(0)
    with Archive(path, ignore_gzip_trailer=True) as archive:
        assert archive.payload(0) == b"hello" * 20


def test_fingerprint_depends_on_the_table(make, writer):
    def fingerprint(entries):
        with Archive(make(writer.archive(entries))) as archive:
            return archive.fingerprint

    first = fingerprint([("a", b"12"), ("b", b"3")])
    assert len(first) == 32
    assert first == fingerprint([("a", b"xx"), ("b", b"y")])
    assert first != fingerprint([("a", b"1"), ("b", b"23")])
    assert first != fingerprint([("ab", b"12"), ("b", b"3")])


def test_entries_larger_than_2_gib(tmp_path, writer):
    """Sparse, so that it costs no disk: two entries of 3 GiB, the second behind 2**32."""
    size = 3 * 2**30
    rows = b""
    with open(tmp_path / "x.cache", "wb") as file:
        file.write(b"SP_ARC1\0\1")
        for name, last in (("a", b"x"), ("b", b"y")):
            file.write(writer.START + writer.string(name))
            rows += writer.string(name) + struct.pack("<QII", file.tell(), size, 0)
            file.write(struct.pack("<III", size, 0, 0))
            file.seek(size - 1, 1)
            file.write(last + writer.END)
        table = file.tell()
        file.write(struct.pack("<I", 2) + rows)
        file.write(struct.pack("<IQQ", 0, file.tell(), table))
    for recover in (True, "force"):
        with Archive(tmp_path / "x.cache", recover=recover) as archive:
            assert names_of(archive) == ["a", "b"]
            assert archive.table.payload[1] > 2**31
            for entry, last in enumerate(b"xy"):
                with archive.payload(entry) as view:
                    assert (len(view), view[0], view[-1]) == (size, 0, last)


# Statements of docs/sprint-format.md that no archive of RASR shows.


def test_optional_fields_of_gzip_headers(make, writer):
    """RASR writes none of them, but skips them all."""
    data = b"payload " * 9
    body = writer.member(data)[10:]
    fields = b"\5\0extra" + b"name\0" + b"comment\0"
    head = bytes([0x1F, 0x8B, 8, 4 | 8 | 16, 0, 0, 0, 0, 0, 3]) + fields
    head_crc = bytes([0x1F, 0x8B, 8, 4 | 8 | 16 | 2, 0, 0, 0, 0, 0, 3]) + fields
    head_crc += struct.pack("<H", zlib.crc32(head_crc) & 0xFFFF)
    for stored in (head + body, head_crc + body):
        with Archive(make(compressed_archive(writer, stored, len(data)))) as archive:
            assert archive.payload(0) == data


def test_compressed_data_without_a_gzip_header(make, writer):
    path = make(compressed_archive(writer, zlib.compress(b"payload"), 7))
    with Archive(path) as archive, pytest.raises(SourceFormatError, match="incorrect header check"):
        archive.payload(0)


def compressed_archive(writer, stored, size):
    head = b"SP_ARC1\0\1" + writer.START + writer.string("x")
    body = head + struct.pack("<III", size, len(stored), 0) + stored + writer.END
    row = writer.string("x") + struct.pack("<QII", len(head), size, len(stored))
    holes = len(body) + 4 + len(row)
    return body + struct.pack("<I", 1) + row + struct.pack("<IQQ", 0, holes, len(body))


def test_the_place_of_the_table_of_holes_is_not_used(make, writer):
    data = writer.archive([("a", b"1")])
    for place in (0, 3, 2**64 - 1):
        with Archive(make(data[:-16] + struct.pack("<Q", place) + data[-8:])) as archive:
            assert names_of(archive) == ["a"]


def test_archives_of_python_writers_have_no_table_of_holes(make, writer):
    data = writer.archive([("a", b"1"), ("b", b"2")])
    with Archive(make(data[:-20] + struct.pack("<Q", 0) + data[-8:])) as archive:
        assert names_of(archive) == ["a", "b"]


def test_bytes_behind_the_trailer(make, writer):
    path = make(writer.archive([("a", b"1"), ("b", b"2")]) + b"more")
    with pytest.raises(SourceFormatError, match="recover='force' reads its intact entries"):
        Archive(path)
    with Archive(path, recover="force") as archive:
        assert payloads(archive) == [b"1", b"2"]


def test_the_order_is_that_of_the_table(make, writer):
    data = writer.archive([("a", b"1"), ("b", b"2"), ("c", b"3")], order=[2, 0, 1])
    with Archive(make(data)) as archive:
        assert names_of(archive) == ["c", "a", "b"]
        assert payloads(archive) == [b"3", b"1", b"2"]
    for recover in (True, "rasr"):
        with Archive(make(data[:8] + b"\0" + data[9:]), recover=recover) as archive:
            assert names_of(archive) == ["a", "b", "c"]


@pytest.mark.parametrize("recover", [True, "rasr"])
def test_first_of_duplicate_names_wins_in_a_scan(make, writer, recover):
    data = writer.archive([("a", b"1"), ("b", b"2"), ("a", b"3")], closed=False)
    with Archive(make(data), recover=recover) as archive:
        assert dict(zip(names_of(archive), payloads(archive), strict=True)) == {
            "a": b"1",
            "b": b"2",
        }


@pytest.mark.parametrize("recover", [True, "rasr"])
def test_a_wrong_end_tag_is_accepted(make, writer, recover):
    data = bytearray(writer.archive([("a", b"1"), ("b", b"2")], closed=False))
    data[data.index(writer.END)] ^= 0xFF
    with Archive(make(bytes(data)), recover=recover) as archive:
        assert payloads(archive) == [b"1", b"2"]
        assert archive.lost == ()


@pytest.mark.parametrize("recover", [True, "rasr"])
def test_a_writer_that_crashed_before_its_first_entry(make, recover):
    with Archive(make(b"SP_ARC1\0\0"), recover=recover) as archive:
        assert (len(archive), archive.lost, archive.complete) == (0, (), False)


@pytest.mark.parametrize("name", ["nul\0byte", "new\nline", "x" * 70_000, "grüß"])
def test_lost_entries_of_any_name_are_named(make, writer, name):
    data = writer.archive([("first", b"1"), (name, b"234")], closed=False)
    with Archive(make(data[:-5])) as archive:
        assert names_of(archive) == ["first"]
        ((lost, error),) = archive.lost
        assert lost == name
        assert error.entry == name
        assert error.position == len(data) - 7


def test_lost_names_are_no_longer_than_the_gaps(make, writer):
    """Broken entries that all claim the rest of the file as their name, between intact ones."""
    whole, _ = writer.entry("x", b"")
    count, step = 2000, len(whole) + 8
    names = [(count - i) * step for i in range(count)]
    gaps = [whole + writer.START + struct.pack("<I", length) for length in names]
    path = make(b"SP_ARC1\0\0" + b"".join(gaps) + bytes(64))
    tracemalloc.start()
    with Archive(path) as archive:
        assert names_of(archive) == ["x"]
        assert [name for name, _ in archive.lost[:-1]] == [""] * (count - 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * count * step


@pytest.mark.slow
def test_entries_of_2_gib_that_were_never_finished(tmp_path, writer):
    """Sparse, as far as its data; the table would have come behind it."""
    size = 2**31 + 5
    whole, _ = writer.entry("whole", b"1234")
    head = writer.START + writer.string("large") + struct.pack("<III", size, 0, 0)
    with open(tmp_path / "x.cache", "wb") as file:
        file.write(b"SP_ARC1\0\0" + whole + head)
        file.truncate(file.tell() + size - 1)
    with Archive(tmp_path / "x.cache") as archive:
        assert payloads(archive) == [b"1234"]
        ((name, error),) = archive.lost
        assert name == "large"
        assert error.expected == f"{size} bytes and an end tag"
        assert error.found == f"{size - 1} bytes"


# Properties.


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    entries=st.lists(
        st.tuples(st.text(min_size=1, max_size=9), st.binary(max_size=60)),
        max_size=8,
        unique_by=lambda item: item[0],
    ),
    compressed=st.sets(st.integers(0, 7)),
    closed=st.booleans(),
    data=st.data(),
)
def test_round_trip_and_mutation(make, writer, entries, compressed, closed, data):
    entries = [(name, body) for name, body in entries if name.isprintable()]
    good = writer.archive(entries, compressed=compressed, closed=closed)
    for recover in (True, "rasr", "force"):
        with Archive(make(good), recover=recover) as archive:
            assert list(zip(names_of(archive), payloads(archive), strict=True)) == entries
    position = data.draw(st.integers(8, len(good) - 1))
    flipped = bytearray(good)
    flipped[position] ^= 1 << data.draw(st.integers(0, 7))
    for recover in (True, "rasr", "force"):
        try:
            with Archive(make(bytes(flipped)), recover=recover) as archive:
                names_of(archive)
                payloads(archive)
        except SeqshardError:
            pass


@pytest.mark.slow
def test_a_million_entries_open_in_about_a_second(tmp_path, writer):
    count = 10**6
    names = [b"corpus/recording-%06d/%d" % (i // 4, i % 11) for i in range(count)]
    rows = b"".join(
        struct.pack(f"<I{len(name)}sQII", len(name), name, 100, 50, 0) for name in names
    )
    body = b"SP_ARC1\0\1" + bytes(200)
    table = struct.pack("<I", count) + rows
    tail = struct.pack("<IQQ", 0, len(body) + len(table), len(body))
    path = tmp_path / "large.cache"
    path.write_bytes(body + table + tail)
    with Archive(path) as archive:
        assert len(archive) == len(set(names))
        assert archive.names[3].as_py() == names[3].decode()
