"""Programs of ranks that a light zygote forks."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from dlio.util.settings import DONE
from dlio.util.shared_folders import SharedFolder


def main(how: str) -> None:
    if how == "tell":
        facts = {
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "argv": sys.argv[1:],
            "descriptors": len(os.listdir("/proc/self/fd")) - 1,
            "imported": "token" in sys.modules,
            "error": sys.stdin.read(),
        }
        print(json.dumps(facts))
        sys.stderr.write("to standard error\n")
    elif how == "exit":
        sys.exit(7)
    elif how == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif how == "done":
        Path(os.environ[DONE]).write_text("0", encoding="ascii")
    elif how == "keep":
        from dlio.launch.node.lock_keeper import keep

        folder = SharedFolder(sys.argv[2])
        keep(folder.alive)
        Path(folder.path, "contents").write_text("kept", encoding="ascii")
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "sleep":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
        print(os.getpid(), flush=True)
        time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1])
