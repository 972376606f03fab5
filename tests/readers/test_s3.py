"""Formats are read from S3: tests with a real server process on the loopback interface."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import fsspec
import h5py
import numpy as np
import pytest

from dlio.data.reader import open_reader
from dlio.errors import SourceError
from dlio_staging.pack_folder import pack
from dlio_staging.stage import stage
from dlio_staging.stage_plan import StageOptions
from dlio_staging.verify import verify

for needed in ("s3fs", "moto"):  # Slow to import: the server and fsspec do that.
    if find_spec(needed) is None:
        pytest.skip(f"no {needed}: pip install 'dlio[s3]' moto", allow_module_level=True)
SECRET = "wJalrXUtnFEMIsecret"


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """URL of an empty bucket, on a server that runs as long as this file's tests."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert server.poll() is None, "the server has ended"
                assert time.monotonic() < deadline, "the server did not start"
                time.sleep(0.05)
        fsspec.filesystem("s3").mkdir("lab")
        yield "s3://lab"
    finally:
        os.environ.clear()
        os.environ.update(before)
        fsspec.filesystem("s3").clear_instance_cache()
        server.terminate()
        server.wait(60)


# aiobotocore leaves closing its sockets to the garbage collector at the end of the process.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")


def test_class_folders_shards_and_hdf5_are_staged_from_s3(
    bucket: str, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLIO_CACHE", str(tmp_path / "cache"))
    files = fsspec.filesystem("s3")
    packed = tmp_path / "packed"
    pack(str(pictures), str(packed))
    files.put(f"{pictures}/", "lab/pictures", recursive=True)
    files.put(f"{packed}/", "lab/packed", recursive=True)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.arange(4000.0).reshape(40, 100), chunks=(8, 100))
    files.put(f"{tmp_path}/a.h5", "lab/a.h5")
    for name in ("pictures", "packed", "a.h5::x"):
        (tmp_path / "tier").mkdir(exist_ok=True)
        done = stage(f"{bucket}/{name}", StageOptions(tiers=f"{tmp_path}/tier:1GiB"))
        assert done.complete
        again = stage(f"{bucket}/{name}", StageOptions(tiers=f"{tmp_path}/tier:1GiB"))
        assert again.read_bytes == 0
    assert verify(str(tmp_path / "tier")).damaged == []
    local, remote = open_reader(str(packed)), open_reader(f"{bucket}/packed")
    assert remote.read(np.arange(12)) == local.read(np.arange(12))
    assert remote.name(3) == local.name(3)


def test_a_missing_object_is_named_without_secrets(bucket: str) -> None:
    with pytest.raises(SourceError, match="no such file") as caught:
        open_reader(f"{bucket}/nowhere")
    assert SECRET not in str(caught.value)
