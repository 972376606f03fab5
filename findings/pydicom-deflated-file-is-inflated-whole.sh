#!/bin/sh
# pydicom 3.0.2: to read the patient's name from a deflated DICOM file takes the memory of its pixels,
# twice.
#
# `dcmread(stop_before_pixels=True, specific_tags=[...])` reads the first kilobytes of a file, and
# indexes of large collections rely on that. In the deflated transfer syntax the whole data set is one
# zlib stream, of which the head could be inflated alone; pydicom inflates all of it before it reads
# the first tag, and copies it once more. A series of four empty slices of 4,096 pixels has 131 kB
# deflated, and takes 283 MB.
#
# Output seen:
#   explicit: file of 134.2 MB, peak of 0.0 MB; deflated: file of 0.1 MB, peak of 282.5 MB
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check numpy==2.4.6 pydicom==3.0.2
cd "$folder"
venv/bin/python - <<'PYTHON'
import os
import tracemalloc

import numpy as np
import pydicom
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import CTImageStorage, DeflatedExplicitVRLittleEndian, ExplicitVRLittleEndian

assert pydicom.__version__ == "3.0.2", pydicom.__version__
side, frames = 4096, 4


def write(name: str, syntax: str) -> None:
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = syntax
    meta.MediaStorageSOPClassUID = CTImageStorage
    meta.MediaStorageSOPInstanceUID = "1.2.3"
    data = FileDataset(name, {}, file_meta=meta, preamble=b"\0" * 128)
    data.PatientID = "nobody"
    data.Rows = data.Columns = side
    data.NumberOfFrames = frames
    data.SamplesPerPixel = 1
    data.PhotometricInterpretation = "MONOCHROME2"
    data.BitsAllocated = data.BitsStored = 16
    data.HighBit = 15
    data.PixelRepresentation = 0
    data.PixelData = np.zeros((frames, side, side), np.uint16).tobytes()
    data.save_as(name, enforce_file_format=True)


def peak(name: str) -> float:
    tracemalloc.start()
    head = pydicom.dcmread(name, stop_before_pixels=True, specific_tags=["PatientID"])
    assert head.PatientID == "nobody"
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most / 1e6


write("explicit.dcm", ExplicitVRLittleEndian)
write("deflated.dcm", DeflatedExplicitVRLittleEndian)
told, peaks = [], []
for name in ("explicit", "deflated"):
    peaks.append(peak(f"{name}.dcm"))
    size = os.path.getsize(f"{name}.dcm") / 1e6
    told.append(f"{name}: file of {size:.1f} MB, peak of {peaks[-1]:.1f} MB")
print("; ".join(told))
assert peaks[0] < 1, peaks
assert peaks[1] > 2 * side * side * 2 * frames / 1e6, peaks
PYTHON
