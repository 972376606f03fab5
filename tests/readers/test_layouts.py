"""Layouts of published data sets are read as their own users read them, at first try.

The layouts are made by code (`dlio_docs.layouts`); the right values come from the rules of
torchvision's classes, or from the libraries that the data sets are read with.
"""

import io
import json
import logging
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from dlio_docs.layouts import LAYOUTS
from PIL import Image

import dlio
from dlio.cli.ls import describe
from dlio.data.reader import open_reader
from dlio.data.reader_contract import Reader
from dlio.errors import DlioError, SourceError, UsageError


def _fields(reader: Reader, sample: int) -> dict[str, Any]:
    (payload,) = reader.read(np.array([sample], np.int64))
    return dict(reader.schema.split(payload))


def _classes_by_name(reader: Reader) -> dict[str, str]:
    """Return the class of each picture, by the last part of its name."""
    return {
        reader.name(k).rpartition("/")[2]: reader.classes[label]
        for k, label in enumerate(reader.labels.tolist())
    }


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_no_layout_loses_labels_or_splits_in_silence(name: str, tmp_path: Path) -> None:
    LAYOUTS[name](tmp_path)
    said = ""
    try:
        about = describe(str(tmp_path))
    except DlioError as error:
        said = str(error)
    if said:
        # One line that says how to open it: by a split, or a folder.
        assert "split=" in said or "open one of them" in said
        assert "damaged" not in said
        return
    labelled = about["classes"] or any(kind != "image" for _, kind in about["schema"])
    assert labelled or any("labels of" in text for text in about["left_out"])


def _pets_of_torchvision(root: Path, split: str) -> dict[str, str]:
    """Return the class of each picture by the rule of torchvision's OxfordIIITPet, whose class
    names are titles: its labels are the numbers in the list less 1."""
    classes = {}
    for line in (root / "annotations" / f"{split}.txt").read_text().splitlines():
        stem = line.split(" ")[0]
        classes[f"{stem}.jpg"] = stem.rsplit("_", 1)[0]
    return classes


@pytest.mark.parametrize("split", ["trainval", "test"])
def test_oxford_pets_have_the_classes_of_their_lists(split: str, tmp_path: Path) -> None:
    LAYOUTS["Oxford-IIIT Pets"](tmp_path)
    reader = open_reader(str(tmp_path), split=split)
    assert _classes_by_name(reader) == _pets_of_torchvision(tmp_path, split)
    # Numbers in the list, less 1, and not in alphabetical order.
    assert list(reader.classes) == ["Abyssinian", "american_bulldog", "Bengal"]
    with pytest.raises(UsageError, match=r"trainval \(6\), test \(3\).*split='trainval'"):
        open_reader(str(tmp_path))


def test_oxford_pets_have_masks_by_split(tmp_path: Path) -> None:
    LAYOUTS["Oxford-IIIT Pets"](tmp_path)
    reader = open_reader(str(tmp_path), format="masks", split="test")
    assert len(reader) == 3
    for k in range(3):
        stem = Path(reader.name(k)).stem
        own = (tmp_path / f"annotations/trimaps/{stem}.png").read_bytes()
        assert bytes(_fields(reader, k)["mask"]) == own
    said = describe(str(tmp_path), split="test")["left_out"]
    assert any("format='masks'" in text for text in said)


def test_pictures_opened_without_their_lists_say_where_the_labels_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    LAYOUTS["Oxford-IIIT Pets"](tmp_path)
    assert len(open_reader(str(tmp_path / "images"))) == 9
    assert "labels of" in caplog.text
    assert "annotations" in caplog.text


def test_train_alone_is_not_taken_for_trainval(tmp_path: Path) -> None:
    LAYOUTS["class folders of splits"](tmp_path)
    with pytest.raises(UsageError, match="trainval"):
        open_reader(str(tmp_path), split="trainval")


@pytest.mark.parametrize(("split", "mark"), [("train", "1"), ("test", "0")])
def test_cub_has_the_splits_of_its_numbers(split: str, mark: str, tmp_path: Path) -> None:
    LAYOUTS["CUB-200-2011"](tmp_path)

    def column(name: str) -> dict[str, str]:
        lines = (tmp_path / name).read_text().splitlines()
        return dict(line.split(" ", 1) for line in lines)

    files, labels = column("images.txt"), column("image_class_labels.txt")
    classes, splits = column("classes.txt"), column("train_test_split.txt")
    right = {f"images/{files[k]}": classes[labels[k]] for k in files if splits[k] == mark}
    reader = open_reader(str(tmp_path), split=split)
    made = {reader.name(k): reader.classes[n] for k, n in enumerate(reader.labels.tolist())}
    assert made == right
    assert list(reader.classes) == list(classes.values())
    # The folder of pictures has all, in class folders of the same numbers.
    whole = open_reader(str(tmp_path / "images"))
    assert (len(whole), list(whole.classes)) == (len(files), list(classes.values()))


def test_masks_of_cityscapes_are_its_label_ids(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    LAYOUTS["Cityscapes"](tmp_path)
    with pytest.raises(SourceError, match=r"train, val: choose one with split='train'"):
        open_reader(str(tmp_path))
    reader = open_reader(str(tmp_path), split="train")
    assert "instanceIds" in caplog.text  # Left out, with the option that chooses it.
    assert len(reader) == 4
    for k in range(4):
        name = reader.name(k)
        mask = name.replace("leftImg8bit/", "gtFine/", 1)
        mask = mask.replace("_leftImg8bit.png", "_gtFine_labelIds.png")
        assert bytes(_fields(reader, k)["mask"]) == (tmp_path / mask).read_bytes()
    other = open_reader(str(tmp_path), split="val", mask_suffix="_gtFine_color.png")
    assert len(other) == 2
    named = open_reader(
        str(tmp_path), format="masks", images="leftImg8bit", masks="gtFine", split="val"
    )
    assert [named.name(k) for k in range(2)] == [other.name(k) for k in range(2)]


def test_a_picture_without_its_mask_of_a_suffix_is_named(tmp_path: Path) -> None:
    LAYOUTS["Cityscapes"](tmp_path)
    stem = "bochum_000001_000019"
    (tmp_path / f"gtFine/train/bochum/{stem}_gtFine_labelIds.png").unlink()
    with pytest.raises(SourceError, match=rf"1 of 4 pictures.*{stem}_leftImg8bit"):
        open_reader(str(tmp_path), split="train")


def test_masks_of_two_folders_that_are_named(tmp_path: Path) -> None:
    for k in range(3):
        for folder, suffix in (("Input", ".png"), ("Truth", "_segmentation.png")):
            (tmp_path / folder).mkdir(exist_ok=True)
            Image.new("L", (4, 4), k).save(tmp_path / folder / f"ISIC_{k}{suffix}")
    reader = open_reader(str(tmp_path), format="masks", images="Input", masks="Truth")
    for k in range(3):
        mask = Image.open(io.BytesIO(bytes(_fields(reader, k)["mask"])))
        assert np.asarray(mask).max() == int(Path(reader.name(k)).stem[-1])


@pytest.mark.parametrize("split", ["train", "val"])
def test_coco_has_the_boxes_of_pycocotools(split: str, tmp_path: Path) -> None:
    LAYOUTS["COCO"](tmp_path)
    judge = pytest.importorskip("pycocotools.coco").COCO(
        str(tmp_path / f"annotations/instances_{split}2017.json")
    )
    reader = open_reader(str(tmp_path), split=split)
    assert len(reader) == len(judge.getImgIds())
    for k in range(len(reader)):
        fields = _fields(reader, k)
        notes = judge.loadAnns(judge.getAnnIds(imgIds=[int(fields["image_id"])]))
        boxes = [[x, y, x + w, y + h] for x, y, w, h in (note["bbox"] for note in notes)]
        assert np.asarray(fields["boxes"]).tolist() == boxes
        labels = np.asarray(fields["box_labels"]).tolist()
        assert labels == [note["category_id"] for note in notes]
        kinds = judge.loadCats(labels)
        assert [reader.classes[n] for n in labels] == [kind["name"] for kind in kinds]


def test_lvis_is_read_from_its_root_and_with_pictures_elsewhere(tmp_path: Path) -> None:
    LAYOUTS["LVIS"](tmp_path / "coco")
    judge = json.loads((tmp_path / "coco/lvis_v1_train.json").read_text())
    right = [row["coco_url"].rpartition(".org/")[2] for row in judge["images"]]
    reader = open_reader(str(tmp_path / "coco"), split="train")
    assert [reader.name(k) for k in range(len(reader))] == right
    assert reader.classes[1:] == ["aerosol_can", "air_conditioner"]
    (tmp_path / "lvis").mkdir()
    for name in ("lvis_v1_train.json", "lvis_v1_val.json"):
        (tmp_path / "coco" / name).rename(tmp_path / "lvis" / name)
    apart = open_reader(str(tmp_path / "lvis/lvis_v1_train.json"), pictures="../coco")
    assert [apart.name(k) for k in range(len(apart))] == right
    with pytest.raises(SourceError, match="pictures="):
        open_reader(str(tmp_path / "lvis/lvis_v1_train.json"))


@pytest.mark.parametrize("split", ["train", "val", "test"])
@pytest.mark.parametrize("name", ["pathmnist", "chestmnist"])
def test_medmnist_has_the_members_of_a_split(name: str, split: str, tmp_path: Path) -> None:
    LAYOUTS["MedMNIST"](tmp_path)
    reader = open_reader(str(tmp_path / f"{name}.npz"), split=split)
    with np.load(tmp_path / f"{name}.npz") as judge:
        images, labels = judge[f"{split}_images"], judge[f"{split}_labels"]
    assert len(reader) == len(images)
    for k in range(len(reader)):
        fields = _fields(reader, k)
        assert (np.asarray(fields["images"]) == images[k]).all()
        assert (np.asarray(fields["labels"]) == labels[k]).all()
    single = labels.shape[1] == 1
    assert reader.labels.tolist() == (labels[:, 0].tolist() if single else [0] * len(labels))
    with pytest.raises(UsageError, match=r"train, val, test.*split='train'"):
        open_reader(str(tmp_path / f"{name}.npz"))


def test_labels_of_arrays_that_are_named_with_their_split(tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", x_train=np.zeros((3, 2)), y_train=np.arange(3), x_test=np.ones(2))
    reader = open_reader(f"{tmp_path}/m.npz::x_train,y_train")
    assert reader.labels.tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", ["npz", "h5", "zarr"])
def test_names_of_arrays_say_their_splits_in_all_formats(kind: str, tmp_path: Path) -> None:
    arrays = {
        f"{part}_{split}": np.full(count, count)
        for split, count in (("train", 4), ("test", 2))
        for part in ("x", "y")
    }
    path = tmp_path / f"a.{kind}"
    if kind == "npz":
        np.savez(path, **arrays)  # type: ignore[arg-type]
    elif kind == "h5":
        with h5py.File(path, "w") as file:
            for name, values in arrays.items():
                part, split = name.split("_")
                file[f"{split}/{part}"] = values
    else:
        store = zarr.open_group(path, mode="w")
        for name, values in arrays.items():
            store.create_array(name, data=values)
    for split, count in (("train", 4), ("test", 2)):
        reader = open_reader(str(path), split=split)
        assert reader.labels.tolist() == [count] * count
        assert [name for name, _ in reader.schema.fields] == ["x", "y"]
    with pytest.raises(UsageError, match=r"train, test.*split='train'"):
        open_reader(str(path))
    with pytest.raises(UsageError, match="val"):
        open_reader(str(path), split="val")
    if kind != "zarr":
        assert len(open_reader(str(path), split="all")) == 6


@pytest.mark.parametrize(("split", "own"), [("train", "train"), ("val", "valid"), ("test", "test")])
def test_pcam_joins_its_two_files(split: str, own: str, tmp_path: Path) -> None:
    LAYOUTS["PCAM"](tmp_path)
    reader = open_reader(str(tmp_path), split=split)
    judge = []
    for part in "xy":
        name = f"camelyonpatch_level_2_split_{own}_{part}.h5"
        with h5py.File(tmp_path / name) as file:
            judge.append(file[part][...])
    assert reader.labels.tolist() == judge[1].reshape(-1).tolist()
    for k in range(len(reader)):
        assert (np.asarray(_fields(reader, k)["x"]) == judge[0][k]).all()


def test_files_of_inputs_and_targets_that_do_not_match_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "X_train.npy", np.ones((3, 2)))
    np.save(tmp_path / "y_train.npy", np.arange(3))
    reader = open_reader(str(tmp_path))
    assert [name for name, _ in reader.schema.fields] == ["x", "y"]
    assert reader.labels.tolist() == [0, 1, 2]
    np.save(tmp_path / "y_train.npy", np.arange(4))
    with pytest.raises(UsageError, match="differ in rows"):
        open_reader(str(tmp_path))


def test_parquet_of_the_hub(tmp_path: Path) -> None:
    LAYOUTS["Parquet of the Hub"](tmp_path / "one")
    LAYOUTS["Parquet of the Hub, configurations"](tmp_path / "two")
    reader = open_reader(str(tmp_path / "one"), split="train")
    values = [int(_fields(reader, k)["x"]) for k in range(len(reader))]
    assert values == [0, 1, 2, 10, 11, 12]
    with pytest.raises(UsageError, match=r"en \(parquet\), fr \(parquet\): open one"):
        open_reader(str(tmp_path / "two"), split="train")
    other = open_reader(str(tmp_path / "two/fr"), split="test")
    assert [int(_fields(other, k)["x"]) for k in range(3)] == [100, 101, 102]


@pytest.mark.parametrize("name", ["OME-Zarr 0.4", "OME-Zarr 0.5"])
def test_an_ome_zarr_is_one_sample_of_full_resolution(name: str, tmp_path: Path) -> None:
    LAYOUTS[name](tmp_path)
    judge = zarr.open_group(tmp_path / "image.zarr", mode="r")
    image, mask = judge["0"], judge["labels/nuclei/0"]
    assert isinstance(image, zarr.Array)
    assert isinstance(mask, zarr.Array)
    for path in (tmp_path, tmp_path / "image.zarr"):
        reader = open_reader(str(path))
        assert len(reader) == 1
        fields = _fields(reader, 0)
        assert (np.asarray(fields["image"]) == np.asarray(image[...])).all()
        assert (np.asarray(fields["label"]) == np.asarray(mask[...])).all()
    with dlio.open(str(tmp_path / "image.zarr"), patch=(2, 8, 8), tiers="none") as data:
        assert data[0]["image"].shape == (2, 2, 8, 8)
    # A level by its name is an array of rows.
    assert len(open_reader(f"{tmp_path}/image.zarr::1")) == 2


def test_a_plate_of_ome_zarr_has_a_sample_for_each_field_of_view(tmp_path: Path) -> None:
    LAYOUTS["plate of OME-Zarr"](tmp_path)
    reader = open_reader(str(tmp_path / "plate.zarr"))
    assert [reader.name(k) for k in range(len(reader))] == ["A/1/0", "A/2/0", "B/1/0"]
    values = [np.asarray(_fields(reader, k)["image"]).max().item() for k in range(3)]
    assert values == [0, 10, 20]
    assert len(open_reader(str(tmp_path / "plate.zarr/A/1"))) == 1
    assert len(open_reader(str(tmp_path / "plate.zarr/A/1/0"))) == 1


@pytest.mark.parametrize("path", ["../other/0", "/0", "A//0"])
def test_metadata_of_ome_zarr_do_not_lead_elsewhere(path: str, tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=2)
    group.create_array("0", data=np.zeros((2, 2)))
    group.attrs["multiscales"] = [{"datasets": [{"path": path}]}]
    with pytest.raises(SourceError, match="leads out of it"):
        open_reader(str(tmp_path / "a.zarr"))
    group.attrs["multiscales"] = [{"datasets": [{"path": "7"}]}]
    with pytest.raises(SourceError, match="lacks 7"):
        open_reader(str(tmp_path / "a.zarr"))
    group.attrs["multiscales"] = [{"datasets": 5}]
    with pytest.raises(SourceError, match="list no datasets"):
        open_reader(str(tmp_path / "a.zarr"))


def test_a_decathlon_task_is_its_pairs_and_its_tests(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nibabel = pytest.importorskip("nibabel")
    root = tmp_path / "Task09_Spleen"
    LAYOUTS["Medical Decathlon"](root)
    card = json.loads((root / "dataset.json").read_text())
    judge = {Path(row["image"]).name: row for row in card["training"]}
    reader = open_reader(str(root))
    assert "2 files of imagesTs, which split='test' reads" in caplog.text
    assert {Path(reader.name(k)).name for k in range(len(reader))} == set(judge)
    for k in range(len(reader)):
        row, fields = judge[Path(reader.name(k)).name], _fields(reader, k)
        for name in ("image", "label"):
            right = np.asarray(nibabel.load(root / row[name]).dataobj)
            assert (np.asarray(fields[name]) == right).all()
    caplog.clear()
    tests = open_reader(str(root), split="test")
    names = [f"./{tests.name(k)}" for k in range(len(tests))]
    assert sorted(names) == sorted(card["test"])
    assert not caplog.text


@pytest.mark.parametrize("split", ["train", "test"])
def test_food101_has_the_splits_of_its_lists(split: str, tmp_path: Path) -> None:
    LAYOUTS["Food-101"](tmp_path)
    judge = json.loads((tmp_path / f"meta/{split}.json").read_text())
    classes = sorted(judge)
    reader = open_reader(str(tmp_path), split=split)
    assert list(reader.classes) == classes
    right = {f"{stem.rpartition('/')[2]}.jpg": n for n, stems in judge.items() for stem in stems}
    assert _classes_by_name(reader) == right


def test_tiny_imagenet_has_labels_in_each_split_that_has_some(tmp_path: Path) -> None:
    LAYOUTS["Tiny ImageNet"](tmp_path)
    train = open_reader(str(tmp_path), split="train")
    assert train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    lines = (tmp_path / "val/val_annotations.txt").read_text().splitlines()
    right = {line.split("\t")[0]: line.split("\t")[1] for line in lines}
    for reader in (open_reader(str(tmp_path), split="val"), open_reader(str(tmp_path / "val"))):
        assert _classes_by_name(reader) == right
    test = open_reader(str(tmp_path), split="test")
    assert (len(test), test.schema.fields) == (2, (("image", "image"),))


def test_kaggle_tables_give_the_labels_of_names_without_suffix(tmp_path: Path) -> None:
    LAYOUTS["train.csv of Kaggle"](tmp_path)
    reader = open_reader(str(tmp_path), split="train")
    right = {"a0.jpg": "beagle", "a1.jpg": "pug", "a2.jpg": "pug", "a3.jpg": "beagle"}
    assert _classes_by_name(reader) == right
    test = open_reader(str(tmp_path), split="test")
    assert test.schema.fields == (("image", "image"),)
    with pytest.raises(UsageError, match=r"train \(4\), test \(2\)"):
        open_reader(str(tmp_path))


def test_a_table_with_several_columns_asks_for_the_label(tmp_path: Path) -> None:
    LAYOUTS["train.csv of Kaggle"](tmp_path)
    rows = [f"a{k},male,{'ab'[k % 2]}" for k in range(4)]
    (tmp_path / "train.csv").write_text("\n".join(["image_id,sex,dx", *rows]))
    with pytest.raises(UsageError, match=r"sex, dx.*table='train.csv', label='dx'"):
        open_reader(str(tmp_path), split="train")
    reader = open_reader(str(tmp_path), table="train.csv", label="dx")
    assert list(reader.classes) == ["a", "b"]
    assert reader.labels.tolist() == [0, 1, 0, 1]
    with pytest.raises(UsageError, match=r"label='age'.*sex, dx"):
        open_reader(str(tmp_path), table="train.csv", label="age")


def test_lists_that_name_missing_pictures_are_refused(tmp_path: Path) -> None:
    LAYOUTS["train.csv of Kaggle"](tmp_path)
    (tmp_path / "train/a2.jpg").unlink()
    with pytest.raises(SourceError, match=r"1 of its 4 pictures.*a2"):
        open_reader(str(tmp_path), split="train")
    LAYOUTS["train.csv of Kaggle"](tmp_path)
    (tmp_path / "train.csv").write_text("id,breed\na0,pug\na1,\na2,pug\na3,pug\n")
    chosen: list[dict[str, Any]] = [{"table": "train.csv"}, {"split": "train"}]
    for options in chosen:
        with pytest.raises(SourceError, match="a1 has no breed"):
            open_reader(str(tmp_path), **options)
    (tmp_path / "train.csv").write_text("id,breed\na0,pug\na1,pug,1\na2,pug\na3,pug\n")
    with pytest.raises(SourceError, match="row 2 has 3 of 2 values"):
        open_reader(str(tmp_path), split="train")


def test_pictures_that_no_list_names_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    LAYOUTS["Oxford-IIIT Pets"](tmp_path)
    Image.new("RGB", (4, 4)).save(tmp_path / "images/Bengal_191.jpg")
    assert len(open_reader(str(tmp_path), split="test")) == 3
    assert "1 file (images/Bengal_191.jpg) that they do not name" in caplog.text


def test_imagenet_of_kaggle_is_found_below_and_its_table_gives_labels(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    LAYOUTS["ImageNet of Kaggle"](tmp_path)
    train = open_reader(str(tmp_path), split="train")
    assert (len(train), list(train.classes)) == (6, ["n01440764", "n02017213"])
    caplog.clear()
    val = tmp_path / "ILSVRC/Data/CLS-LOC/val"
    open_reader(str(val.parent), split="val")
    assert "have no labels" in caplog.text
    table = str(tmp_path / "LOC_val_solution.csv")
    reader = open_reader(str(val), table=table, label="PredictionString")
    assert list(reader.classes) == ["n01440764", "n02017213"]
    assert reader.labels.tolist() == [1, 0]


def test_a_table_in_the_only_folder_is_found(tmp_path: Path) -> None:
    LAYOUTS["metadata.csv in the only folder"](tmp_path)
    reader = open_reader(str(tmp_path))
    assert reader.labels.tolist() == [0, 1, 0, 1]
    LAYOUTS["class folders"](tmp_path / "deep/images")
    inner = open_reader(str(tmp_path / "deep"))
    assert list(inner.classes) == ["cat", "dog"]


def test_labels_of_matlab_that_are_not_read_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    LAYOUTS["Flowers 102"](tmp_path)
    assert len(open_reader(str(tmp_path))) == 3
    assert "imagelabels.mat, which dlio does not read" in caplog.text


def test_a_list_that_changes_is_read_again(tmp_path: Path) -> None:
    LAYOUTS["train.csv of Kaggle"](tmp_path)
    before = open_reader(str(tmp_path), split="train")
    (tmp_path / "train.csv").write_text("id,breed\na0,pug\na1,pug\na2,pug\na3,beagle\n")
    after = open_reader(str(tmp_path), split="train")
    assert before.fingerprint != after.fingerprint
    assert after.labels.tolist() == [1, 1, 1, 0]


def test_a_stray_table_whose_rows_look_like_names_is_not_a_list(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    LAYOUTS["class folders"](tmp_path)
    (tmp_path / "results.csv").write_text("run,score\n1,3\n")
    with caplog.at_level(logging.WARNING):
        reader = open_reader(str(tmp_path))
    assert list(reader.classes) == ["cat", "dog"]
    assert "results.csv" in caplog.text


def _celeba(root: Path) -> None:
    (root / "img_align_celeba").mkdir()
    names = [f"{k:06}.jpg" for k in range(1, 7)]
    for name in names:
        Image.new("RGB", (4, 4)).save(root / "img_align_celeba" / name)
    marks = zip(names, "000122", strict=True)
    (root / "list_eval_partition.txt").write_text("".join(f"{n} {mark}\n" for n, mark in marks))
    rows = "".join(f"{name} {(-1) ** k:2d}  1\n" for k, name in enumerate(names))
    (root / "list_attr_celeba.txt").write_text(f"6\nMale Young\n{rows}")


def test_the_splits_of_celeba_are_no_labels(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _celeba(tmp_path)
    with pytest.raises(UsageError, match=r"splits train \(3\), validation \(1\), test \(2\)"):
        open_reader(str(tmp_path))
    reader = open_reader(str(tmp_path), split="train")
    assert [reader.name(k)[-5] for k in range(len(reader))] == ["1", "2", "3"]
    assert [name for name, _ in reader.schema.fields] == ["image"]
    assert "1 file (list_attr_celeba.txt), which may hold labels: choose one" in caplog.text
    text = (tmp_path / "list_eval_partition.txt").read_text().replace(" ", ",")
    (tmp_path / "list_eval_partition.txt").unlink()
    (tmp_path / "list_eval_partition.csv").write_text(f"image_id,partition\n{text}")
    assert len(open_reader(str(tmp_path), split="test")) == 2


def test_a_list_with_a_count_and_names_gives_the_label_that_is_chosen(tmp_path: Path) -> None:
    _celeba(tmp_path)
    with pytest.raises(UsageError, match=r"clearly the label \(Male, Young\)"):
        open_reader(str(tmp_path), table="list_attr_celeba.txt")
    chosen: dict[str, Any] = {"table": "list_attr_celeba.txt", "label": "Male"}
    assert open_reader(str(tmp_path), split="val", **chosen).labels.tolist() == [-1]
    (tmp_path / "list_eval_partition.txt").unlink()
    assert open_reader(str(tmp_path), **chosen).labels.tolist() == [1, -1] * 3


def test_arrays_of_several_rows_may_be_classes(tmp_path: Path) -> None:
    arrays = {"cat": np.zeros((2, 8, 8)), "dog": np.zeros((3, 8, 8))}
    np.savez(tmp_path / "x.npz", **arrays)  # type: ignore[arg-type]
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.update(arrays)
    for name in ("x.npz", "x.h5"):
        with pytest.raises(UsageError, match=r"if each is a class, store .* in another, label"):
            open_reader(str(tmp_path / name))


@pytest.mark.parametrize("others", [[], ["x"]])
def test_a_table_in_hdf5_has_a_remedy(others: list[str], tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["t"] = np.zeros(3, [("a", "i4"), ("b", "f4")])
        for name in others:
            file[name] = np.zeros((3, 2))
    rest = r", or name others, as in .*x\.h5::x$" if others else "$"
    with pytest.raises(UsageError, match=rf"store each of its columns as a data set{rest}"):
        open_reader(str(tmp_path / "x.h5"))
