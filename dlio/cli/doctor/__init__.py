"""`dlio doctor`: checks of a machine, or of all nodes of a job, before a training fails on them.

    findings.py  a finding: a fact, how good it is, and the remedy
    software.py  Python, torch, MPI, launchers
    probe.py     MPI as a process of its own sees it
    ranks.py     ranks as launchers started them and as MPI finds them; cores and GPUs of each rank
    limits.py    descriptors, processes, memory, shared memory
    places.py    tiers and the source: file systems, free space, speed, stripes
    clocks.py    differences between the nodes' clocks
    examine.py   all of them, over all ranks
    shown.py     as tables

A check looks and measures; it changes nothing, and leaves nothing behind.
"""
