"""Other meanings of folders of samples than those that are read, by the names in them.

BraTS_001/BraTS_001_{t1,t2,seg}.nii.gz      a case in each folder, and not a class
cat.0.jpg, dog.12.jpg                       labels in names
0001.tif, 0001_mask.tif                     masks among the pictures
a/0.jpg, a/labels.csv                       tables in class folders
"""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, permutations
from typing import Final

import xxhash

from dlio.data.interpretation import CONTAINERS, named_files
from dlio.data.labels import twins_in_case
from dlio.data.splits import split_word

_MOST_PARTS: Final = 16
"""Files of a case, at most."""
_MOSTLY: Final = 0.5
"""Part of the folders that are alike, from which on they are cases."""
_SPACE: Final = "-_. "
_PAIRED: Final = (
    re.compile(r"(?P<word>[A-Za-z]+)[-_ ]?(?P<rest>[0-9].*)"),
    re.compile(r"(?P<rest>.*[0-9])[-_ ](?P<word>[A-Za-z]+)"),
)
_MASK_WORDS: Final = ("mask", "masks", "seg", "segmentation", "label", "labels", "gt", "truth")
_MASK: Final = re.compile(
    r"(.+?)[-_. ]?(?:mask|masks|seg|segmentation|label|labels|labelids|gt|trimap|annotation)",
    re.IGNORECASE,
)
MASK_FOLDER: Final = re.compile(
    r"mask|segm|label|annot|truth|(?<![a-z])gts?(?![a-z])", re.IGNORECASE
)
"""Names of folders that may hold masks."""
_FEW_FOLDERS: Final = 8
"""Folders that may be pictures and their masks, at most."""
_WORDS: Final = re.compile(r"(.*?[^-_. (0-9].*?|[0-9]+(?=[-_. (]))[-_. (]*[0-9]+\)?", re.DOTALL)
_NUMBER: Final = re.compile(r"(-1|[0-9]+)_.*[-_a-zA-Z]")
_LONGEST: Final = 32
# fmt: off
_CAMERAS: Final = frozenset((
    "img", "image", "images", "picture", "pic", "photo", "dsc", "dscn", "dscf", "p", "frame",
    "dji", "gopr", "mvi", "scan", "screenshot", "page", "slice", "sample", "train", "test", "val",
    "file", "im", "untitled",
))
# fmt: on
"""Beginnings of names that programs and cameras give, in small letters."""
_PAIRS: Final = (
    {"lr", "hr"},
    {"low", "high"},
    {"noisy", "clean"},
    {"blur", "sharp"},
    {"input", "target"},
    {"source", "target"},
)
"""Names of folders of two pictures of each sample."""
_SHOWN: Final = 3
_LETTERED: Final = re.compile(r"(train|test|val|valid)[-_]?([A-Z])", re.IGNORECASE)
_PERSON: Final = re.compile(r"(patient|subject|person|participant|case|study)[-_ ]?\d+", re.I)


def parts_of_cases(folders: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the endings that the files of most folders have alike, such as `flair`, `seg` and
    `t1`: each of the folders is then a case. () if they are not alike.

    `folders` has the names of the files of each, without their suffixes. What all files of a folder
    begin with does not count; endings that differ in digits alone are numbers of samples.
    """
    return _parts_of([_case_key(*each) for each in folders.items()])


def _case_key(folder: str, stems: Sequence[str]) -> tuple[str, ...]:
    """Return the endings of a folder's files in order; () if they are none of a case."""
    return tuple(sorted(case_parts(folder, stems))) if len(stems) <= _MOST_PARTS else ()


def _parts_of(keys: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the endings that most of some folders have, out of those of each."""
    if len(keys) < 2:
        return ()
    parts, count = Counter(keys).most_common(1)[0]
    is_case = len(parts) >= 2 and count > 1 and count >= _MOSTLY * len(keys)
    worded = all(any(letter.isalpha() for letter in part) for part in parts)
    # Of IM0001, IM0002 as well; T1 and T2 are kinds of scans.
    bare = {part.rstrip("0123456789").lower() for part in parts}
    is_numbered = len(bare) == 1 and bare != {"t"}
    return parts if is_case and worded and not is_numbered else ()


def case_parts(folder: str, stems: Sequence[str]) -> dict[str, str]:
    """Return the names of a folder's files by their endings; {} if two have the same one."""
    if all(stem.startswith(folder) for stem in stems):
        ends = {stem.removeprefix(folder).lstrip(_SPACE): stem for stem in stems}
    else:  # Up to the last mark that all have in common, so that t1 and t2 stay.
        pairs = enumerate(zip(min(stems, default=""), max(stems, default=""), strict=False))
        common = next((k for k, (left, right) in pairs if left != right), 0)
        at = max(min(stems, default="").rfind(mark, 0, common) for mark in _SPACE) + 1
        ends = {stem[at:]: stem for stem in stems}
    return ends if len(ends) == len(stems) and "" not in ends else {}


def name_labels(stems: Sequence[str]) -> dict[str, str]:
    """Return what the names of pictures begin with before their numbers, such as `cat` of `cat.12`,
    by name; {} if these do not look like labels.

    They do if there are several, each of two pictures or more on average, and no camera gives them.
    """
    return {stem: _label_in(stem) for stem in stems} if label_words(stems) else {}


def label_words(stems: Iterable[str]) -> list[str]:
    """Return the different labels of `name_labels`, sorted."""
    different: set[str] = set()
    count = 0
    for stem in stems:
        count += 1
        label = _label_in(stem)
        if not label or len(label) > _LONGEST:
            return []
        different.add(label)
    few = 1 < len(different) <= count / 2
    return sorted(different) if few and not all(n.lower() in _CAMERAS for n in different) else []


def _label_in(stem: str) -> str:
    match = _WORDS.fullmatch(stem)
    return match[1].rstrip(_SPACE) if match else ""


def number_labels(stems: Iterable[str]) -> list[str]:
    """Return the numbers that names begin with, such as `0002` of `0002_c1s1_000451_03`, if each
    has two pictures or more on average, as persons do in Market-1501; [] if not."""
    numbers: set[str] = set()
    count = 0
    for stem in stems:
        count += 1
        match = _NUMBER.match(stem)
        if match is None:
            return []
        numbers.add(match[1])
    return sorted(numbers) if 1 < len(numbers) <= count / 2 else []


def masks_among(names: Sequence[str]) -> list[str]:
    """Return those of some files that are named as others of them with `_mask` or the like, or in
    which all names come with the same two suffixes, those that are PNGs or come last."""
    suffixes = {os.path.splitext(name)[1] for name in names}
    if len(names) > 2 and len(suffixes) == 2 and set(Counter(map(_stem, names)).values()) == {2}:
        last = max(suffixes, key=lambda suffix: (suffix == ".png", suffix))
        return [name for name in names if name.endswith(last)]
    matches = ((name, _MASK.fullmatch(_stem(name))) for name in names)
    wanted = {name: match[1].rstrip(_SPACE) for name, match in matches if match}
    # Few names are held: there may be millions.
    known = set(wanted.values()).intersection(map(_stem, names)) if wanted else set()
    return [name for name, stem in wanted.items() if stem in known] or _masks_by_word(names)


def _masks_by_word(names: Sequence[str]) -> list[str]:
    """Return the files with a word for masks of some that all come with the same words next to
    their numbers, such as `volume-0` and `segmentation-0`, or `0_sat` and `0_mask`."""
    for form in _PAIRED:
        every: set[str] = set()
        for name in names:
            match = form.fullmatch(_stem(name))
            every.add(match["word"].lower() if match else "")
            if match is None:
                break
        if "" in every or len(every) < 2 or every.isdisjoint(_MASK_WORDS):
            continue
        groups: dict[str, dict[str, str]] = {}
        for name in names:
            if match := form.fullmatch(_stem(name)):
                groups.setdefault(match["rest"], {})[match["word"].lower()] = name
        words = {frozenset(group) for group in groups.values()}
        whole = len(words) == 1 and sum(map(len, groups.values())) == len(names)
        mask = next((word for word in _MASK_WORDS if whole and word in next(iter(words))), "")
        if mask and len(next(iter(words))) > 1:
            return [group[mask] for group in groups.values()]
    return []


def doubts_of_classes(classes: Sequence[str], folders: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the words about class folders that may mean something else.

    `folders` has the names of the pictures in some of the class folders, with their suffixes. They
    are gone through folder by folder.
    """
    words = []
    keys: list[tuple[str, ...]] = []
    masks: list[str] = []
    alike: dict[str, list[str]] = {}
    counts: dict[str, int] = {}
    for name, own in folders.items():
        stems = [_stem(each) for each in own]
        keys.append(_case_key(name, stems))
        masks += [f"{name}/{each}" for each in masks_among(own)]
        same = xxhash.xxh3_128_hexdigest("/".join(stems).encode("utf-8", "surrogateescape"))
        alike.setdefault(same, []).append(name)
        counts[name] = len(own)
    parts = _parts_of(keys)
    if parts:
        words.append(
            f"each of these folders holds {_some(parts)}, as cases do and classes do not: their "
            "labels are the folders all the same; put pictures and masks into folders images and "
            "masks, or one folder a class"
        )
    if masks and not parts:
        words.append(doubt_of_masks(masks))
    twins_of = {name: [n for n in own if n != name] for own in alike.values() for name in own}
    for name, alikes in twins_of.items():
        other = next((n for n in alikes if MASK_FOLDER.search(n)), next(iter(alikes), ""))
        signs = (name.lower() in CONTAINERS, bool(MASK_FOLDER.search(other)))
        # Where several folders have the same names, as 0.jpg, the folders' names must all say so.
        if any(signs) if len(alikes) == 1 and not MASK_FOLDER.search(name) else all(signs):
            words.append(
                f"{name} and {other} hold the same names, as pictures and their masks do: "
                f"format='masks', images={name!r}, masks={other!r} reads them so"
            )
    for name, other in permutations(counts, 2) if len(counts) <= _FEW_FOLDERS else ():
        pictures, masks = ([_stem(each) for each in folders[folder]] for folder in (name, other))
        are_masks = bool(MASK_FOLDER.search(other)) and not MASK_FOLDER.search(name)
        end = counts[name] == counts[other] and _end_of_masks(pictures, masks, are_masks)
        if end:
            words.append(
                f"{other} holds the names of {name} with {end}, as masks do: format='masks', "
                f"images={name!r}, masks={other!r} reads them so"
            )
    for name, other in combinations(counts, 2) if len(classes) == 2 else ():
        if {name.lower(), other.lower()} in _PAIRS and _are_pairs(folders[name], folders[other]):
            words.append(
                f"{name} and {other} hold files named alike, as two pictures of each sample do, "
                "and are read as classes: open them one by one if they are none"
            )
    lettered = [_LETTERED.fullmatch(name) for name in classes]
    domains = {(each[1].lower(), each[2]) for each in lettered if each}
    if all(lettered) and len(domains) > len({domain for _, domain in domains}) > 1:
        words.append(
            f"{', '.join(classes[:_FEW_FOLDERS])} name splits and domains, as of CycleGAN, and are "
            f"read as classes: open each alone, such as {classes[0]}"
        )
    parted = [name for name in classes if _says_split(name)]
    # Several are of one kind, such as steam_train and freight_train.
    if len(parted) == 1 < len(classes):
        words.append(
            f"{parted[0]} says a split by its name, and is read as a class: open that folder if it "
            "is one"
        )
    if len(classes) > 1 and all(_PERSON.fullmatch(name) for name in classes):
        words.append(
            f"{classes[0]}, {classes[1]} and so on name persons or cases, and are read as classes: "
            "table= and label= give the labels of a table, if they are none"
        )
    if twins := twins_in_case(classes):
        words.append(twins)
    if all(name.isdecimal() for name in classes) and sorted(classes, key=int) != sorted(classes):
        places = {name: place for place, name in enumerate(sorted(classes))}
        odd = next(name for name, place in places.items() if int(name) != place)
        words.append(
            f"folders that are numbers are classes in the order of text, as in torchvision: "
            f"label {places[odd]} is folder {odd}"
        )
    if _are_numbered_on(folders):
        words.append(
            f"{classes[0]} to {classes[-1]} hold pictures that are numbered on from folder to "
            f"folder, as parts of one set are, and are read as classes: the pattern FOLDER/* reads "
            "the pictures without labels"
        )
    if len(classes) == 1:
        words.append(
            f"{classes[0]} is the only class, so all labels are 0: open that folder for samples "
            "without labels"
        )
    return words


def _are_numbered_on(folders: Mapping[str, Sequence[str]]) -> bool:
    """True for folders that are numbers, and whose pictures are numbered from one to the next, as
    FFHQ's `00000/00000.png` and `01000/01000.png`."""
    if len(folders) < 2 or not all(map(str.isdecimal, folders)):
        return False
    last = -1
    for name in sorted(folders, key=int):
        stems = [_stem(each) for each in folders[name]]
        if not all(map(str.isdecimal, stems)) or min(map(int, stems), default=0) <= last:
            return False
        last = max(map(int, stems), default=last)
    return True


def _says_split(name: str) -> bool:
    """True for a name such as `bounding_box_train` and `train_images`, but not `test_tube`."""
    word = split_word(name)
    if not word or word == name:
        return False
    rest = name.rpartition(word)[2].strip(_SPACE).lower()
    return not rest or rest in CONTAINERS or bool(MASK_FOLDER.fullmatch(rest.removesuffix("s")))


def _are_pairs(files: Sequence[str], others: Sequence[str]) -> bool:
    """True if the files of two folders have the same names, or longer ones (`0001x2.png`)."""
    left, right = sorted(map(_stem, files)), sorted(map(_stem, others))
    return len(left) == len(right) and all(
        long.startswith(short) or short.startswith(long)
        for long, short in zip(left, right, strict=True)
    )


def _end_of_masks(pictures: Sequence[str], others: Sequence[str], are_masks: bool) -> str:
    """Return the ending, such as `_gt`, of the names of some files that are else those of pictures,
    one each; "" unless it is a word for masks, or any if their folder's name says so."""
    first = min(pictures, default="")
    longer = [name for name in others if name.startswith(first) and name != first]
    for end in {name.removeprefix(first) for name in longer}:
        is_word = are_masks or _MASK.fullmatch(f"a{end}")
        if is_word and sorted(others) == sorted(n + end for n in pictures):
            return end
    return ""


def doubt_of_masks(masks: Sequence[str]) -> str:
    """Return the words about files that may be masks."""
    return (
        f"{named_files(masks)} may be masks, by their names, and are read as samples: move them to "
        "a folder masks, next to a folder images"
    )


def _some(parts: Sequence[str]) -> str:
    more = ", ..." if len(parts) > _SHOWN else ""
    return ", ".join(parts[:_SHOWN]) + more


def _stem(name: str) -> str:
    return os.path.splitext(name.removesuffix(".gz"))[0]
