"""`dlio bench html`: a page of reports."""

from dataclasses import dataclass
from typing import Annotated

from dlio.errors import UsageError, printable
from dlio.util.options import Option, check
from dlio.util.whole_files import check_writable, write_whole


@dataclass(frozen=True, slots=True)
class HtmlOptions:
    """The options of `dlio bench html`."""

    sources: Annotated[
        tuple[str, ...],
        Option("Reports of --report, or folders of them.", positional=True, metavar="DIR|FILE"),
    ]
    output: Annotated[str, Option("File to write.", metavar="FILE")] = "page.html"
    title: Annotated[str, Option("Heading of the page.", metavar="TEXT")] = "dlio bench"

    def __post_init__(self) -> None:
        check(self)
        if not self.sources:
            raise UsageError("dlio bench html: name reports, or a folder of them")


def command(page: HtmlOptions) -> None:
    """Make a self-contained page of reports: tables, ratios with intervals, and plots.

    The page is one file without scripts. It fetches nothing.
    """
    from dlio_bench.results.html import document
    from dlio_bench.results.saved_report import find_reports, read_report

    check_writable("--output", page.output)
    reports = [read_report(path) for path in find_reports(page.sources)]
    text = document.page(reports, page.title).encode(errors="replace")
    write_whole(page.output, lambda file: file.write(text))
    print(f"{printable(page.output)}: {len(reports)} reports, {len(text):,} bytes")
