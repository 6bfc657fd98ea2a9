"""Parts of remote files in sparse local files."""

import os
import uuid

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqshard.io import mirror, remote
from seqshard.io.errors import StorageError
from seqshard.io.mirror import Mirror, Wanted, fetch, plan_requests, unite

DATA = np.random.default_rng(1).integers(0, 256, 300_000, np.uint8).tobytes()
RANGES = st.lists(
    st.tuples(st.integers(0, len(DATA)), st.integers(0, 60_000)).map(lambda r: (r[0], sum(r))),
    max_size=6,
)


@pytest.fixture
def url():
    url = f"memory://{uuid.uuid4().hex}/a"
    fsspec.filesystem("memory").pipe_file(url, DATA)
    return url


@pytest.fixture
def small_requests(monkeypatch):
    """Sizes are divided by 100, and requests are recorded."""
    monkeypatch.setattr(mirror, "MAX_GAP_BYTES", 10_000)
    monkeypatch.setattr(remote, "REQUEST_BYTES", 80_000)
    monkeypatch.setattr(remote, "BATCH_BYTES", 200_000)
    requests = []
    original = remote.read_ranges
    monkeypatch.setattr(
        remote, "read_ranges", lambda batch: requests.extend(batch) or original(batch)
    )
    return requests


def array(ranges):
    return np.array(ranges, np.int64).reshape(-1, 2)


def as_bytes(ranges, size=300_000):
    mask = np.zeros(size, bool)
    for begin, end in ranges:
        mask[begin:end] = True
    return mask


@given(RANGES)
def test_union(ranges):
    found = unite(array(ranges))
    np.testing.assert_array_equal(as_bytes(found, 400_000), as_bytes(ranges, 400_000))
    assert (found[:, 0] < found[:, 1]).all()
    assert (found[1:, 0] > found[:-1, 1]).all()


@given(RANGES)
def test_requests_cover_the_pieces_and_little_else(ranges):
    pieces = unite(array(ranges))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mirror, "MAX_GAP_BYTES", 10_000)
        patch.setattr(remote, "REQUEST_BYTES", 80_000)
        requests = plan_requests(pieces)
    wanted, covered = as_bytes(pieces, 400_000), as_bytes(requests, 400_000)
    assert not (wanted & ~covered).any()
    assert covered.sum() == (requests[:, 1] - requests[:, 0]).sum()
    assert (requests[:, 1] - requests[:, 0] <= 80_000).all()
    gaps = unite(pieces)
    gaps = gaps[1:, 0] - gaps[:-1, 1]
    assert covered.sum() - wanted.sum() == gaps[gaps <= 10_000].sum()


def test_what_was_asked_for_is_there_and_asked_for_once(url, small_requests):
    @settings(max_examples=60)
    @given(st.lists(RANGES, max_size=4))
    def check(calls):
        small_requests.clear()
        with Mirror(url, len(DATA)) as copy:
            for ranges in calls:
                begin, end = array(ranges).T
                copy.fetch(begin, end)
                content = np.fromfile(copy.path, np.uint8)
                assert len(content) == len(DATA)
                wanted = as_bytes(ranges)
                np.testing.assert_array_equal(
                    content[wanted], np.frombuffer(DATA, np.uint8)[wanted]
                )
            count = len(small_requests)
            for ranges in calls:
                copy.fetch(*array(ranges).T)
            assert len(small_requests) == count

    check()


def test_the_disk_holds_what_was_asked_for(url, small_requests):
    size = 1 << 30
    with Mirror(url, size) as copy:
        copy.fetch(np.array([0, 100_000]), np.array([10, 100_010]))
        assert os.path.getsize(copy.path) == size
        assert os.stat(copy.path).st_blocks * 512 <= 64 << 10
        assert len(small_requests) == 2
    assert not os.path.exists(copy.path)


def test_many_files_are_asked_at_the_same_time(small_requests, monkeypatch):
    folder = f"memory://{uuid.uuid4().hex}"
    urls = [f"{folder}/{i}" for i in range(10)]
    for i, url in enumerate(urls):
        fsspec.filesystem("memory").pipe_file(url, bytes([i]) * 5000)
    batches = []
    original = remote.read_ranges
    monkeypatch.setattr(remote, "read_ranges", lambda b: batches.append(len(b)) or original(b))
    mirrors = [Mirror(url, 5000) for url in urls]
    fetch([Wanted(m, np.array([4500, 0]), np.array([5000, 3])) for m in mirrors])
    assert batches == [10]
    for i, copy in enumerate(mirrors):
        with open(copy.path, "rb") as file:
            assert file.read() == bytes([i]) * 5000
        copy.close()


def test_a_file_that_has_become_shorter(url):
    with (
        Mirror(url, len(DATA) + 100_000) as copy,
        pytest.raises(StorageError, match=f"{url}.*ends at byte {len(DATA)}, where byte"),
    ):
        copy.fetch(len(DATA) - 10, len(DATA) + 90_000)
