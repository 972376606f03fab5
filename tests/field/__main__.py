"""Run scripts of others and print how they compare: see the package's docstring."""

import argparse
import os
import shutil
import tempfile

from tests.field import frameworks, pytorch_examples
from tests.field.trial import Trial

_SCRIPTS = {script.name: script for script in (*pytorch_examples.SCRIPTS, *frameworks.SCRIPTS)}


def main() -> None:
    """Run the scripts that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tests.field", description=__doc__)
    parser.add_argument("names", nargs="*", default=list(_SCRIPTS), metavar="NAME")
    parser.add_argument("--repositories", required=True, help="folder with the checkouts")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--keep", help="folder for the runs; temporary by default")
    given = parser.parse_args()
    for name in given.names:
        script = _SCRIPTS[name]
        checkout = os.path.join(given.repositories, script.repository.replace("/", "-"))
        with tempfile.TemporaryDirectory(prefix="dlio-field-") as temporary:
            folder = temporary
            if given.keep is not None:
                folder = os.path.abspath(os.path.join(given.keep, name))
                shutil.rmtree(folder, ignore_errors=True)
                os.makedirs(folder)
            print(Trial(script, checkout, folder, given.ranks).report(), flush=True)


if __name__ == "__main__":
    main()
