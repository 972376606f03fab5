"""Commands that install the packages of a feature, for error messages.

They name packages by themselves, not an extra such as `dlio[plot]`: pip finds extras of dlio only
where dlio itself can be found, which a package that is installed from its source tree is not.
"""

import re
import shlex
from importlib.metadata import PackageNotFoundError, requires


def how_to_install(extra: str, package: str = "") -> str:
    """Return a command that installs the packages of an extra of dlio, such as `plot`, whose names
    begin with `package`. An empty extra stands for dlio itself.
    """
    if not extra:
        return "`pip install .` in the folder of dlio's source"
    try:
        rows = requires("dlio") or []
    except PackageNotFoundError:
        rows = []
    wanted = re.compile(rf"""extra\s*==\s*['"]{re.escape(extra)}['"]""")
    names = [row.partition(";")[0].strip() for row in rows if wanted.search(row)]
    names = [name for name in names if name.startswith(package)]
    if not names:
        return f"`pip install '.[{extra}]'` in the folder of dlio's source"
    return f"`pip install {' '.join(map(shlex.quote, names))}`"
