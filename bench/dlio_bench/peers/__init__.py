"""The contenders of `dlio bench loader`: dlio's, torch's, and other libraries'.

Each has a process of its own that speaks the protocol of `standalone.runners.protocol`. Those of
other libraries run in environments of their own, for their requirements contradict each other's
and ours; `dlio bench peers install` makes them.

    contender_table   who takes part, and in which environment
    environments      makes the environments
    process           contenders' processes: asked, paused, ended; passes of all in turn
    dlio_contenders   the programs of dlio and torch
    standalone        the programs of other libraries, which import nothing of dlio
"""
