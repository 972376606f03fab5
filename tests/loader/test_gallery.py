"""Pages of samples are whole, safe files that show all kinds of values."""

import base64
import html.parser
import itertools
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

import dlio
from dlio import transforms as T  # noqa: N812
from dlio.data.reader import open_reader
from dlio.image.decoder import opencv
from dlio.loader.gallery.histograms import histograms
from dlio.loader.gallery.value_html import line_plot, mask_uri, picture_uri, stretched, value_html
from tests.loader.targets_data import drawn, painted, write, write_coco, write_masks

EVIL = "<script>alert(1)</script>"


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path_factory.mktemp("cache")))


class Parsed(html.parser.HTMLParser):
    """Tags of a page, and the addresses that they name."""

    VOID = ("meta", "img", "br", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(page: str) -> Parsed:
    """Parse a page, and check that it is well formed and fetches nothing."""
    made = Parsed(page)
    assert made.open == []
    assert "script" not in made.tags
    assert all(re.match(r"data:image/(png|jpeg);base64,", each) for each in made.addresses)
    assert "url(" not in page
    assert "@import" not in page
    return made


def pixels_of(uri: str) -> Any:
    data = base64.b64decode(uri.partition(",")[2])
    cv2 = opencv()
    return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)


def test_a_page_shows_whole_pictures_and_the_crops_of_some_epochs(tmp_path: Path) -> None:
    file = write_coco(tmp_path, drawn(1, 6, boxes=2))
    file.write_text(file.read_text().replace('"cat"', f'"{EVIL}"'))
    with dlio.open(tmp_path, image_size=64, tiers="none", masks=True) as data:
        page = data.show(4, epochs=3)
    made = parsed(page.html)
    assert EVIL not in page.html
    assert "&lt;script&gt;alert(1)" in page.html
    assert made.tags.count("section") == 4
    assert made.tags.count("figure") == 4 * (1 + 3)
    assert page.html.count('class="part"') == 4 * 3 * 2  # Rectangle and name of each crop.
    assert made.tags.count("circle") > 0
    assert page.failed == ()


def test_a_picture_is_as_wide_on_the_page_as_its_pixels_up_to_480(tmp_path: Path) -> None:
    write(tmp_path / "a.png", painted(200, 400, []))
    write(tmp_path / "b.png", painted(200, 900, []))
    with dlio.open(tmp_path, image_size=64, tiers="none") as data:
        page = data.show(2, shuffle=False, epochs=2).html
    widths = re.findall(r'class="stack" style="width:(\d+)px"', page)
    assert widths == ["400", "192", "192", "480", "192", "192"]  # Small crops are enlarged.


def test_boxes_of_the_whole_picture_are_drawn_in_its_pixels(tmp_path: Path) -> None:
    write_coco(tmp_path, [(100, 200, [(40, 20, 120, 80)])])
    with dlio.open(tmp_path, image_size=None, tiers="none") as data:
        page = data.show(1).html
    assert '<svg viewBox="0 0 200 100"' in page
    assert '<rect x="40.00" y="20.00" width="80.00" height="60.00"' in page
    assert 'cx="40.00" cy="20.00"' in page


def test_the_crop_on_a_page_is_the_loaders(tmp_path: Path) -> None:
    for k in range(3):
        write(tmp_path / "ab"[k % 2] / f"{k}.png", painted(90, 120, [(10 + k, 10, 60, 50)]))
    with dlio.open(tmp_path, image_size=32, tiers="none") as data:
        page = parsed(data.show(3, shuffle=False, epochs=1).html)
        shown = [pixels_of(address) for address in page.addresses]
        for sample in range(3):
            whole, crop = shown[2 * sample : 2 * sample + 2]
            assert np.array_equal(crop[..., ::-1], data[sample][0].permute(1, 2, 0).numpy())
            assert whole.shape == (90, 120, 3)


def test_transforms_are_shown_as_they_come_out(tmp_path: Path) -> None:
    write_masks(tmp_path, drawn(2, 2))
    transform = T.Compose([T.RandomResizedCrop(48), T.Normalize([0.5] * 3, [0.5] * 3)])
    with dlio.open(tmp_path, transform=transform, tiers="none") as data:
        page = data.show(2, epochs=1)
        assert page.html.count("float32, -1 to ") >= 1
        parsed(page.html)
        odd = data.map(lambda sample: {"n": 1.5, "text": EVIL, "parts": [sample[0], b"\xff" * 99]})
        page = odd.show(1)
        parsed(page.html)
        assert "float32" in page.html
        assert "(99 bytes)" in page.html


def test_a_notebook_gets_the_page_without_its_frame(tmp_path: Path) -> None:
    write(tmp_path / "a.png", painted(20, 20, []))
    with dlio.open(tmp_path, tiers="none") as data:
        page = data.show()
    text = page._repr_html_()
    assert "<html" not in text
    assert '<div class="dlio">' in text
    parsed(text)
    page.save(str(tmp_path / "page.html"))
    assert (tmp_path / "page.html").read_text() == page.html
    with pytest.raises(dlio.UsageError, match="cannot be written"):
        page.save(str(tmp_path / "no" / "page.html"))


def test_samples_that_cannot_be_decoded_show_their_error(tmp_path: Path) -> None:
    for k in range(3):
        write(tmp_path / "a" / f"{k}.png", painted(30, 30, []))
    (tmp_path / "a" / "1.png").write_bytes(b"\x89PNG broken")
    with dlio.open(tmp_path, tiers="none") as data:
        page = data.show(3, shuffle=False)
    assert len(page.failed) == 1
    assert "a/1.png" in page.failed[0]
    assert page.html.count('class="error"') == 1
    parsed(page.html)


def test_volumes_plots_and_numbers_are_shown(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["volume"] = np.random.default_rng(0).random((2, 12, 30, 40)).astype(np.float32)
        file["trace"] = np.sin(np.arange(2000)).reshape(2, 1000)
        file["few"] = np.arange(6).reshape(2, 3)
        file["label"] = [0, 1]
    with dlio.open(tmp_path / "a.h5", tiers="none") as data:
        page = data.show(2)
    made = parsed(page.html)
    assert made.tags.count("figure") == 2 * 3
    assert "axis 0, slice 6 of 12" in page.html
    assert page.html.count("<polyline") == 2
    assert "[0, 1, 2]" in page.html


@pytest.mark.parametrize(
    "value",
    [
        EVIL * 200,
        np.full((20, 20), np.nan),
        np.array([np.inf, 1.0, -np.inf] * 5),
        np.zeros((0, 4)),
        np.zeros((3, 20, 20), np.complex64),
        np.zeros((2, 3, 4, 20, 20), np.int16),
        np.array(["a"]),
        torch.zeros(3, 16, 16, dtype=torch.bfloat16),
        torch.ones(12, 12, dtype=torch.bool),
        {EVIL: [EVIL, {"x": torch.zeros(2)}]},
        [[[[[[1]]]]]],
        object(),
        None,
        1e300,
        {"a": {i: torch.zeros(1) for i in range(50)}},
        "\x00\x1b[31m\udcff",
    ],
)
def test_any_value_has_a_safe_form(value: Any) -> None:
    text = value_html(value)
    parsed(text)
    assert len(text) < 20_000
    assert "\x1b" not in text


def test_greys_span_the_finite_values() -> None:
    shown, note = stretched(np.array([[1.0, np.nan], [3.0, 2.0]]))
    assert shown.tolist() == [[0, 0], [255, 128]]
    assert note == "1 to 3, 1 not finite"
    same, note = stretched(np.array([[7, 9]], np.uint8))
    assert (same.tolist(), note) == ([[7, 9]], "")
    assert line_plot(np.array([np.nan])) == ""


def test_large_pictures_are_shrunk_and_masks_keep_their_edges() -> None:
    assert pixels_of(picture_uri(np.zeros((1000, 500, 3), np.uint8), 100)).shape == (100, 50, 3)
    mask = np.zeros((100, 100), np.uint8)
    mask[:, 50:] = 3
    shown = pixels_of(mask_uri(mask, 50))
    assert shown.shape == (50, 50, 4)
    assert (shown[:, :25] == 0).all()
    assert len(np.unique(shown[:, 25:].reshape(-1, 4), axis=0)) == 1


def test_histograms_count_every_sample_and_box_once(tmp_path: Path) -> None:
    rows = drawn(3, 30, boxes=2)
    write_coco(tmp_path / "coco", rows)
    made = histograms(open_reader(str(tmp_path / "coco")))
    assert [sum(each.counts) for each in made] == [30, 30, 30, 60]
    assert made[3].names == ("cat", "dog")
    assert made[3].counts == (30, 30)
    for k in range(40):
        write(tmp_path / "classes" / f"c{k:02d}" / "a.png", painted(20, 30 + k, []))
    made = histograms(open_reader(str(tmp_path / "classes")))
    assert [sum(each.counts) for each in made] == [40] * 4
    assert made[3].names[-1] == "16 others, 1 each"
    assert made[2].names == ("20",)
    for k in range(3):
        write(tmp_path / "three" / "c" / f"{k}.png", painted(20 + k, 30, []))
    assert histograms(open_reader(str(tmp_path / "three")))[2].names == ("20", "21", "22")
    widths = [tuple(map(int, name.split(" to "))) for name in made[1].names]
    assert widths[0][0] == 30
    assert widths[-1][1] == 69
    assert all(a[1] + 1 == b[0] for a, b in itertools.pairwise(widths))
