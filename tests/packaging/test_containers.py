"""The two recipes of containers install the same, from files that are there."""

import re
import tomllib
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).parents[2]
_DOCKER: Final = (_ROOT / "Dockerfile").read_text()
_APPTAINER: Final = (_ROOT / "apptainer.def").read_text()


def _sources(text: str) -> set[str]:
    """Files of the checkout that a recipe copies."""
    if text is _DOCKER:
        lines = re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE)
        return {name for line in lines for name in line.split()[:-1]}
    section = text.split("%files\n")[1].split("\n\n")[0]
    return {line.split()[0] for line in section.splitlines()}


def _packages(text: str) -> set[str]:
    """Packages of Debian and of pip that a recipe installs, without options."""
    joined = re.sub(r'"[^"]*"', "", text).replace("\\\n", " ")
    lists = re.findall(r"(?:apt-get install|/pip install)(.*?)(?:&&|$)", joined, re.MULTILINE)
    words = {word.strip("'") for each in lists for word in each.split()}
    return {word for word in words if not word.startswith("-")}


def test_both_copy_what_the_wheel_is_built_from() -> None:
    assert _sources(_DOCKER) == _sources(_APPTAINER)
    build = tomllib.loads((_ROOT / "pyproject.toml").read_text())
    wheel = set(build["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    folders = {name for name in _sources(_DOCKER) if (_ROOT / name).is_dir()}
    assert {name.split("/")[0] for name in wheel} == folders
    assert all((_ROOT / name).exists() for name in _sources(_DOCKER))


def test_both_install_the_same() -> None:
    # Of the image's two stages, the second has Python without venv, which gives it to the first.
    assert _packages(_DOCKER) - {"python3"} == _packages(_APPTAINER)
    assert ".[mpi,s3,search]" in _packages(_DOCKER)


def test_the_context_of_docker_has_all_files_and_no_others() -> None:
    lines = (_ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    assert {line[1:] for line in lines if line.startswith("!")} == _sources(_DOCKER)
