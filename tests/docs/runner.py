"""A process that runs code blocks one after another, so that torch is imported once.

It reads requests from standard input, one JSON object a line: {"kind": "python", "text", "place"}
or {"kind": "dlio", "arguments"}, each with "folder" and "variables"; {"kind": "page"} begins a new
namespace. It answers each request with {"status", "output"}.
"""

import contextlib
import io
import json
import logging
import os
import sys
import traceback
import warnings
from typing import Any, TextIO


def main(requests: TextIO, answers: TextIO) -> None:
    """Answer requests until there are none."""
    logging.disable(logging.INFO)
    warnings.simplefilter("ignore")
    namespace: dict[str, Any] = {}
    for line in requests:
        request = json.loads(line)
        if request["kind"] == "page":
            _close(namespace)
            namespace = {"__name__": "__main__"}
            answer = {"status": 0, "output": ""}
        else:
            answer = _run(request, namespace)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    _close(namespace)


def _run(request: dict[str, Any], namespace: dict[str, Any]) -> dict[str, Any]:
    os.chdir(request["folder"])
    os.environ.update(request["variables"])
    output = io.StringIO()
    status: object = 0
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            if request["kind"] == "python":
                exec(compile(request["text"], request["place"], "exec"), namespace)
            else:
                from dlio.cli import main as dlio

                sys.argv = ["dlio", *request["arguments"]]
                dlio(request["arguments"])
        except SystemExit as error:
            status = error.code or 0
        except BaseException:
            traceback.print_exc(file=output)
            status = 1
    return {"status": status, "output": output.getvalue()}


def _close(namespace: dict[str, Any]) -> None:
    """Close the data sets and loaders that a page leaves open."""
    for name in list(namespace):
        close = getattr(namespace.pop(name), "close", None)
        if callable(close):
            with contextlib.suppress(Exception):
                close()


if __name__ == "__main__":
    # Commands and ranks write to standard output too, so answers have a pipe of their own.
    with os.fdopen(os.dup(1), "w") as own:
        os.dup2(2, 1)
        main(sys.stdin, own)
