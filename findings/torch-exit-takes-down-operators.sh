#!/bin/sh
# torch 2.13.0, Python 3.11, Linux: every program that has imported torch takes its operators down
# when it ends.
#
# `import torch` leaves 134 or 136 calls of torch.library._del_library in weakref.finalize, to be made at
# exit; with torch._dynamo 174. They deregister what torch's own modules had registered. In a child of a
# fork that costs most: each call writes to pages that parent and child share. Seen: 24 to 35 ms of CPU
# time at the end of a child that did nothing else, where fork and exit take 20 ms together.
# A server that forks after `import torch` can set `atexit = False` on these finalizers first.
#
# Output seen (the time varies):
#   134 finalizers of torch.library, 24.5 ms of CPU time in a forked child
#   136 finalizers of torch.library, 26.1 ms of CPU time in a forked child
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check numpy==2.4.6 torch==2.13.0
"$folder/venv/bin/python" - <<'PYTHON'
import os
import sys
import time
import weakref

import torch

registry = vars(weakref.finalize)["_registry"]
ours = [
    info for info in registry.values() if info.atexit and info.func.__module__ == "torch.library"
]
sys.stdout.flush()
reading, writing = os.pipe()
if os.fork() == 0:
    began = time.process_time()
    weakref.finalize._exitfunc()
    os.write(writing, str(time.process_time() - began).encode())
    os._exit(0)
spent_s = float(os.read(reading, 100))
os.wait()
print(f"{len(ours)} finalizers of torch.library, {spent_s * 1000:.1f} ms of CPU time in a forked child")
assert torch.__version__.startswith("2.13.0"), torch.__version__
assert {info.func.__qualname__ for info in ours} == {"_del_library"}
assert len(ours) in (134, 136), len(ours)
assert spent_s > 0.005, spent_s
PYTHON
