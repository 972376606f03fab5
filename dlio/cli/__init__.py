"""The `dlio` command. `command_line` finds sub-commands, runs them and reports errors; it is loaded
when Ctrl-C has its effect already."""

from dlio.util.early_interrupt import end_at_interrupt

TYPE_CHECKING = False  # `typing` takes longer to import than all that is here.
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn


def main(argv: "Sequence[str] | None" = None) -> "NoReturn":
    """Run the command and exit. With arguments, without the program's name, the program may go on
    after SystemExit; with those of the process it ends.
    """
    if argv is None:
        end_at_interrupt()
    from dlio.cli.command_line import run_and_exit

    run_and_exit(argv)
