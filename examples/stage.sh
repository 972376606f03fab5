#!/bin/sh
# Pack a data set, fill a disk with it, check it, and give the disk back.
#   sh examples/stage.sh pictures/train scratch
set -eu
source=$1
scratch=$2
mkdir -p "$scratch/tier"
dlio pack "$source" "$scratch/packed" --workers 1
dlio stage "$scratch/packed" --tiers "$scratch/tier:1GiB"
dlio status --tiers "$scratch/tier"
dlio verify "$scratch/packed"
dlio evict "$scratch/packed" --tiers "$scratch/tier"
