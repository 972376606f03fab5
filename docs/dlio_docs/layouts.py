"""Small copies of layouts that published data sets have, made by code from their descriptions.

Names of folders and files, columns, shapes and types are the published ones; pictures have a few
pixels, so that a pixel's red value tells which picture it is. Tests open them, and the table of
layouts in the documentation is made with them.
"""

import gzip
import io
import json
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

__all__ = ["LAYOUTS"]


def _picture(path: Path, red: int = 0, size: int = 8) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = {".jpg": "JPEG", ".jpeg": "JPEG"}.get(path.suffix.lower())
    Image.new("RGB", (size, size), (red, 0, 0)).save(path, kind)


def _mask(path: Path, value: int = 0, size: int = 8) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((size, size), value, np.uint8)).save(path)


def _text(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def class_folders(root: Path) -> None:
    """`<class>/*.jpg`, as torchvision's ImageFolder has them."""
    for k in range(6):
        _picture(root / ("cat" if k < 3 else "dog") / f"{k}.jpg", 40 * k)


def split_class_folders(root: Path) -> None:
    """`train/<class>/*.jpg` and `val/<class>/*.jpg`, and a table of other labels (Imagenette)."""
    for split, count in (("train", 3), ("val", 1)):
        for wnid in ("n01440764", "n02102040"):
            for k in range(count):
                _picture(root / split / wnid / f"{wnid}_{k}.JPEG", 40 * k)
    rows = [f"train/{w}/{w}_{k}.JPEG,{w},{w}" for w in ("n01440764", "n02102040") for k in range(3)]
    _text(root / "noisy_imagenette.csv", "path,noisy_labels_0,noisy_labels_1", *rows)


def stray_folders(root: Path) -> None:
    """Class folders with leftovers of systems, a contact sheet and an archive."""
    class_folders(root)
    for name in (".ipynb_checkpoints", "__MACOSX"):
        _picture(root / name / "0.jpg")
    _picture(root / "contact_sheet.jpg")
    (root / "n01.tar").write_bytes(b"\0" * 10240)


def metadata_table(root: Path) -> None:
    """`metadata.csv` of file_name and label next to the pictures of a folder."""
    for k in range(4):
        _picture(root / "images" / f"{k}.jpg", 40 * k)
    rows = [f"images/{k}.jpg,{'ab'[k % 2]}" for k in range(4)]
    _text(root / "metadata.csv", "file_name,label", *rows)


def inner_metadata_table(root: Path) -> None:
    """The same within the only folder."""
    for k in range(4):
        _picture(root / "images" / f"{k}.jpg", 40 * k)
    _text(root / "images/metadata.csv", "file_name,label", *[f"{k}.jpg,{k % 2}" for k in range(4)])


def kaggle_table(root: Path) -> None:
    """`train.csv` of id and class next to `train/` and `test/`, ids without a suffix."""
    for k in range(4):
        _picture(root / "train" / f"a{k}.jpg", 40 * k)
    for k in range(2):
        _picture(root / "test" / f"b{k}.jpg", 40 * k)
    breeds = ("beagle", "pug", "pug", "beagle")
    _text(root / "train.csv", "id,breed", *[f"a{k},{breeds[k]}" for k in range(4)])
    _text(root / "sample_submission.csv", "id,breed", "b0,pug", "b1,pug")


def oxford_pets(root: Path) -> None:
    """Oxford-IIIT Pets: pictures, lists of splits with labels, trimaps and boxes."""
    breeds = ("Abyssinian", "american_bulldog", "Bengal")
    species = (1, 2, 1)
    rows = {}
    for breed, name in enumerate(breeds):
        for k in range(3):
            stem = f"{name}_{k + 1}"
            _picture(root / "images" / f"{stem}.jpg", 60 * breed + 10 * k)
            _mask(root / "annotations/trimaps" / f"{stem}.png", 1 + k)
            (root / "annotations/trimaps" / f"._{stem}.png").write_bytes(b"\0\5\26\7")
            _text(root / "annotations/xmls" / f"{stem}.xml", "<annotation></annotation>")
            rows[stem] = f"{stem} {breed + 1} {species[breed]} 1"
    _text(root / "annotations/list.txt", "#Image CLASS-ID SPECIES BREED ID", *rows.values())
    _text(root / "annotations/trainval.txt", *[r for s, r in rows.items() if s[-1] != "3"])
    _text(root / "annotations/test.txt", *[r for s, r in rows.items() if s[-1] == "3"])
    _text(root / "annotations/README", "Annotations of the pictures")
    (root / "images/Abyssinian_100.mat").write_bytes(b"MATLAB 5.0 MAT-file" + b" " * 109)


def cub(root: Path) -> None:
    """CUB-200-2011: class folders, and lists by the numbers of pictures."""
    names = ("001.Black_footed_Albatross", "002.Laysan_Albatross", "003.Sooty_Albatross")
    pictures = []
    for label, name in enumerate(names):
        for k in range(3):
            file = f"{name}/{name[4:]}_{k:04d}_{796100 + k}.jpg"
            _picture(root / "images" / file, 60 * label + 10 * k)
            pictures.append((file, label + 1, int(k < 2)))
    numbered = list(enumerate(pictures, 1))
    _text(root / "images.txt", *[f"{k} {file}" for k, (file, _, _) in numbered])
    _text(root / "image_class_labels.txt", *[f"{k} {label}" for k, (_, label, _) in numbered])
    _text(root / "train_test_split.txt", *[f"{k} {train}" for k, (_, _, train) in numbered])
    _text(root / "classes.txt", *[f"{k} {name}" for k, name in enumerate(names, 1)])
    _text(root / "bounding_boxes.txt", *[f"{k} 1.0 1.0 5.0 5.0" for k, _ in numbered])
    _text(root / "attributes/image_attribute_labels.txt", "1 1 0 3 27.708")
    _text(root / "attributes/certainties.txt", "1 not visible")
    _text(root / "parts/part_locs.txt", "1 1 0.0 0.0 0")
    _text(root / "README", "The Caltech-UCSD Birds-200-2011 Dataset")


def cityscapes(root: Path) -> None:
    """Cityscapes: `leftImg8bit` and `gtFine`, by split and city."""
    for split, city in (("train", "aachen"), ("train", "bochum"), ("val", "frankfurt")):
        for k in range(2):
            stem = f"{city}_{k:06d}_000019"
            _picture(root / "leftImg8bit" / split / city / f"{stem}_leftImg8bit.png", 40 * k)
            base = root / "gtFine" / split / city
            _mask(base / f"{stem}_gtFine_labelIds.png", 7 + k)
            Image.fromarray(np.full((8, 8), 26001, np.uint16)).save(
                base / f"{stem}_gtFine_instanceIds.png"
            )
            Image.new("RGBA", (8, 8), (128, 64, 128, 255)).save(base / f"{stem}_gtFine_color.png")
            _text(base / f"{stem}_gtFine_polygons.json", '{"objects": []}')


def coco(root: Path) -> None:
    """COCO 2017: pictures of two splits, instances, captions and keypoints."""
    categories = [{"id": 1, "name": "person"}, {"id": 3, "name": "car"}]
    for number, split in enumerate(("train2017", "val2017")):
        images, notes = [], []
        for k in range(3 - number):
            name = f"{9 + k + 10 * number:012d}.jpg"
            _picture(root / split / name, 40 * k, 32)
            images.append({"id": 9 + k, "file_name": name, "height": 32, "width": 32})
            note = {"id": k + 1, "image_id": 9 + k, "category_id": 1 + 2 * (k % 2), "iscrowd": 0}
            box = {"bbox": [1.0, 2.0, 10.0, 20.0], "area": 200.0}
            notes.append({**note, **box, "segmentation": [[1, 2, 11, 2, 11, 22, 1, 22]]})
        whole: dict[str, Any] = {"info": {}, "licenses": [], "images": images}
        captions = [{"image_id": 9, "id": 1, "caption": "a thing"}]
        person = {**categories[0], "keypoints": ["nose", "left_eye", "right_eye"]}
        poses = [{**n, "keypoints": [3, 4, 2] * 3, "num_keypoints": 3} for n in notes[::2]]
        for file, rows, kinds in (
            ("instances", notes, categories),
            ("captions", captions, []),
            ("person_keypoints", poses, [person]),
        ):
            extra = {"annotations": rows, **({"categories": kinds} if kinds else {})}
            text = json.dumps({**whole, **extra})
            _text(root / "annotations" / f"{file}_{split}.json", text)


def lvis(root: Path) -> None:
    """LVIS v1: pictures of COCO's folders, by `coco_url`."""
    for split, folders in (
        ("train", ["train2017", "train2017", "val2017"]),
        ("val", ["train2017"]),
    ):
        images, notes = [], []
        for k, folder in enumerate(folders):
            number = 100 + k + 50 * (split == "val")
            _picture(root / folder / f"{number:012d}.jpg", 40 * k, 32)
            url = f"http://images.cocodataset.org/{folder}/{number:012d}.jpg"
            row = {"id": number, "coco_url": url, "height": 32, "width": 32}
            images.append({**row, "neg_category_ids": [], "not_exhaustive_category_ids": []})
            shape = {"segmentation": [[1, 2, 11, 2, 11, 22, 1, 22]], "area": 200.0}
            note = {"id": k + 1, "image_id": number, "category_id": 1 + k % 2}
            notes.append({**note, "bbox": [1.0, 2.0, 10.0, 20.0], **shape})
        kinds = [
            {"id": k, "name": name, "synset": f"{name}.n.01", "frequency": "c"}
            for k, name in ((1, "aerosol_can"), (2, "air_conditioner"))
        ]
        whole: dict[str, Any] = {"info": {}, "annotations": notes, "images": images, "licenses": []}
        _text(root / f"lvis_v1_{split}.json", json.dumps({**whole, "categories": kinds}))


def voc(root: Path) -> None:
    """Pascal VOC 2012: `Annotations` of all pictures, lists of splits, masks of one picture."""
    base = root / "VOCdevkit" / "VOC2012"
    stems = [f"2008_{k:06d}" for k in range(5)]
    edges = "<xmin>1</xmin><ymin>3</ymin><xmax>10</xmax><ymax>20</ymax>"
    for k, stem in enumerate(stems):
        _picture(base / "JPEGImages" / f"{stem}.jpg", 40 * k, 32)
        name = ("dog", "person", "cat")[k % 3]
        flags = f"<truncated>0</truncated><difficult>{k % 2}</difficult>"
        _text(
            base / "Annotations" / f"{stem}.xml",
            f"<annotation><folder>VOC2012</folder><filename>{stem}.jpg</filename>",
            "<size><width>32</width><height>32</height><depth>3</depth></size>",
            f"<object><name>{name}</name>{flags}<bndbox>{edges}</bndbox></object></annotation>",
        )
    for folder in ("SegmentationClass", "SegmentationObject"):
        _mask(base / folder / f"{stems[1]}.png", 15, 32)
    lists = base / "ImageSets"
    for split, own in (("train", stems[:3]), ("val", stems[3:]), ("trainval", stems)):
        _text(lists / "Main" / f"{split}.txt", *own)
        _text(lists / "Main" / f"dog_{split}.txt", *[f"{stem} -1" for stem in own])
        _text(lists / "Segmentation" / f"{split}.txt", stems[1])


def mnist(root: Path) -> None:
    """MNIST as torchvision leaves it: four IDX files, and the archives that they came in."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for split, count in (("train", 6), ("t10k", 3)):
        for part, data in (
            ("images-idx3", bytes([0, 0, 8, 3, 0, 0, 0, count, 0, 0, 0, 4, 0, 0, 0, 4])),
            ("labels-idx1", bytes([0, 0, 8, 1, 0, 0, 0, count])),
        ):
            rows = bytes(16 * count) if part == "images-idx3" else bytes(range(count))
            (raw / f"{split}-{part}-ubyte").write_bytes(data + rows)
            (raw / f"{split}-{part}-ubyte.gz").write_bytes(gzip.compress(data + rows, mtime=0))


def medmnist(root: Path) -> None:
    """MedMNIST: members of one archive by split; labels of shape (N, 1), or several a picture."""
    root.mkdir(parents=True, exist_ok=True)
    for name, shape, width, classes in (
        ("pathmnist", (28, 28, 3), 1, 9),
        ("chestmnist", (28, 28), 14, 2),
    ):
        members = {}
        for split, count in (("train", 6), ("val", 3), ("test", 2)):
            pictures = np.arange(count, dtype=np.uint8).reshape(-1, *[1] * len(shape))
            members[f"{split}_images"] = np.broadcast_to(pictures, (count, *shape)).copy()
            numbers = np.arange(count * width, dtype=np.uint8).reshape(count, width)
            members[f"{split}_labels"] = numbers % classes
        with zipfile.ZipFile(root / f"{name}.npz", "w") as archive:
            for member, values in members.items():
                with archive.open(f"{member}.npy", "w") as stream:
                    np.lib.format.write_array(stream, values)


def pcam(root: Path) -> None:
    """PatchCamelyon: pictures and labels in files of their own, by split."""
    import h5py

    root.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", 5), ("valid", 3), ("test", 2)):
        start = root / f"camelyonpatch_level_2_split_{split}"
        pictures = np.arange(count, dtype=np.uint8).reshape(-1, 1, 1, 1)
        for part, values in (
            ("x", np.broadcast_to(pictures, (count, 96, 96, 3))),
            ("y", (np.arange(count, dtype=np.uint8) % 2).reshape(-1, 1, 1, 1)),
        ):
            with h5py.File(f"{start}_{part}.h5", "w") as file:
                file.create_dataset(part, data=values, chunks=(1, *values.shape[1:]))
        rows = [f"{k},0,0,False,False,camelyon16_train_normal_001" for k in range(count)]
        header = ",coord_y,coord_x,tumor_patch,center_tumor_patch,wsi"
        _text(Path(f"{start}_meta.csv"), header, *rows)


def hub_parquet(root: Path) -> None:
    """A repository of Hugging Face's Hub: `data/<split>-*.parquet` and a card."""
    _parquet(root / "data")
    _text(root / "README.md", "---", "license: mit", "---", "# Card")


def _parquet(folder: Path, first: int = 0) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    folder.mkdir(parents=True, exist_ok=True)
    for split, files in (("train", 2), ("test", 1)):
        for number in range(files):
            table = pa.table(
                {
                    "x": pa.array([first + 10 * number + k for k in range(3)], pa.int64()),
                    "label": pa.array([0, 1, 1], pa.int64()),
                }
            )
            name = f"{split}-{number:05d}-of-{files:05d}.parquet"
            parquet.write_table(table, folder / name)


def hub_configs(root: Path) -> None:
    """A repository with two configurations in folders, of which its card names the default."""
    for number, name in enumerate(("en", "fr")):
        _parquet(root / name, 100 * number)
    card = ["---", "configs:"]
    for name in ("en", "fr"):
        card += [f"- config_name: {name}", "  data_files:"]
        for split in ("train", "test"):
            card += [f"  - split: {split}", f"    path: {name}/{split}-*"]
        card += ["  default: true"] * (name == "en")
    _text(root / "README.md", *card, "---", "# Card")


def _ome_image(group: Any, value: int, version: str) -> None:
    datasets = []
    for level in range(3):
        side = 16 >> level
        data = np.full((2, 4, side, side), value + level, np.uint16)
        keys = {"name": "v2" if version == "0.4" else "default", "separator": "/"}
        group.create_array(str(level), data=data, chunks=(1, 2, 8, 8), chunk_key_encoding=keys)
        scale = [1.0, 1.0, 2.0**level, 2.0**level]
        transform = [{"type": "scale", "scale": scale}]
        datasets.append({"path": str(level), "coordinateTransformations": transform})
    axes = [{"name": "c", "type": "channel"}]
    axes += [{"name": name, "type": "space", "unit": "micrometer"} for name in "zyx"]
    scales = [{"version": version, "name": "image", "axes": axes, "datasets": datasets}]
    _ome_attributes(group, {"multiscales": scales}, version)


def _ome_attributes(group: Any, attributes: dict[str, Any], version: str) -> None:
    if version == "0.4":
        group.attrs.update(attributes)
    else:
        group.attrs["ome"] = {"version": version, **attributes}


def _ome_zarr(path: Path, version: str) -> None:
    import zarr

    root = zarr.open_group(path, mode="w", zarr_format=2 if version == "0.4" else 3)
    _ome_image(root, 10, version)
    labels = root.create_group("labels")
    _ome_attributes(labels, {"labels": ["nuclei"]}, version)
    _ome_image(labels.create_group("nuclei"), 1, version)


def ome_zarr(root: Path) -> None:
    """An OME-Zarr image of version 0.4, with levels and labels."""
    _ome_zarr(root / "image.zarr", "0.4")


def ome_zarr_3(root: Path) -> None:
    """An OME-Zarr image of version 0.5."""
    _ome_zarr(root / "image.zarr", "0.5")


def ome_plate(root: Path) -> None:
    """A plate of OME-Zarr: wells with fields of view."""
    import zarr

    plate = zarr.open_group(root / "plate.zarr", mode="w", zarr_format=2)
    wells = []
    for number, (row, column) in enumerate((("A", "1"), ("A", "2"), ("B", "1"))):
        well = plate.require_group(row).create_group(column)
        wells.append({"path": f"{row}/{column}", "rowIndex": "AB".index(row), "columnIndex": 0})
        _ome_attributes(well, {"well": {"images": [{"path": "0"}], "version": "0.4"}}, "0.4")
        _ome_image(well.create_group("0"), 10 * number, "0.4")
    rows = [{"name": "A"}, {"name": "B"}]
    _ome_attributes(
        plate,
        {"plate": {"wells": wells, "rows": rows, "columns": [{"name": "1"}, {"name": "2"}]}},
        "0.4",
    )


def decathlon(root: Path) -> None:
    """A task of the Medical Segmentation Decathlon, as MONAI's DecathlonDataset reads it."""
    import nibabel

    for folder in ("imagesTr", "labelsTr", "imagesTs"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    pairs, tests = [], []
    for number in (2, 3, 6, 1, 5):
        name, shape = f"spleen_{number}.nii.gz", (8, 8, 4 + number)
        is_test = number in (1, 5)
        scan = nibabel.Nifti1Image(np.full(shape, number, np.float32), np.eye(4))
        nibabel.save(scan, root / ("imagesTs" if is_test else "imagesTr") / name)
        (root / ("imagesTs" if is_test else "imagesTr") / f"._{name}").write_bytes(b"\0\5\26\7")
        if is_test:
            tests.append(f"./imagesTs/{name}")
            continue
        mask = nibabel.Nifti1Image(np.full(shape, number % 2, np.uint8), np.eye(4))
        nibabel.save(mask, root / "labelsTr" / name)
        (root / "labelsTr" / f"._{name}").write_bytes(b"\0\5\26\7")
        pairs.append({"image": f"./imagesTr/{name}", "label": f"./labelsTr/{name}"})
    card = {
        "name": "Spleen",
        "tensorImageSize": "3D",
        "modality": {"0": "CT"},
        "labels": {"0": "background", "1": "spleen"},
        "numTraining": 3,
        "numTest": 2,
        "training": pairs,
        "test": tests,
    }
    _text(root / "dataset.json", json.dumps(card))


def food101(root: Path) -> None:
    """Food-101: class folders, and lists of splits without labels."""
    lists: dict[str, list[str]] = {"train": [], "test": []}
    for label, name in enumerate(("apple_pie", "baby_back_ribs")):
        for k in range(3):
            stem = f"{name}/{1005649 + 10 * label + k}"
            _picture(root / "images" / f"{stem}.jpg", 60 * label + 10 * k)
            lists["train" if k < 2 else "test"].append(stem)
    for split, stems in lists.items():
        _text(root / "meta" / f"{split}.txt", *stems)
        named = {n: [s for s in stems if s.startswith(n)] for n in ("apple_pie", "baby_back_ribs")}
        _text(root / "meta" / f"{split}.json", json.dumps(named))
    _text(root / "meta/classes.txt", "apple_pie", "baby_back_ribs")
    _text(root / "meta/labels.txt", "Apple pie", "Baby back ribs")


def tiny_imagenet(root: Path) -> None:
    """Tiny ImageNet: class folders to train, a table of labels to validate, tests without."""
    wnids = ("n01443537", "n01629819", "n01641577")
    for label, wnid in enumerate(wnids):
        for k in range(2):
            name = f"{wnid}_{k}.JPEG"
            _picture(root / "train" / wnid / "images" / name, 60 * label + 10 * k)
        _text(root / "train" / wnid / f"{wnid}_boxes.txt", f"{wnid}_0.JPEG\t0\t0\t5\t5")
    rows = []
    for k, label in enumerate((2, 0, 2)):
        _picture(root / "val/images" / f"val_{k}.JPEG", 60 * label)
        rows.append(f"val_{k}.JPEG\t{wnids[label]}\t0\t32\t44\t62")
    _text(root / "val/val_annotations.txt", *rows)
    for k in range(2):
        _picture(root / "test/images" / f"test_{k}.JPEG", 10 * k)
    _text(root / "wnids.txt", *wnids)
    _text(root / "words.txt", *[f"{wnid}\tname" for wnid in wnids])


def imagenet_kaggle(root: Path) -> None:
    """ImageNet as Kaggle has it: class folders to train, a flat `val/` with a table far above."""
    base = root / "ILSVRC/Data/CLS-LOC"
    wnids = ("n01440764", "n02017213")
    for wnid in wnids:
        for k in range(3):
            _picture(base / "train" / wnid / f"{wnid}_{k}.JPEG", 40 * k)
    rows = []
    for k in range(2):
        _picture(base / "val" / f"ILSVRC2012_val_{k + 1:08d}.JPEG", 40 * k)
        _picture(base / "test" / f"ILSVRC2012_test_{k + 1:08d}.JPEG", 40 * k)
        rows.append(f"ILSVRC2012_val_{k + 1:08d},{wnids[1 - k]} 1 2 7 6 ")
    _text(root / "LOC_val_solution.csv", "ImageId,PredictionString", *rows)
    _text(root / "LOC_synset_mapping.txt", *[f"{wnid} a name, another" for wnid in wnids])
    _text(root / "ILSVRC/ImageSets/CLS-LOC/val.txt", "ILSVRC2012_val_00000001 1")
    _text(root / "ILSVRC/Annotations/CLS-LOC/val/ILSVRC2012_val_00000001.xml", "<annotation/>")


def flowers102(root: Path) -> None:
    """Flowers 102: numbered pictures, labels and splits in files of MATLAB 5."""
    for k in range(3):
        _picture(root / "jpg" / f"image_{k + 1:05d}.jpg", 40 * k)
    for name in ("imagelabels", "setid"):
        (root / f"{name}.mat").write_bytes(b"MATLAB 5.0 MAT-file" + b" " * 109)


def _tar(path: Path, members: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, data in members.items():
            about = tarfile.TarInfo(name)
            about.size = len(data)
            archive.addfile(about, io.BytesIO(data))


def _encoded(suffix: str, red: int) -> bytes:
    stream = io.BytesIO()
    kind = {"jpg": "JPEG", "png": "PNG"}[suffix]
    Image.new("RGB", (8, 8), (red, 0, 0)).save(stream, kind)
    return stream.getvalue()


def tar_shards(root: Path) -> None:
    """Tars of WebDataset with `.jpg` and `.cls`."""
    for shard in range(2):
        members = {}
        for k in range(3):
            members[f"{shard}{k}.jpg"] = _encoded("jpg", 40 * k)
            members[f"{shard}{k}.cls"] = str(k % 2).encode()
        _tar(root / f"{shard:06d}.tar", members)


def tar_splits(root: Path) -> None:
    """Tars of two splits, with pictures of two formats."""
    for split, count in (("train", 4), ("test", 2)):
        members = {}
        for k in range(count):
            suffix = ("jpg", "png")[k % 2]
            members[f"{k}.{suffix}"] = _encoded(suffix, 40 * k)
            members[f"{k}.cls"] = str(k % 2).encode()
        _tar(root / f"{split}-000000.tar", members)


def mds(root: Path) -> None:
    """Shards of MosaicML Streaming, of a number and a text."""
    root.mkdir(parents=True, exist_ok=True)
    rows = [(k % 3, word.encode()) for k, word in enumerate(("a", "bb", "ccc", "dddd"))]
    samples = [
        len(text).to_bytes(4, "little") + label.to_bytes(8, "little") + text for label, text in rows
    ]
    names = {"column_names": ["label", "text"], "column_encodings": ["int", "str"]}
    about = {**names, "column_sizes": [8, None], "compression": None, "format": "mds", "hashes": []}
    head = json.dumps({**about, "size_limit": 1 << 26}, sort_keys=True).encode()
    first = 4 * (len(samples) + 2) + len(head)
    ends = np.cumsum([first, *map(len, samples)]).astype("<u4")
    data = len(samples).to_bytes(4, "little") + ends.tobytes() + head + b"".join(samples)
    (root / "shard.00000.mds").write_bytes(data)
    raw = {"basename": "shard.00000.mds", "bytes": len(data), "hashes": {}}
    shard = {**about, "raw_data": raw, "samples": len(samples), "size_limit": 1 << 26}
    shard = {**shard, "version": 2, "zip_data": None}
    _text(root / "index.json", json.dumps({"shards": [shard], "version": 2}))


LAYOUTS: Final[dict[str, Callable[[Path], None]]] = {
    "class folders": class_folders,
    "class folders of splits": split_class_folders,
    "class folders and strays": stray_folders,
    "metadata.csv": metadata_table,
    "metadata.csv in the only folder": inner_metadata_table,
    "train.csv of Kaggle": kaggle_table,
    "Oxford-IIIT Pets": oxford_pets,
    "CUB-200-2011": cub,
    "Cityscapes": cityscapes,
    "COCO": coco,
    "LVIS": lvis,
    "Pascal VOC": voc,
    "MedMNIST": medmnist,
    "MNIST": mnist,
    "PCAM": pcam,
    "Parquet of the Hub": hub_parquet,
    "Parquet of the Hub, configurations": hub_configs,
    "OME-Zarr 0.4": ome_zarr,
    "OME-Zarr 0.5": ome_zarr_3,
    "plate of OME-Zarr": ome_plate,
    "Medical Decathlon": decathlon,
    "Food-101": food101,
    "Tiny ImageNet": tiny_imagenet,
    "ImageNet of Kaggle": imagenet_kaggle,
    "Flowers 102": flowers102,
    "tars": tar_shards,
    "tars of splits": tar_splits,
    "MDS": mds,
}
"""Makers of layouts in a folder, by their names."""
