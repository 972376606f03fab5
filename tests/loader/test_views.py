"""Views: `where`, `split` and `map`."""

import itertools
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import dlio
from dlio.errors import UsageError
from dlio.image import decoder
from dlio.loader.dataset_views import field_values
from dlio.plan.order import Order

_N = 120


class _Patients(torch.utils.data.Dataset[Any]):
    """Samples of twelve patients."""

    def __init__(self, count: int = _N) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return {
            "age": index % 50,
            "weight": index / 2,
            "patient": f"p{index % 12}",
            "scan": torch.full((3,), index),
        }


@pytest.fixture
def patients() -> Iterator[dlio.Dataset]:
    with dlio.open(_Patients(), tiers="ram:8MiB") as data:
        yield data


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.drawn import draw_once

    root = tmp_path_factory.mktemp("views") / "pictures"
    draw_once(root, images=60, validation=2, classes=3)
    return root / "train"


def _ages(data: Any) -> list[int]:
    return [data[k]["age"] for k in range(len(data))]


@pytest.mark.parametrize("rows", [8, 4, 2, 1])
def test_where_finds_nan_whatever_the_row_groups_are(rows: int, tmp_path: Path) -> None:
    # pyarrow's own filters do not: findings/pyarrow-filters-lose-nan-by-row-groups.sh.
    nan = float("nan")
    table = pa.table({"x": [1.0, 2.0, 3.0, nan, 6.0, 7.0, 8.0, nan], "row": range(8)})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=rows)
    with dlio.open(tmp_path / "x.parquet") as data:
        for wanted, expected in (
            (np.isnan, [3, 7]),
            (lambda x: x != 3, [0, 1, 3, 4, 5, 6, 7]),
            (lambda x: ~(x <= 5), [3, 4, 5, 6, 7]),
        ):
            view = data.where("x", wanted)
            assert [int(view[k]["row"]) for k in range(len(view))] == expected


@pytest.mark.parametrize(
    ("field", "wanted", "expected"),
    [
        ("age", lambda ages: ages > 40, lambda s: s["age"] > 40),
        ("age", lambda age: 3 < age < 9, lambda s: 3 < s["age"] < 9),
        ("age", 7, lambda s: s["age"] == 7),
        ("age", [7, 9], lambda s: s["age"] in (7, 9)),
        ("age", range(5), lambda s: s["age"] < 5),
        ("weight", lambda w: w >= 50.5, lambda s: s["weight"] >= 50.5),
        ("patient", "p3", lambda s: s["patient"] == "p3"),
        ("patient", lambda p: p.startswith("p1"), lambda s: s["patient"].startswith("p1")),
        ("patient", {"p1", "p2"}, lambda s: s["patient"] in ("p1", "p2")),
        (
            "scan",
            lambda scan: int(scan.sum()) % 2 == 0,
            lambda s: True if s is None else s["scan"].sum() % 2 == 0,
        ),
    ],
)
def test_where_keeps_what_the_predicate_wants_in_order(
    patients: dlio.Dataset, field: str, wanted: Any, expected: Callable[[Any], Any]
) -> None:
    view = patients.where(field, wanted)
    plain = _Patients()
    want = [k for k in range(_N) if expected(plain[k])]
    assert [int(view[k]["scan"][0]) for k in range(len(view))] == want
    with dlio.DataLoader(view, 7, shuffle=True) as loader:
        assert "engine='planned'" in repr(loader)
        seen = [int(scan[0]) for batch in loader for scan in batch["scan"]]
        assert sorted(seen) == want
        list(loader)
        assert loader.stats()["bytes"]["source"] == 0


def test_views_of_views_and_their_pickles(patients: dlio.Dataset) -> None:
    view = patients.where("patient", "p3").where("age", lambda ages: ages < 30)
    again = pickle.loads(pickle.dumps(view))
    assert _ages(view) == _ages(again) != []
    assert all(age < 30 for age in _ages(view))


def test_labels_and_classes_come_from_the_index(
    pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dlio.open(str(pictures), image_size=16) as data:
        monkeypatch.setattr(data.reader, "read", lambda samples: pytest.fail("was read"))
        ones = data.where("label", 1)
        named = data.where("class", data.classes[1])
        assert set(ones.targets) == set(named.targets) == {1}
        assert len(ones) == len(named) == data.targets.count(1)
        assert ones.classes == data.classes


def test_no_image_is_decoded_for_another_field(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dlio_staging.pack_folder import pack

    pack(str(pictures), str(tmp_path / "packed"))
    with dlio.open(str(tmp_path / "packed"), image_size=None) as data:
        monkeypatch.setattr(decoder, "decode_whole", lambda *_: pytest.fail("was decoded"))
        assert set(np.asarray(field_values(data.reader, "label")).tolist()) == {0, 1, 2}
        with pytest.raises(UsageError, match="is an image"):
            data.where("image", lambda image: True)


def test_a_view_of_a_container_reads_each_chunk_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "chunks.h5"
    with h5py.File(path, "w") as file:
        values = np.arange(4000 * 64, dtype=np.float32).reshape(4000, 64)
        file.create_dataset("values", data=values, chunks=(100, 64), compression="gzip")
        file.create_dataset("label", data=np.arange(4000) % 7, chunks=(100,))
    with dlio.open(str(path), tiers="ram:16MiB") as data:
        view = data.where("label", 3)
        blocks = data.reader.layout.block_of
        layout = view.reader.layout
        assert not view.reader.objects
        chosen = np.flatnonzero(np.arange(4000) % 7 == 3)
        turns = [blocks(chosen[layout.samples_of(k)]) for k in range(layout.blocks)]
        order = list(itertools.chain.from_iterable(part.tolist() for part in turns))
        assert order == sorted(order)
        with dlio.DataLoader(view, 32, shuffle=True) as loader:
            rows = torch.cat([batch["values"][:, 0] for batch in loader])
        assert sorted(rows.tolist()) == values[chosen, 0].tolist()


def test_parts_are_disjoint_complete_and_about_as_large_as_asked(patients: dlio.Dataset) -> None:
    with dlio.open(_Patients(3000), tiers="none") as data:
        parts = data.split(train=0.8, val=0.15, test=0.05)
        assert list(parts) == ["train", "val", "test"]
        scans = {name: [int(p[k]["scan"][0]) for k in range(len(p))] for name, p in parts.items()}
        assert sorted(itertools.chain(*scans.values())) == list(range(3000))
        for name, fraction in (("train", 0.8), ("val", 0.15), ("test", 0.05)):
            # Five standard deviations of a binomial.
            assert abs(len(parts[name]) - 3000 * fraction) < 5 * (3000 * fraction) ** 0.5
        other = data.split(seed=1, train=0.8, val=0.15, test=0.05)
        assert len(other["val"]) != len(parts["val"]) or _ages(other["val"]) != _ages(parts["val"])


def test_a_split_stays_when_the_data_set_grows_and_in_other_processes() -> None:
    with dlio.open(_Patients(300)) as small, dlio.open(_Patients(500)) as large:
        before = small.split(train=0.7, val=0.3)["val"]
        after = large.split(train=0.7, val=0.3)["val"]
        kept = [int(after[k]["scan"][0]) for k in range(len(after))]
        assert [k for k in kept if k < 300] == [
            int(b["scan"][0]) for b in map(before.__getitem__, range(len(before)))
        ]
    code = (
        "from dlio.loader.dataset_views import split\n"
        "from tests.loader.test_views import _Patients\n"
        "import dlio\nd = dlio.open(_Patients(300))\n"
        "print(split(d.reader, None, 0, {'train': 0.7, 'val': 0.3})['val'].tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([k for k in kept if k < 300])


@pytest.mark.parametrize("by", ["patient", "name"])
def test_groups_stay_together(patients: dlio.Dataset, by: str) -> None:
    key: Any = by if by == "patient" else lambda name: int(name.split("[")[1][:-1]) % 12
    parts = patients.split(by=key, train=0.6, val=0.4)
    groups = [{p[k]["patient"] for k in range(len(p))} for p in parts.values()]
    assert not groups[0] & groups[1]
    assert len(groups[0] | groups[1]) == 12


def test_a_function_of_samples_is_called_for_each_use(pictures: Path) -> None:
    calls: list[int] = []

    def invert(sample: Any) -> Any:
        calls.append(1)
        image, label = sample
        return {"image": 255 - image, "class": label}

    with dlio.open(str(pictures), image_size=16, tiers="ram:32MiB") as data:
        mapped = data.map(invert)
        data.set_epoch(1)
        mapped.set_epoch(1)
        assert torch.equal(mapped[5]["image"], 255 - data[5][0])
        with (
            dlio.DataLoader(mapped, 8, shuffle=True, seed=0) as loader,
            dlio.DataLoader(data, 8, shuffle=True, seed=0) as plain,
        ):
            for epoch in range(2):
                calls.clear()
                for batch, (images, labels) in zip(loader, plain, strict=True):
                    assert torch.equal(batch["image"], 255 - images), epoch
                    assert torch.equal(batch["class"], labels)
                assert len(calls) == 60
            assert loader.stats()["engine"] == "planned"
            assert loader.stats()["bytes"]["source"] == 0
        twice = mapped.map(lambda sample: sample["class"] + 10)
        assert twice[5] == data[5][1] + 10
        assert len(twice.where("label", 1)) == data.targets.count(1)
        assert twice.where("label", 1)[0] == 11


def test_a_kept_function_is_called_once_a_sample() -> None:
    calls: dict[int, int] = dict.fromkeys(range(_N), 0)

    def scaled(sample: Any) -> Any:
        calls[int(sample["scan"][0])] += 1
        return {"scan": sample["scan"].float() / 10, "age": sample["age"]}

    with dlio.open(_Patients(), tiers="ram:8MiB", image_size=None) as data:
        kept = data.map(scaled, kept=True)
        probed = {k for k, count in calls.items() if count}
        assert len(probed) <= 16  # Their results tell the fields, and are kept.
        for count in calls:
            calls[count] = 0
        with kept, dlio.DataLoader(kept, 10, shuffle=True) as loader:
            for _ in range(3):
                rows = torch.cat([batch["scan"] for batch in loader])
                assert sorted(rows[:, 0].tolist()) == (torch.arange(_N) / 10).tolist()
                assert kept.mounted is not None
                filler = kept.mounted.fill(Order(_N, 0))
                assert filler is None or filler.join(60)
            assert calls == {sample: sample not in probed for sample in calls}


def test_kept_results_of_different_sizes_and_of_pictures(pictures: Path) -> None:
    with dlio.open(str(pictures), image_size=None) as data:
        kept = data.map(
            lambda sample: (sample["image"][:, :: sample["label"] + 1], f"n{sample['label']}"),
            kept=True,
        )
        image, text = kept[3]
        assert torch.equal(image, data[3]["image"][:, :: data[3]["label"] + 1])
        assert text == f"n{data[3]['label']}"
        assert kept.targets == data.targets


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d: d.where("aeg", 1), "did you mean"),
        (lambda d: d.where(3, 1), "give its name"),
        (lambda d: d.where("age", 400), "none of the 120 samples"),
        (lambda d: d.split(train=0.9), "name two parts"),
        (lambda d: d.split(train=0.9, val=0.3), "sum to 1.2"),
        (lambda d: d.split(train=1.0, val=0.0), "give a fraction"),
        (lambda d: d.split(train="most", val=0.1), "give a fraction"),
        (lambda d: d.split(train=0.99999, val=0.00001), "val=1e-05 of 120 samples"),
        (lambda d: d.split(by="nothing", train=0.5, val=0.5), "field 'nothing'"),
        (lambda d: d.split(by=lambda name: {}, train=0.5, val=0.5), "give numbers, text"),
        (lambda d: d.map(None), "give a function"),
        (lambda d: d.map(3), "function"),
        (lambda d: d.map(len, kept="yes"), "kept"),
    ],
)
def test_arguments_that_cannot_work_are_refused_in_one_line(
    patients: dlio.Dataset, call: Callable[[Any], object], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        call(patients)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_random_crops_and_random_results_are_not_kept(pictures: Path) -> None:
    with dlio.open(str(pictures), image_size=16) as data:
        with pytest.raises(UsageError, match="crops are random"):
            data.map(lambda sample: sample, kept=True)
        with pytest.raises(UsageError, match="crops are random"):
            data.map(lambda sample: sample).map(lambda sample: sample, kept=True)
    with dlio.open(_Patients()) as plain, pytest.raises(UsageError, match="different values"):
        plain.map(lambda sample: {"noise": torch.rand(3)}, kept=True)
    with (
        dlio.open(str(pictures), image_size=16, tiers="ram:8MiB,ram:8MiB:decoded") as data,
        pytest.raises(UsageError, match="leave :decoded out"),
    ):
        data.map(lambda sample: sample)


def test_views_of_mixtures_are_refused_and_mixtures_of_views_work(patients: dlio.Dataset) -> None:
    parts = patients.split(train=0.5, val=0.5)
    mixed = dlio.mix({name: (part, 1) for name, part in parts.items()}, image_size=None)
    with dlio.DataLoader(mixed, 10, shuffle=True) as loader:
        for batch in itertools.islice(loader, 3):
            owners = mixed.source_of(loader.last_samples)
            assert np.bincount(owners).tolist() == [5, 5]
            assert len(batch["age"]) == 10
    with pytest.raises(UsageError, match="views have no weights"):
        mixed.where("age", 3)
    with pytest.raises(UsageError, match="views have no weights"):
        mixed.split(a=0.5, b=0.5)
    with pytest.raises(UsageError, match="map the mixture"):
        dlio.mix([(patients.map(lambda sample: sample), 1)], image_size=None)
    doubled: Any = mixed.map(lambda sample: sample["age"] * 2)
    with dlio.DataLoader(doubled, 10, shuffle=True) as loader:
        ages = next(iter(loader))
        assert ages.tolist() == [2 * mixed[int(k)]["age"] for k in loader.last_samples]
        assert np.bincount(mixed.source_of(loader.last_samples)).tolist() == [5, 5]
