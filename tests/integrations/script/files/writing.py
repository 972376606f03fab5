"""Trains, and writes, moves and removes files as scripts for one process do."""

import csv
import glob
import json
import logging
import os
import pathlib
import shutil
import sys
import tempfile

import numpy as np
import pyarrow
import torch
from pyarrow import parquet
from torch.utils.data import DataLoader, TensorDataset

from dlio.util.folders import remove_entry

with open("tries") as file:
    tries = int(file.read())
with open("tries", "w") as file:
    file.write(str(tries + 1))
number = 0
while os.path.exists(f"out/run{number}"):
    number += 1
run = f"out/run{number}"
os.makedirs(run)
if os.path.exists("fresh"):
    sys.exit("fresh exists")
os.mkdir("fresh")
logging.basicConfig(filename=f"{run}/train.log", level=logging.INFO, format="%(message)s")

torch.manual_seed(0)
x = torch.randn(48, 6)
y = x @ torch.randn(6, 1)
model = torch.nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
for epoch in range(4):
    for a, b in DataLoader(TensorDataset(x, y), batch_size=16):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(a), b).backward()
        optimizer.step()
    with open(f"{run}/log.csv", "a") as file:
        csv.writer(file).writerow([epoch, epoch * 2])
    logging.info("epoch %d", epoch)
    torch.save(model.state_dict(), f"{run}/tmp.pt")
    if os.path.exists(f"{run}/last.pt"):
        os.unlink(f"{run}/last.pt")
    os.rename(f"{run}/tmp.pt", f"{run}/last.pt")
    os.link(f"{run}/last.pt", f"{run}/step-{epoch}.pt")
    kept.append(f"{run}/step-{epoch}.pt")
    if len(kept) > 2:
        os.remove(kept.pop(0))
    assert sorted(glob.glob(f"{run}/step-*.pt")) == kept
    shutil.copy(f"{run}/last.pt", f"{run}/best.pt")
    assert torch.equal(torch.load(f"{run}/best.pt")["weight"], model.weight)
    with tempfile.NamedTemporaryFile("w", dir=run, delete=False) as file:
        json.dump({"epoch": epoch}, file)
    os.replace(file.name, f"{run}/state.json")
    assert json.loads(pathlib.Path(run, "state.json").read_text()) == {"epoch": epoch}

with tempfile.TemporaryDirectory() as folder:
    np.save(f"{folder}/x.npy", np.arange(3))
    shutil.move(f"{folder}/x.npy", f"{run}/x.npy")
assert np.load(f"{run}/x.npy").tolist() == [0, 1, 2]
np.savetxt(f"{run}/text.txt", np.eye(2))
columns = pyarrow.table({"a": [1, 1, 2], "b": [1, 2, 3]})
parquet.write_to_dataset(columns, f"{run}/a", ["a"], basename_template="{i}", create_dir=True)
assert sorted(os.listdir(f"{run}/a/a=1")) == ["0"]
np.arange(4.0).tofile(f"{run}/raw")
assert np.fromfile(f"{run}/raw").tolist() == [0, 1, 2, 3]
table = np.memmap(f"{run}/map", mode="w+", shape=(4,), dtype="f4")
table[:] = 1
deep = pathlib.Path(run, "deep", "er")
deep.mkdir(parents=True)
(deep / "text.txt").write_text("hello")
shutil.copytree(deep, f"{run}/copy")
shutil.rmtree(f"{run}/deep")
assert not deep.exists()
temporary = tempfile.mkdtemp()
for parent in (run, temporary, temporary):
    os.makedirs(f"{parent}/folder/deep")
    at = os.open(parent, os.O_RDONLY)
    if os.path.exists(f"{temporary}/seen"):
        remove_entry(at, "folder")  # As dlio's loaders do.
    else:
        shutil.rmtree("folder", dir_fd=at)
    os.close(at)
    assert not os.path.exists(f"{parent}/folder")
    if parent == temporary:
        pathlib.Path(temporary, "seen").touch()
shutil.rmtree(temporary)
os.symlink("last.pt", f"{run}/link.pt")
torch.load(f"{run}/link.pt")
with open(f"{run}/object.pt", "wb") as file:
    torch.save({"epoch": epoch}, file)
assert torch.load(f"{run}/object.pt") == {"epoch": epoch}
os.chdir(run)
pathlib.Path("inside").write_text("x")
assert os.path.abspath("inside") == f"{os.getcwd()}/inside"
torch.save(model.state_dict(), "final.pt")
torch.load("final.pt")
for folder, _, files in os.walk("."):
    print(folder, sorted(files))
summary = {"number": number, "tries": tries, "there": sorted(os.listdir("."))}
sys.stderr.write(json.dumps(summary) + "\n")
