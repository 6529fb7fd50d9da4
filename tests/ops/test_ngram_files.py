"""An n-gram index on disk: round trips and refused files."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import specdec_kernels as sd

HEAD, STATE, SLOTS = 64, 768, 2


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def full_index(max_tokens: int = 300) -> sd.NgramIndex:
    index = sd.NgramIndex(max_tokens, SLOTS, 500)
    rng = random.Random(5)
    for group in (0, 1, 0):
        index.insert(ints([rng.randrange(9) for _ in range(200)]), group=group)
    index.begin(1, private=True)
    index.insert(ints([1, 2, 3]), 1)
    return index


def drafts(index: sd.NgramIndex) -> list[list[int]]:
    rows = []
    for token in range(9):
        index.begin(0, group=1)
        index.insert(ints([token]), 0)
        tree, _, _ = index.draft(ints([0]), ints([0]), 12)
        rows.append(tree.tokens[0].tolist())
    return rows


def checksum(data: bytes) -> int:
    value = 0
    for (word,) in struct.iter_unpack("<Q", data):
        value = ((value ^ word) * 0x9E3779B97F4A7C15) % 2**64
        value ^= value >> 32
    return value


def sealed(data: bytes) -> bytes:
    """Return the file with checksums that match its content."""
    head = data[: HEAD - 16] + struct.pack("<Q", checksum(data[HEAD:]))
    return head + struct.pack("<Q", checksum(head)) + data[HEAD:]


def refusal(file: Path, data: bytes) -> str:
    file.write_bytes(data)
    with pytest.raises(ValueError) as error:
        sd.NgramIndex.load(file)
    return str(error.value)


def test_ngram_file_round_trip_is_exact(tmp_path: Path) -> None:
    index = full_index()
    index.save(tmp_path / "a")
    loaded = sd.NgramIndex.load(tmp_path / "a")
    assert loaded.num_bytes == index.num_bytes
    assert loaded.statistics[:5] == index.statistics[:5] and loaded.statistics.drafts == 0
    loaded.save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert drafts(loaded) == drafts(index)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_ngram_file_keeps_no_open_streams(tmp_path: Path) -> None:
    index = full_index()
    index.begin(0, request=4)
    index.insert(ints([1, 2, 3]), 0)
    index.save(tmp_path / "a")
    loaded = sd.NgramIndex.load(tmp_path / "a")
    assert loaded.draft(ints([0, 1]), ints([1, 1]), 4)[0].num_nodes.tolist() == [0, 0]
    loaded.begin(0, request=4)
    assert loaded.length(0) == 0
    assert index.draft(ints([0, 1]), ints([1, 1]), 4)[0].num_nodes.tolist() == [4, 4]


def test_ngram_file_loads_with_other_slot_count(tmp_path: Path) -> None:
    index = full_index()
    index.save(tmp_path / "a")
    loaded = sd.NgramIndex.load(tmp_path / "a", num_slots=9, max_len=4)
    assert drafts(loaded) == drafts(index)
    with pytest.raises(ValueError, match="takes slot 8 to 5 tokens, expected at most max_len=4"):
        loaded.insert(ints([1] * 5), 8)
    with pytest.raises(ValueError, match=r"^ngram_load: num_slots is 0, expected 1 to 65536$"):
        sd.NgramIndex.load(tmp_path / "a", num_slots=0)


def test_ngram_save_replaces_older_file_at_the_end(tmp_path: Path) -> None:
    file = tmp_path / "a"
    full_index().save(file)
    before = file.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            full_index(3000).save(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


def test_ngram_concurrent_saves_leave_one_whole_file(tmp_path: Path) -> None:
    """Threads and processes save to one path; the file is whole at every moment."""
    index, path = full_index(), tmp_path / "a"
    index.save(path)
    whole = path.read_bytes()

    def save_often() -> None:
        for _ in range(40):
            index.save(path)

    children = []
    for _ in range(2):
        if (child := os.fork()) == 0:
            status = 1
            with contextlib.suppress(BaseException):
                save_often()
                status = 0
            os._exit(status)
        children.append(child)
    with ThreadPoolExecutor(4) as pool:
        saves = [pool.submit(save_often) for _ in range(3)]
        while not all(save.done() for save in saves):
            assert path.read_bytes() == whole
        for save in saves:
            save.result()
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_ngram_save_keeps_symbolic_links(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "link", tmp_path / "there" / "index"
    link.symlink_to(target)
    for _ in range(2):  # the first time, the link's target does not exist
        full_index().save(link)
        assert link.is_symlink() and drafts(sd.NgramIndex.load(target)) == drafts(full_index())


def test_ngram_save_replaces_regular_files_only(tmp_path: Path) -> None:
    fifo, folder = tmp_path / "fifo", tmp_path / "folder"
    os.mkfifo(fifo)
    folder.mkdir()
    for path in (fifo, folder, Path("/dev/null")):
        with pytest.raises(ValueError) as error:
            full_index().save(path)
        assert str(error.value) == f"ngram_save: path is {str(path)!r}, expected a regular file, or nothing yet"
    assert fifo.is_fifo() and Path("/dev/null").is_char_device()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fifo", "folder"]


def test_ngram_files_report_paths_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        sd.NgramIndex.load(tmp_path / "none")
    with pytest.raises(IsADirectoryError):
        sd.NgramIndex.load(tmp_path)
    with pytest.raises(FileNotFoundError):
        full_index().save(tmp_path / "none" / "a")


def test_ngram_load_refuses_files_of_other_kinds(tmp_path: Path) -> None:
    file = tmp_path / "a"
    want = "ngram_load: file is no n-gram index, expected one that `save` wrote"
    assert refusal(file, b"") == refusal(file, b"sdngra") == refusal(file, b"PK\x03\x04" * 1000) == want
    full_index().save(file)
    data = file.read_bytes()
    other = data[:8] + struct.pack("<I", 3) + data[12:]
    assert refusal(file, other) == "ngram_load: file has version 3, expected version 2"


def test_ngram_load_refuses_truncated_files(tmp_path: Path) -> None:
    file = tmp_path / "a"
    full_index().save(file)
    data = file.read_bytes()
    assert refusal(file, data[:40]) == "ngram_load: file has 40 bytes, expected more: it is truncated"
    size = len(data)
    for cut in (HEAD, HEAD + 1, size // 2, size - 1):
        assert refusal(file, data[:cut]) == f"ngram_load: file has {cut} bytes, expected {size}: it is truncated"
    assert refusal(file, data + b"x") == f"ngram_load: file has {size + 1} bytes, expected {size}: something follows"


def test_ngram_load_detects_any_changed_byte(tmp_path: Path) -> None:
    file = tmp_path / "a"
    full_index().save(file)
    data = file.read_bytes()
    rng = random.Random(1)
    for at in [*range(HEAD), *(rng.randrange(HEAD, len(data)) for _ in range(200))]:
        changed = bytearray(data)
        changed[at] ^= 1 << rng.randrange(8)
        assert refusal(file, bytes(changed)).startswith("ngram_load: file "), at
    changed[at] = data[at]
    changed[-100] ^= 1
    assert refusal(file, bytes(changed)) == (
        "ngram_load: file has content that does not match its checksum, expected what `save` wrote: it is corrupt"
    )


def test_ngram_load_of_forged_content_stays_in_bounds(tmp_path: Path) -> None:
    """A forged file with valid checksums gives wrong drafts, but no access out of bounds."""
    file = tmp_path / "a"
    full_index().save(file)
    data = file.read_bytes()
    assert sealed(data) == data
    rng = random.Random(2)
    for _ in range(30):
        changed = bytearray(data)
        for _ in range(rng.choice([3, 300, 3000])):
            at = rng.randrange(HEAD + 8, len(data) - 4)
            value = rng.choice([rng.randbytes(4), b"\xff" * 4, bytes(4), struct.pack("<I", rng.randrange(1 << 14))])
            changed[at : at + 4] = value
        file.write_bytes(sealed(bytes(changed)))
        index = sd.NgramIndex.load(file)
        drafts(index)
        index.insert(torch.randint(0, 9, (1000,), dtype=torch.int32))
        drafts(index)
    for at, size in ((HEAD, 4), (HEAD + 4, 4)):  # the next block, the last stream
        changed = bytearray(data)
        changed[at : at + size] = b"\xff" * size
        assert "does not match its checksum" in refusal(file, sealed(bytes(changed)))
    for at in (16, 24, 32, 40):  # sizes
        for value in (0, -1, 7, 2**40, 2**62):
            changed = bytearray(data)
            struct.pack_into("<q", changed, at, value)
            if at in (16, 24) or not 0 < value < 2**31:
                assert refusal(file, sealed(bytes(changed))).startswith("ngram_load: "), (at, value)
