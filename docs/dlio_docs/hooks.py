"""Hooks of MkDocs: replace `<!-- generate: NAME ARGUMENT -->` in pages by generated Markdown."""

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dlio_docs.generate import GENERATORS

_PLACE = re.compile(r"^<!-- generate: (?P<name>[\w-]+) ?(?P<argument>.*?) -->$", re.MULTILINE)


def on_config(config: Any) -> Any:
    """Add the pages of docs/design that the navigation of mkdocs.yml does not name."""
    folder = Path(config["docs_dir"]) / "design"
    for entry in config["nav"]:
        if "Design" in entry:
            paths = sorted(folder.glob("*.md"))
            extra = [f"design/{path.name}" for path in paths if path.name != "index.md"]
            entry["Design"] = [*entry["Design"], *extra]
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page's Markdown with its generated parts.

    Raises KeyError for a part that nothing generates.
    """
    return _PLACE.sub(lambda place: GENERATORS[place["name"]](place["argument"]), markdown)
