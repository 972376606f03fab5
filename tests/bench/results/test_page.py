"""`dlio bench html`: a page that fetches nothing, whatever the reports hold."""

import base64
import hashlib
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlio.cli import main
from dlio_bench.results.envelope import envelope
from dlio_bench.results.html.document import page
from dlio_bench.results.html.plots import format_number, linear, logarithmic, plot, waterfall
from dlio_bench.results.report_values import Figure, PlotCurve, Ratio, Results, Waterfall
from dlio_bench.results.saved_report import read_report

EVIL = """</title></style><script>alert("1")</script><img src='//e.example/x' onerror=a()>&"""
TAGS = {
    *("html", "head", "meta", "title", "style", "body", "header", "main", "section", "h1", "h2"),
    *("h3", "p", "a", "div", "table", "caption", "thead", "tbody", "tr", "th", "td", "span"),
    *("details", "summary", "dl", "dt", "dd", "figure", "figcaption", "ul", "li"),
    *("svg", "path", "rect", "circle", "text", "desc"),
}


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def _results(text: str) -> Results:
    labels = {text: text}
    curves = [
        PlotCurve(text, "cdf", text, text, (0.001, 0.01, 1.0), (0.1, 0.5, 1.0), labels),
        PlotCurve("rate", "time", "s", text, (0.0, 1.0), (5.0, 6.0), labels),
        PlotCurve("scaling", "scaling", "ranks", "images/s", (1.0, 2.0), (10.0, 19.0), labels),
        PlotCurve(
            "scaling", "scaling", "ranks", "images/s", (4.0, 8.0), (36.0, 70.0), labels, True
        ),
    ]
    return Results(
        text,
        settings={text: text},
        seeds={text: 1},
        figures=[Figure(text, text, (1.0, 2.0, 3.0), labels, "lower", forecast=True)],
        ratios=[Ratio(text, (1.0, 2.0, 3.0), labels)],
        curves=curves,
        waterfalls=[Waterfall(text, {text: 1.0, "b": 2.0}, labels)],
        notes=[text],
    )


def _page(tmp_path: Path, text: str) -> str:
    path = tmp_path / "a'<b>&.json"
    path.write_text(json.dumps(envelope(_results(text))))
    return page([read_report(str(path))], text)


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    made = _page(tmp_path, EVIL)
    tags = _Tags()
    tags.feed(made)
    assert tags.open == []
    assert {tag for tag, _ in tags.seen} <= TAGS
    for tag, attributes in tags.seen:
        assert not any(name.startswith("on") or name == "style" for name in attributes), tag
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith("#")
    assert "e.example" in made  # As text.


def test_the_policy_allows_the_style_sheet_and_nothing_else(tmp_path: Path) -> None:
    made = _page(tmp_path, "x")
    style = re.search("<style>(.*)</style>", made, re.DOTALL)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    policy = re.search('Security-Policy" content="([^"]*)"', made)
    assert policy is not None
    assert policy[1] == (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    assert "url(" not in style[1]
    assert "@import" not in style[1]


def test_forecasts_are_dashed_and_named_and_pictures_have_texts(tmp_path: Path) -> None:
    made = _page(tmp_path, "x")
    tags = _Tags()
    tags.feed(made)
    lines = [a["class"] or "" for tag, a in tags.seen if tag == "path" and "line" in str(a)]
    # Each is drawn once in the plot and once in the legend.
    assert sum("dashed" in each for each in lines) == 2
    assert "x x (forecast)" in made
    ids = [a["id"] for _, a in tags.seen if a.get("id")]
    assert len(ids) == len(set(ids))
    pictures = [a for tag, a in tags.seen if tag == "svg" and a.get("role") == "img"]
    assert len(pictures) == 4
    for picture in pictures:
        assert set(str(picture["aria-labelledby"]).split()) <= set(ids)
    assert "50% within 0.01 x" in made


def test_the_command_reads_a_folder_and_writes_one_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = tmp_path / "reports"
    reports.mkdir()
    for name in ("b", "a"):
        (reports / f"{name}.json").write_text(json.dumps(envelope(_results(name))))
    output = tmp_path / "page.html"
    with pytest.raises(SystemExit) as ended:
        main(["bench", "html", str(reports), "--output", str(output)])
    assert not ended.value.code
    made = output.read_text()
    assert made.index('href="#r0">a<') < made.index('href="#r1">b<')
    assert "2 reports" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["bench", "html", str(tmp_path / "none"), "--output", str(output)])
    assert ended.value.code == 2
    assert "none" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["cdf", "time", "scaling"])
@pytest.mark.parametrize(
    "points", [(), ((0.0, 0.0),), ((1.0, 1.0),), ((-1.0, -5.0), (2.0, 3.0)), ((5.0, 0.1),) * 900]
)
def test_curves_of_few_equal_or_negative_points_are_drawn(
    kind: Literal["cdf", "time", "scaling"], points: tuple[tuple[float, float], ...]
) -> None:
    x, y = tuple(p[0] for p in points), tuple(p[1] for p in points)
    drawn = plot([PlotCurve("c", kind, "x", "y", x, y)], itertools.count())
    assert "nan" not in drawn
    assert len(drawn) < 20_000


def test_a_waterfall_fills_its_width_in_order() -> None:
    drawn = waterfall(Waterfall("w", {"a": 1.0, "b": 3.0, "c": 0.0}), itertools.count())
    bars = re.findall(r'<rect x="([\d.]+)" y="\d+" width="([\d.]+)" height="12" class="bar', drawn)
    (a, a_width), (b, b_width) = [(float(x), float(width)) for x, width in bars]
    assert a + a_width == pytest.approx(b, abs=0.11)
    assert b_width == pytest.approx(3 * a_width, abs=0.2)
    assert "a: 1 s, 25 %" in drawn


@given(st.lists(st.floats(1e-12, 1e12), min_size=1, max_size=5))
def test_every_value_lies_within_its_axis(values: list[float]) -> None:
    for scale in (linear(values, 10, 110), logarithmic(values, 10, 110)):
        assert len(scale.ticks) <= 12
        for value in values:
            assert 9.9 <= scale.place(value) <= 110.1
        for tick in scale.ticks:
            assert 9.9 <= scale.place(tick) <= 110.1


def test_numbers_are_short() -> None:
    assert [format_number(x) for x in (0, 0.00012, 0.5, 12.34, 1234.5, 1.5e9)] == [
        *("0", "1.2e-4", "0.5", "12.3", "1,234", "1.5e9"),
    ]


def test_the_main_figure_of_a_long_report_is_not_folded(tmp_path: Path) -> None:
    figures = [
        Figure(f"figure {number}", "s", (1.0,), {"loader": name})
        for number in range(40)
        for name in ("a", "b")
    ]
    figures[:2] = [Figure("accelerator utilisation", "%", (91.0,), {"loader": n}) for n in "ab"]
    path = tmp_path / "r.json"
    path.write_text(json.dumps(envelope(Results("storage", figures=figures))))
    shown = page([read_report(str(path))], "x").partition("<details>")[0]
    assert shown.count("accelerator utilisation") == 2
    assert "figure 7" not in shown
