"""Where samples lie, as arrays: whoever reads the bytes there gets what `Hierarchy.read` gives."""

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lz4.block
import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from dlio.data.concatenation import ConcatReader
from dlio.data.flow import Flow
from dlio.data.reader import open_reader
from dlio.data.reader_contract import Reader, abilities_of
from dlio.data.replicas import ReplicatedReader
from dlio.data.schema import IMAGE_LABEL
from dlio.data.selection import SelectionReader
from dlio.storage import tier as tier_module
from dlio.storage.block import ENTRY, BlockInfo, encode_block
from dlio.storage.block_tables import BlockTables
from dlio.storage.hierarchy import Hierarchy
from dlio.storage.sample_locations import SampleLocations
from dlio.storage.tier import LostTier, Tier
from dlio.storage.tier_spec import TierSpec
from dlio.util.shared_folders import SHARED_MEMORY
from dlio_staging.pack_folder import pack
from tests.conftest import in_time
from tests.storage.test_hierarchy import MemoryReader, N

Make = Callable[..., Hierarchy]
EACH = 10
BLOCKS = N // EACH
EVERY = np.arange(N, dtype=np.int64)


class Compressible(MemoryReader):
    """A source in memory with ten samples in each block, most of which can be compressed."""

    def __init__(self) -> None:
        super().__init__()
        self.payloads = [
            IMAGE_LABEL.join({"image": os.urandom(k % 50) + bytes(40 * (k % 9)), "label": k})
            for k in range(N)
        ]
        self.sizes = np.array([len(payload) for payload in self.payloads], np.int64)
        starts = np.arange(0, N + 1, EACH, dtype=np.int64)
        self.layout = type(self.layout)(starts, self.layout.order)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Make hierarchies over tiers of these kinds, as different processes of a node open them."""
    made: list[Hierarchy] = []
    job = f"test-{secrets.token_hex(4)}"

    def hierarchy(
        kinds: Sequence[str], pinned: npt.NDArray[np.int8], reader: Reader | None = None
    ) -> Hierarchy:
        reader = reader or Compressible()
        tiers = [_tier(kind, tmp_path, f"{job}.{k}", reader) for k, kind in enumerate(kinds)]
        made.append(Hierarchy(reader, tiers, pinned))
        return made[-1]

    yield hierarchy
    for each in made:
        each.close()


def _tier(kind: str, folder: Path, name: str, reader: Reader) -> Tier:
    if kind == "ram":
        return Tier(TierSpec("ram", SHARED_MEMORY, 1 << 20), name, fingerprint=reader.fingerprint)
    spec = TierSpec("disk", str(folder), 1 << 20)
    return Tier(spec, "d", name, fingerprint=reader.fingerprint)


def _pinned(*numbers: int) -> npt.NDArray[np.int8]:
    """Home of each block; the numbers repeat."""
    return np.resize(np.array(numbers, np.int8), BLOCKS)


def _publish(tier: Tier, reader: Reader, block: int, *, compress: bool = False) -> None:
    pieces = encode_block(
        reader.read(reader.layout.samples_of(block)),
        block=block,
        fingerprint=reader.fingerprint,
        schema=reader.schema,
        compress=compress,
    )
    tier.publish(block, pieces)


def _fill(hierarchy: Hierarchy) -> None:
    for block in np.flatnonzero(hierarchy.pinned >= 0).tolist():
        assert hierarchy.block_fetcher.fill(block)


def _locate(hierarchy: Hierarchy, samples: npt.NDArray[np.int64] = EVERY) -> SampleLocations:
    return hierarchy.locate(samples, *hierarchy.reader.layout.locate(samples))


def _known(hierarchy: Hierarchy) -> set[int]:
    """Blocks of which samples are known; those of a block are all known, or none is."""
    known = _locate(hierarchy).known
    blocks = hierarchy.reader.layout.block_of(EVERY)
    here = set(blocks[known].tolist())
    assert here.isdisjoint(blocks[~known].tolist())
    return here


def _payload(located: SampleLocations, row: int) -> bytes:
    """Read a sample as a reader outside of Python does. Raises FileNotFoundError."""
    descriptor, block = int(located.column("descriptor")[row]), int(located.column("block")[row])
    if block >= 0:
        descriptor = os.open(f"{block:08d}.blk", os.O_RDONLY, dir_fd=descriptor)
    try:
        stored = os.pread(
            descriptor, int(located.column("stored")[row]), int(located.column("offset")[row])
        )
    finally:
        if block >= 0:
            os.close(descriptor)
    raw = int(located.column("raw")[row])
    if len(stored) != raw:
        stored = lz4.block.decompress(stored, uncompressed_size=raw)
    digests = located.column("digest").view(np.uint64)
    assert xxhash.xxh3_64_intdigest(stored) == int(digests[row])
    return bytes(stored)


def _check_all(hierarchy: Hierarchy, samples: npt.NDArray[np.int64] = EVERY) -> SampleLocations:
    """Check that all of some samples are known, and that each lies where it is said to."""
    located = _locate(hierarchy, samples)
    assert located.known.all()
    for row, sample in enumerate(samples.tolist()):
        payload, kind = hierarchy.read_one(sample)
        assert _payload(located, row) == bytes(payload)
        number = int(located.column("tier")[row])
        assert kind == ("source" if number < 0 else hierarchy.tiers[number].kind)
    return located


# Tiers


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_each_row_is_that_of_its_block_s_table(make: Make, kind: str, compress: bool) -> None:
    hierarchy = make([kind], _pinned(0))
    tier, reader = hierarchy.tiers[0], hierarchy.reader
    for block in range(BLOCKS):
        _publish(tier, reader, block, compress=compress)
    _fill(hierarchy)
    samples = np.random.default_rng(0).permutation(np.concatenate([EVERY, EVERY[:50]]))
    located = _check_all(hierarchy, samples)
    blocks, places = reader.layout.locate(samples)
    assert (located.column("block") == blocks).all()
    assert (located.column("descriptor") == tier.folder).all()
    assert (located.column("regular") == (kind == "disk")).all()
    assert (located.column("tier") == 0).all()
    assert located.column("checked").all()
    assert located.files == [tier.holder]
    assert ((located.column("stored") < located.column("raw")).mean() > 0.5) == compress
    for row, (block, place) in enumerate(zip(blocks.tolist(), places.tolist(), strict=True)):
        ours = [int(located.column(name)[row]) for name in ("offset", "stored", "raw")]
        digest = int(located.column("digest").view(np.uint64)[row])
        assert (*ours, digest) == tier.check(block).table[place].item()


def test_a_tier_that_could_not_be_opened_has_no_samples(make: Make, tmp_path: Path) -> None:
    reader = Compressible()
    lost = LostTier(TierSpec("disk", str(tmp_path), 1 << 20), "lost")
    with Hierarchy(
        reader, [lost, _tier("disk", tmp_path, "n", reader)], _pinned(0, 1)
    ) as hierarchy:
        assert all(hierarchy.block_fetcher.fill(block) for block in range(1, BLOCKS, 2))
        assert _known(hierarchy) == set(range(1, BLOCKS, 2))


def test_an_empty_batch_has_no_rows(make: Make) -> None:
    hierarchy = make(["ram"], _pinned(0))
    assert len(_locate(hierarchy, EVERY[:0]).known) == 0


def test_samples_of_two_tiers_are_known_and_those_of_none_are_not(make: Make) -> None:
    hierarchy = make(["ram", "disk"], _pinned(-1, 0, 1))
    assert _known(hierarchy) == set()  # Nothing has come, and nothing is brought.
    assert hierarchy.missing() == (hierarchy.pinned >= 0).sum()
    _fill(hierarchy)
    blocks = hierarchy.reader.layout.block_of(EVERY)
    homes = hierarchy.pinned[blocks]
    assert (_locate(hierarchy).known == (homes >= 0)).all()
    located = _check_all(hierarchy, EVERY[homes >= 0])
    assert (located.column("tier") == homes[homes >= 0]).all()
    assert (located.column("regular") == (located.column("tier") == 1)).all()


def test_a_block_is_read_from_a_faster_tier_than_its_own_and_moved_from_a_slower(
    make: Make,
) -> None:
    hierarchy = make(["ram", "disk"], _pinned(0, 1))
    for block, number in ((0, 1), (1, 0)):
        _publish(hierarchy.tiers[number], hierarchy.reader, block)
        assert hierarchy.block_fetcher.place(block) == number
    assert _known(hierarchy) == {1}
    located = _locate(hierarchy, hierarchy.reader.layout.samples_of(1))
    assert (located.column("tier") == 0).all()


def test_streamed_blocks_are_known_while_they_are_there(make: Make, tmp_path: Path) -> None:
    hierarchy = make(["disk"], _pinned(0, -1))
    hierarchy.targets.add_stream_tier(
        _tier("ram", tmp_path, f"test-{secrets.token_hex(4)}", hierarchy.reader)
    )
    hierarchy.targets.stream(np.arange(BLOCKS) < 4, lambda block: False)
    _fill(hierarchy)
    assert all(hierarchy.block_fetcher.fill(block) for block in (1, 3))
    assert not hierarchy.block_fetcher.fill(5)  # In no tier.
    assert _known(hierarchy) == {*range(0, BLOCKS, 2), 1, 3}
    located = _check_all(hierarchy, hierarchy.reader.layout.samples_of(3))
    assert (located.column("tier") == 1).all()
    assert not located.column("regular").any()
    hierarchy.drop_streamed(3)
    assert 3 not in _known(hierarchy)
    assert hierarchy.block_fetcher.fill(3)
    _check_all(hierarchy, hierarchy.reader.layout.samples_of(3))


def test_a_removed_block_is_unknown_until_it_is_brought_again(make: Make) -> None:
    hierarchy = make(["disk"], _pinned(0))
    _fill(hierarchy)
    located = _check_all(hierarchy)
    (Path(hierarchy.tiers[0].path) / "00000002.blk").unlink()
    sample = int(hierarchy.reader.layout.samples_of(2)[0])
    with pytest.raises(FileNotFoundError):
        _payload(located, sample)
    hierarchy.failed(np.array([2, 2]))
    assert 2 not in _known(hierarchy)
    for _ in range(3):  # The first time from the source, as the block was not looked for.
        hierarchy.read_one(sample)
    assert 2 in _known(hierarchy)
    _check_all(hierarchy)


def test_a_block_with_a_damaged_table_is_unknown_until_it_is_healed(make: Make) -> None:
    hierarchy = make(["disk"], _pinned(0))
    _fill(hierarchy)
    path = Path(hierarchy.tiers[0].path) / "00000003.blk"
    data = bytearray(path.read_bytes())
    data[int(hierarchy.tiers[0].check(3).table["offset"][0]) - 30] ^= 1
    path.write_bytes(data)
    assert _known(hierarchy) == set(range(BLOCKS)) - {3}
    hierarchy.read_one(int(hierarchy.reader.layout.samples_of(3)[0]))
    assert hierarchy.counters.healed == 1
    assert hierarchy.block_fetcher.fill(3)
    _check_all(hierarchy)


def test_a_place_that_a_block_does_not_have_is_unknown(make: Make) -> None:
    hierarchy = make(["ram"], _pinned(0))
    _fill(hierarchy)
    blocks, places = np.array([4, 4, BLOCKS - 1]), np.array([EACH, EACH - 1, EACH])
    assert hierarchy.locate(EVERY[:3], blocks, places).known.tolist() == [False, True, False]


@pytest.mark.parametrize("share", [0, 0.3, 0.5, 1])
def test_as_many_reads_are_checked_as_of_single_reads(
    make: Make, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    monkeypatch.setenv("DLIO_CHECK", str(share))
    hierarchy = make(["disk"], _pinned(0))
    _fill(hierarchy)
    tier = hierarchy.tiers[0]
    checked: list[bool] = []
    for k in range(0, N, 100):  # Single reads in between are counted with them.
        checked += _locate(hierarchy, EVERY[k : k + 100]).column("checked").tolist()
        tier.read(0, 0)
        checked.append(int(tier.hits * share) != int((tier.hits - 1) * share))
    assert tier.hits == len(checked) == N + 4
    assert sum(checked) == int(len(checked) * share)
    every_second = share == 0.5
    assert not every_second or checked == [False, True] * (len(checked) // 2)


def test_what_failed_is_checked_by_the_next_read_whatever_the_share(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLIO_CHECK", "0.01")
    hierarchy = make(["disk"], _pinned(0))
    _fill(hierarchy)
    path = Path(hierarchy.tiers[0].path) / "00000005.blk"
    data = bytearray(path.read_bytes())
    located = _locate(hierarchy, hierarchy.reader.layout.samples_of(5)[-1:])
    last = int(located.column("offset")[0])
    data[last] ^= 1
    path.write_bytes(data)
    sample = int(hierarchy.reader.layout.samples_of(5)[-1])
    assert hierarchy.reader.read(np.array([sample]))[0] != bytes(hierarchy.read_one(sample)[0])
    hierarchy.failed(np.array([5]))
    assert hierarchy.reader.read(np.array([sample]))[0] == bytes(hierarchy.read_one(sample)[0])
    assert hierarchy.counters.healed == 1


def test_a_block_that_another_process_wrote_anew_is_read_by_its_own_table(make: Make) -> None:
    one, two = (make(["disk"], _pinned(0)) for _ in range(2))
    _fill(one)
    before = _check_all(one)
    two.tiers[0].discard(1)
    _publish(two.tiers[0], two.reader, 1, compress=True)
    one.failed(np.array([1]))
    rows = one.reader.layout.samples_of(1)
    assert (_check_all(one).column("stored")[rows] < before.column("stored")[rows]).any()
    assert one.counters.healed == 0


def test_samples_that_the_first_batch_holds_are_unknown(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    hierarchy = make(["ram"], _pinned(0))
    _fill(hierarchy)
    early = hierarchy.block_fetcher._early
    early.put(7, b"x")
    early.expect([9])
    assert np.flatnonzero(~_locate(hierarchy).known).tolist() == [7, 9]
    early.give_up()
    early.drop([7])
    assert _locate(hierarchy).known.all()


def test_samples_that_were_expected_are_unknown_until_they_are_taken(
    make: Make, tmp_path: Path
) -> None:
    reader = Compressible()
    with Hierarchy(
        reader, [_tier("disk", tmp_path, "n", reader)], _pinned(0, -1), flow=Flow(4)
    ) as hierarchy:
        home = EVERY[hierarchy.pinned[reader.layout.block_of(EVERY)] >= 0]
        hierarchy.fetcher.expect(home)
        assert in_time(lambda: hierarchy.missing() == 0)
        assert not _locate(hierarchy).known.any()
        for sample in home.tolist():
            hierarchy.read_one(sample)
        hierarchy.fetcher.pace(0)  # Lets go of those that were taken.
        assert in_time(lambda: bool(_locate(hierarchy, home).known.all()))
        _check_all(hierarchy, home)


# Tables


def test_tables_are_bounded_and_always_right(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_module, "_TABLE_BYTES", 24 * EACH * 7)
    hierarchy = make(["disk"], _pinned(0))
    _fill(hierarchy)
    few = np.concatenate([hierarchy.reader.layout.samples_of(block) for block in range(5)])
    for _ in range(2):
        _check_all(hierarchy, few)
    # More than there is room for.
    _check_all(hierarchy)
    _check_all(hierarchy, few)
    assert sum(hierarchy.tiers[0]._tables.get(block) is not None for block in range(BLOCKS)) <= 7


def test_tables_are_found_as_they_were_added() -> None:
    random = np.random.default_rng(1)
    tables = BlockTables(24 * 3000)
    model: dict[int, int] = {}
    for step in range(2000):
        block = int(random.integers(300))
        if step % 3 == 0:
            tables.drop(block)
            model.pop(block, None)
        else:
            count = int(random.integers(1, 40))
            given = _info(count, digest=step)
            assert tables.add(block, given).table.tolist() == given.table.tolist()
            model[block] = step
            # All others may have gone.
            model = {each: k for each, k in model.items() if tables.get(each) is not None}
        if step % 50 == 0:
            here, entries = tables.find(np.arange(1000), EVERY[:1].repeat(1000), lambda _: None)
            assert np.flatnonzero(here).tolist() == sorted(model)
            assert entries["xxh3"][here].tolist() == [model[block] for block in sorted(model)]
            kept = [info for each in model if (info := tables.get(each)) is not None]
            assert sum(map(len, kept)) <= 3000
    assert len(model) > 5
    assert tables.add(7, _info(5000)).table.shape == (5000,)  # One is kept, however large.
    assert tables.get(7) is not None
    with pytest.raises(ValueError, match="read-only"):
        tables.add(8, _info(1)).table["raw"] = 0
    tables.clear()
    assert not tables.find(np.arange(9), EVERY[:9], lambda _: None)[0].any()


def _info(count: int, digest: int = 0) -> BlockInfo:
    """A block's header and table, each entry with this checksum."""
    table = np.zeros(count, ENTRY)
    table["xxh3"] = digest
    return BlockInfo("memory", 0, 0, "00" * 16, IMAGE_LABEL, 0, 0, table)


def test_batches_are_located_while_others_add_and_drop_tables(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_module, "_TABLE_BYTES", 24 * EACH * 15)
    hierarchy = make(["ram"], _pinned(0))
    _fill(hierarchy)
    tier, reader = hierarchy.tiers[0], hierarchy.reader
    assert isinstance(reader, Compressible)
    digests = np.array([xxhash.xxh3_64_intdigest(each) for each in reader.payloads], np.uint64)

    def disturb(seed: int) -> None:
        for block in np.random.default_rng(seed).integers(BLOCKS, size=500).tolist():
            tier.read(block, 0)
            if block % 5 == 0:
                tier.suspect(block)

    with ThreadPoolExecutor(2) as pool:
        tasks = [pool.submit(disturb, seed) for seed in range(2)]
        while not all(task.done() for task in tasks):
            located = _locate(hierarchy)
            assert (
                located.column("digest").view(np.uint64)[located.known] == digests[located.known]
            ).all()
            assert located.known.any()
        for task in tasks:
            task.result()


def test_a_forked_child_locates_samples_as_its_parent_does(make: Make) -> None:
    hierarchy = make(["ram", "disk"], _pinned(0, 1))
    _fill(hierarchy)
    _locate(hierarchy, EVERY[: N // 2])
    child = os.fork()
    if child == 0:
        code = 2
        try:
            _check_all(hierarchy)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    _check_all(hierarchy)


# Sources


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set in several shards, some of whose samples are compressed."""
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    for k in range(90):
        folder = tmp_path / "source" / "ab"[k % 2]
        folder.mkdir(parents=True, exist_ok=True)
        image = os.urandom(2000) if k % 3 else bytes(20000)
        (folder / f"{k}.jpg").write_bytes(image + os.urandom(k))
    packed = tmp_path / "packed"
    pack(str(tmp_path / "source"), str(packed), shard_bytes=1 << 15, compress="lz4")
    assert len(list(packed.glob("*.dlio"))) > 2
    return packed


def _over(reader: Reader, tiers: Sequence[Tier] = (), flow: Flow | None = None) -> Hierarchy:
    return Hierarchy(reader, tiers, np.full(reader.layout.blocks, -1, np.int8), flow=flow)


def _all_of(reader: Reader) -> npt.NDArray[np.int64]:
    return np.arange(len(reader), dtype=np.int64)


def test_samples_of_local_shards_are_known_without_a_tier(shards: Path) -> None:
    reader = open_reader(str(shards))
    with _over(reader) as hierarchy:
        located = _check_all(hierarchy, np.random.default_rng(0).permutation(_all_of(reader)))
        assert len(set(located.column("descriptor").tolist())) == len(list(shards.glob("*.dlio")))
        assert len(located.files) == len(set(located.column("descriptor").tolist()))
        assert (located.column("tier") == -1).all()
        assert (located.column("block") == -1).all()
        assert located.column("checked").all()
        assert not located.column("regular").any()
        assert (located.column("stored") < located.column("raw")).any()
        assert (located.column("stored") == located.column("raw")).any()
    reader.close()


def test_files_stay_open_for_as_long_as_they_are_referred_to(shards: Path) -> None:
    reader = open_reader(str(shards))
    with _over(reader) as hierarchy:
        located = _locate(hierarchy, _all_of(reader))
    wanted = [bytes(payload) for payload in reader.read(_all_of(reader))]
    reader.close()
    assert [_payload(located, row) for row in range(len(wanted))] == wanted
    descriptor = int(located.column("descriptor")[0])
    del located
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(descriptor)


def test_a_block_that_another_job_left_in_a_tier_is_read_there(
    shards: Path, tmp_path: Path
) -> None:
    reader = open_reader(str(shards))
    tier = _tier("disk", tmp_path, "n", reader)
    _publish(tier, reader, 1)
    with _over(reader, [tier]) as hierarchy:
        samples = _all_of(reader)
        home = reader.layout.block_of(samples) == 1
        assert (_locate(hierarchy, samples).known == ~home).all()  # It is looked for by this.
        located = _check_all(hierarchy, samples)
        assert (located.column("tier") == np.where(home, 0, -1)).all()
        assert (located.column("block") == np.where(home, 1, -1)).all()


def test_samples_that_shards_cannot_give_are_unknown(shards: Path) -> None:
    reader = open_reader(str(shards))
    samples = _all_of(reader)
    files = sorted(shards.glob("*.dlio"))
    first = np.flatnonzero(reader.layout.block_of(samples) == 0)
    with files[0].open("r+b") as file:
        file.seek(50)
        file.write(b"damaged")
    with _over(reader) as hierarchy:
        assert np.flatnonzero(~_locate(hierarchy, samples).known).tolist() == first.tolist()
    reader.close()
    files[1].unlink()
    with _over(reader) as hierarchy:
        known = _locate(hierarchy, samples).known
    assert 0 < known.sum() < len(samples) - len(first)
    reader.close()


def test_remote_shards_and_requests_with_a_latency_are_unknown(shards: Path) -> None:
    import fsspec

    fsspec.filesystem("memory").put(str(shards), "/located", recursive=True)
    remote, local = open_reader("memory://located"), open_reader(str(shards))
    for hierarchy in (_over(remote), _over(local, flow=Flow(2))):
        with hierarchy:
            assert not _locate(hierarchy, _all_of(local)).known.any()
    local.close()


def test_readers_of_several_sources_locate_nothing(shards: Path) -> None:
    copies = [open_reader(str(shards)) for _ in range(2)]
    for reader in (
        ReplicatedReader(copies),
        ConcatReader(copies),
        SelectionReader(copies, EVERY[:5] % 2, EVERY[:5]),
    ):
        assert abilities_of(reader).locate is None
    locate = abilities_of(SelectionReader(copies[:1], EVERY[:5] * 0, EVERY[5:10])).locate
    whole = abilities_of(copies[0]).locate
    assert locate is not None
    assert whole is not None
    own = EVERY[:5]
    view = locate(own, own, own)
    source = whole(EVERY[5:10], *copies[0].layout.locate(EVERY[5:10]))
    assert view.known.all()
    assert view.offset.tolist() == source.offset.tolist()
    for each in copies:
        each.close()
