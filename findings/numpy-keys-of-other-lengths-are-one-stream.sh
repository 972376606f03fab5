#!/bin/sh
# numpy 2.4.6: a seed made of several numbers is the same as that seed with zeros behind it, up to four
# words: default_rng(7), default_rng([7, 0]) and default_rng([7, 0, 0, 0]) draw the same numbers.
#
# SeedSequence fills a pool of four words of 32 bits, and missing words count as 0. Who keys the order
# of an epoch by [seed, epoch], and noise by [seed, epoch, rank], draws both from one stream on rank 0,
# and on no other rank: the noise of rank 0's samples follows the order. A number of more than 32 bits
# is several words, so [1 << 32, 5] is [0, 1, 5]. A fifth word of 0 makes another stream again.
# Way out: keys of one length that begin with a word for their use, or SeedSequence.spawn.
#
# Output seen:
#   [7, 3] and [7, 3, 0]: the same numbers
#   [7, 3] and [7, 3, 0, 0]: the same numbers
#   [7] and [7, 0, 0, 0]: the same numbers
#   [1 << 32, 5] and [0, 1, 5]: the same numbers
#   [7, 3, 0, 0] and [7, 3, 0, 0, 0]: other numbers
#   16 ranks: the noise of rank 0 alone is what the epoch's order is drawn from
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import numpy as np

assert np.__version__ == "2.4.6", np.__version__


def same(one, other):
    first, second = (np.random.default_rng(key).random(1000) for key in (one, other))
    return bool((first == second).all())


pairs = {
    "[7, 3] and [7, 3, 0]": ([7, 3], [7, 3, 0], True),
    "[7, 3] and [7, 3, 0, 0]": ([7, 3], [7, 3, 0, 0], True),
    "[7] and [7, 0, 0, 0]": ([7], [7, 0, 0, 0], True),
    "[1 << 32, 5] and [0, 1, 5]": ([1 << 32, 5], [0, 1, 5], True),
    "[7, 3, 0, 0] and [7, 3, 0, 0, 0]": ([7, 3, 0, 0], [7, 3, 0, 0, 0], False),
}
for name, (one, other, expected) in pairs.items():
    print(f"{name}: {'the same' if same(one, other) else 'other'} numbers")
    assert same(one, other) is expected, name
ranks = [rank for rank in range(16) if same([7, 3], [7, 3, rank])]
print(f"16 ranks: the noise of rank {ranks[0]} alone is what the epoch's order is drawn from")
assert ranks == [0]
PYTHON
