"""A bounded run of what fuzz.py runs for long: the same targets and seeds, without coverage."""

from __future__ import annotations

import random

import fuzz
import pytest
from fuzz_seeds import seeds
from fuzz_targets import TARGETS, Violation, check

# Times in which an input that is damaged at random is read; the slow targets get fewer.
NUM_MUTATIONS = {"archive": 100, "mutated": 100, "labels": 100}


def mutate(data, rng):
    """Changes, removes or repeats some bytes, most of them near the beginning or the end."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        near = rng.choice([16, 64, len(data)])
        at = min(rng.randrange(near + 1), len(data))
        at = len(data) - at if rng.random() < 0.3 else at
        match rng.randrange(5):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                data[at : at + 4] = bytes([rng.choice([0, 1, 127, 128, 255])]) * 4
            case 2:
                del data[at : at + rng.randint(1, 9)]
            case 3:
                data[at:at] = data[at : at + rng.randint(1, 40)]
            case 4:
                data[at : at + 1] = bytes([data[at] ^ 1 << rng.randrange(8)]) if data[at:] else b""
    return bytes(data)


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_and_their_mutations(name, tmp_path):
    rng = random.Random(name)
    starts = seeds(name)
    for data in rng.sample(starts, min(len(starts), 20)):
        check(TARGETS[name], data, tmp_path)
    for _ in range(NUM_MUTATIONS.get(name, 250)):
        check(TARGETS[name], mutate(rng.choice(starts), rng), tmp_path)


def test_the_fuzzer_knows_all_targets():
    assert list(TARGETS) == list(fuzz.TARGETS)


@pytest.mark.parametrize("data", [b"", b"\0", b"\xff" * 40])
@pytest.mark.parametrize("name", TARGETS)
def test_next_to_nothing(name, data, tmp_path):
    check(TARGETS[name], data, tmp_path)


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_read(name, tmp_path):
    """A target that refuses all its seeds would test nothing."""
    results = []
    for data in seeds(name)[:12]:
        try:
            results.append(TARGETS[name](data, tmp_path))
        except ValueError:
            continue
    assert any(result > 0 for result in results)


def test_allocations_are_noticed(tmp_path):
    with pytest.raises(Violation, match="bytes allocated for 3 bytes, 0 of results"):
        check(lambda data, folder: len(bytes(10_000_000)) * 0, b"abc", tmp_path)
    with pytest.raises(ZeroDivisionError):
        check(lambda data, folder: 1 // 0, b"abc", tmp_path)
