"""Emulated storage: any folder as a slow parallel file system, an object store or NFS gives it.

    with emulated(folder, "latency(20ms,open=5ms)+bandwidth(150MiB)") as mounted:
        ...

Profiles are in `profile`, and the file system that keeps to them in `folder` and `mounting`.
"""

from dlio_bench.emulated.emulated_mount import emulated, stats, why_not
from dlio_bench.emulated.profile import NAMED, Profile, parse_profile

__all__ = ["NAMED", "Profile", "emulated", "parse_profile", "stats", "why_not"]
