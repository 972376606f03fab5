"""The contenders of `dlio bench loader`: dlio's, torch's, and other libraries'.

Each has a process of its own that speaks the protocol of `standalone.runners.protocol`. Those of
other libraries run in environments of their own, for their requirements contradict each other's
and ours; `dlio bench peers install` makes them.

    table.py         who takes part, and in which environment
    environments.py  makes the environments
    process.py       one contender's process: asked, paused, ended; every answer has a deadline
    race.py          passes of all contenders in turn
    own.py           the programs of dlio and torch
    standalone/      the programs of other libraries, which import nothing of dlio
"""
