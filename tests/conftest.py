"""Fixtures and helpers for the tests of several packages."""

import contextlib
import fcntl
import gc
import logging
import operator
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import pytest
from hypothesis import HealthCheck, settings

from dlio.image.native import build as native_build
from tests.warm.pool import WarmPython

# On a busy machine hypothesis draws and runs examples slowly; the code is not at fault.
settings.register_profile(
    "nightly", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=100
)
settings.register_profile("daily", settings.get_profile("nightly"), max_examples=15)
settings.load_profile("daily")


def examples(count: int) -> int:
    """Return how many of `count` examples hypothesis draws in this run: by day, three in twenty."""
    return max(1, count * settings().max_examples // 100)


ROOT = Path(__file__).resolve().parent.parent
SOURCES = os.pathsep.join(str(ROOT / room) for room in ("site", "", "readers", "staging", "bench"))
"""PYTHONPATH for programs in other folders. `site` is the metadata of a copy without features
(tests/house/deletion.py)."""


_STAND_IN = "DLIO_TEST_PYTHON"
"""Environment variable with the stand-in for Python that the controller of pytest-xdist made."""
_NIGHTLY_TIMEOUT_S = 4 * 3600
_WARM = pytest.StashKey[WarmPython]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="also run tests that take minutes")
    parser.addoption(
        "--cold", action="store_true", help="start each process as a new interpreter (slow)"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--nightly"):
        settings.load_profile("nightly")
    # A shell starts background jobs with SIGINT ignored, and children inherit that.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Hundreds of processes would each compile what they import.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Otherwise waiting ranks and threads spin on cores that others need.
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if config.getoption("--cold") or config.getoption("--collect-only"):
        return
    # The sources are tested, of the JPEG decoder too: rebuilt after an edit, where a compiler is.
    if not hasattr(config, "workerinput") and native_build.is_stale():
        with contextlib.suppress(native_build.BuildError):
            native_build.build()
    # Before test modules are imported: some build the command line of `dlio` at import.
    if _STAND_IN not in os.environ:
        warm = config.stash[_WARM] = WarmPython()
        os.environ[_STAND_IN] = warm.executable
        if config.getoption("dist", "no") != "no":
            # The workers of xdist are started with the stand-in, too: that takes a third off
            # their collection of tests.
            warm.start()
            warm.wait()
    sys.executable = os.environ[_STAND_IN]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    warm = terminalreporter.config.stash.get(_WARM, None)
    for reason, count in warm.refused().most_common() if warm else ():
        terminalreporter.write_line(f"{count} commands ran in new interpreters: {reason}")


def pytest_unconfigure(config: pytest.Config) -> None:
    warm = config.stash.get(_WARM, None)
    if warm is not None:
        sys.executable = warm.real
        del os.environ[_STAND_IN]
        warm.close()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without looking for garbage: they all stay, and it takes a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    warm = session.config.stash.get(_WARM, None)
    if warm is not None and any(_starts_processes(item) for item in session.items):
        warm.start()


def _starts_processes(item: pytest.Item) -> bool:
    fixtures = getattr(item, "fixturenames", ())
    module = getattr(item, "module", None)
    return "subprocess" in vars(module) or not {"dlio", "mpirun", "torchrun"}.isdisjoint(fixtures)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test that is marked `alone` while all other workers of xdist are idle."""
    if "PYTEST_XDIST_WORKER" not in os.environ or _STAND_IN not in os.environ:
        return (yield)
    alone = item.get_closest_marker("alone") is not None
    folder = os.path.dirname(os.environ[_STAND_IN])
    # A test that waits to run alone holds the turn, so that no other test begins meanwhile.
    with open(f"{folder}/running", "w") as running:
        with open(f"{folder}/turn", "w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            fcntl.flock(running, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        try:
            return (yield)
        finally:
            # Closing the file is not enough: a process that the test forked may hold it open.
            fcntl.flock(running, fcntl.LOCK_UN)


@pytest.fixture(autouse=True, scope="module")
def _garbage() -> None:
    """Keep objects that earlier tests left out of the module's collections of garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Seed torch before each test: orders and crops without a seed of their own follow it, and must
    not depend on the tests before."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


def _log_state() -> dict[str, object]:
    log, root = logging.getLogger("dlio"), logging.getLogger()
    variables = {name: value for name, value in os.environ.items() if name.startswith("DLIO_")}
    return {
        "dlio's log": (log.propagate, log.disabled, log.level, list(log.handlers)),
        "the root's level": (root.level, root.manager.disable),
        "dlio's variables": variables,
    }


@pytest.fixture(autouse=True)
def _telling() -> Iterator[None]:
    """Have lines that are logged once a process logged again, and fail tests after which later ones
    would not see them: with a logger or a variable of dlio's changed."""
    for module_name, attribute in (
        ("dlio.util.printable", "_told"),
        ("dlio.image.image_warnings", "WARNINGS._told"),
    ):
        if (module := sys.modules.get(module_name)) is not None:
            operator.attrgetter(attribute)(module).clear()
    before = _log_state()
    yield
    after = _log_state()
    log = logging.getLogger("dlio")
    log.propagate, log.disabled = True, False
    assert after == before


@pytest.fixture(autouse=True)
def _cold(request: pytest.FixtureRequest, _telling: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give tests that are marked `cold` the real interpreter."""
    mark = request.node.get_closest_marker("cold")
    if mark is not None and ("nightly" not in mark.args or request.config.getoption("--nightly")):
        monkeypatch.setenv("DLIO_TEST_COLD", "1")


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Fail tests after which signals have another effect: their processes' children inherit it."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.getsignal(number) for number in numbers]
    yield
    after = [signal.getsignal(number) for number in numbers]
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    assert after == before


def _leaves_nightly_out(config: pytest.Config) -> bool:
    return not config.getoption("--nightly") and not any("::" in each for each in config.args)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(
    collector: pytest.Module | pytest.Class, name: str, obj: object
) -> list[pytest.Item] | None:
    """Leave nightly functions out by day: to collect them would take seconds."""
    marks = getattr(obj, "pytestmark", None)
    if not name.startswith("test_") or not marks or not _leaves_nightly_out(collector.config):
        return None
    names = {mark.name for mark in marks}
    return [] if "nightly" in names and "daily" not in names else None


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None]:
    """Leave nightly cases out by day, for the same reason."""
    yield
    if not _leaves_nightly_out(metafunc.config):
        return
    daily = metafunc.definition.get_closest_marker("daily")
    # pytest offers no public way to leave a case out before its item is made.
    cases = vars(metafunc)["_calls"]
    kept = [
        case
        for case in cases
        if (case.id in daily.args if daily else all(mark.name != "nightly" for mark in case.marks))
    ]
    # Without a case left, pytest would call the function without arguments; such an item is
    # deselected below.
    cases[:] = kept or cases


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    named = any("::" in each for each in config.args)
    if not named:
        _check_daily(items)
    _skip_without_gpu([item for item in items if item.get_closest_marker("gpu")])
    _skip_without_features(items)
    nightly = [item for item in items if _is_nightly(item)]
    if config.getoption("--nightly"):
        for item in nightly:
            if not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(_NIGHTLY_TIMEOUT_S))
    elif named:
        for item in nightly:
            item.add_marker(pytest.mark.skip(reason="takes minutes: pytest --nightly runs it"))
    elif nightly:
        # To report each as skipped would take seconds.
        items[:] = [item for item in items if not _is_nightly(item)]
        config.hook.pytest_deselected(items=nightly)


def _skip_without_gpu(items: list[pytest.Item]) -> None:
    if not items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def has_feature(name: str) -> bool:
    """Tell whether a feature's folder has not been deleted (tests/house/deletion.py)."""
    return (ROOT / "dlio" / "features" / name).is_dir()


def _skip_without_features(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("needs"):
            for name in mark.args:
                if not has_feature(name):
                    item.add_marker(pytest.mark.skip(reason=f"needs dlio.features.{name}"))


def _is_nightly(item: pytest.Item) -> bool:
    daily = item.get_closest_marker("daily")
    if daily is not None:
        return _case(item) not in daily.args
    return item.get_closest_marker("nightly") is not None


def _case(item: pytest.Item) -> str:
    """The id of a parametrized test's case."""
    return item.name.partition("[")[2].removesuffix("]")


def _check_daily(items: list[pytest.Item]) -> None:
    """Raise UsageError if a case that is marked `daily` does not exist."""
    cases: dict[str, set[str]] = {}
    for item in items:
        mark = item.get_closest_marker("daily")
        if mark is not None:
            name = item.nodeid.partition("[")[0]
            cases.setdefault(name, set(mark.args)).discard(_case(item))
    missing = [f"{name}[{case}]" for name, rest in cases.items() for case in sorted(rest)]
    if missing:
        raise pytest.UsageError(f"marked daily, but no case: {', '.join(missing)}")


def in_time(condition: Callable[[], bool], seconds: float = 60) -> bool:
    """Return True once a condition holds, False when it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def is_running(pid: int) -> bool:
    """True if a process exists and is not a zombie.

    Orphans stay zombies in a container whose first process does not reap them.
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def shared_folders_of(fingerprint: str) -> set[Path]:
    """Return the folders in shared memory that hold a data set.

    Other jobs of this user may have folders next to them, and come and go at any time.

    Args:
        fingerprint: of the data set, with which the names of its folders begin.
    """
    from dlio.util.shared_folders import SHARED_MEMORY, user_folder

    return set(Path(SHARED_MEMORY, user_folder()).glob(f"{fingerprint}*"))


class TorchRun(Protocol):
    def __call__(self, ranks: int, *argv: str) -> list[str]: ...


@pytest.fixture(scope="session")
def torchrun() -> TorchRun:
    """Run a Python script as ranks of torch.distributed, as torchrun starts them, without MPI.

    Returns the ranks' standard outputs, by rank. Fails when a rank fails.
    """

    def run(ranks: int, *argv: str) -> list[str]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        processes = [
            subprocess.Popen(
                [sys.executable, *argv],
                env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        outputs = []
        try:
            for rank, process in enumerate(processes):
                said, errors = process.communicate(timeout=400)
                assert process.returncode == 0, f"rank {rank}: {errors}"
                outputs.append(said)
        finally:
            for process in processes:
                process.kill()
                process.communicate()
        return outputs

    return run


@pytest.fixture(scope="session")
def soon() -> Callable[[Callable[[], bool]], bool]:
    """`assert soon(lambda: ...)` waits for another process to make a condition true."""
    return in_time


class FullDisk(Protocol):
    """`with full_disk(1000): ...` lets no file grow beyond 1,000 bytes."""

    def __call__(self, count: int) -> AbstractContextManager[None]: ...


@pytest.fixture
def full_disk() -> FullDisk:
    """Simulate a full disk within a `with` block: outside it, pytest's own files must grow."""

    @contextmanager
    def limited(count: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        # Python would leave half of the bytecode of a module that is imported meanwhile.
        compiles, sys.dont_write_bytecode = sys.dont_write_bytecode, True
        resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
        try:
            yield
        finally:
            sys.dont_write_bytecode = compiles
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, handler)

    return limited


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three class folders of four drawn pictures each."""
    from tests.drawn import draw_once

    folder = tmp_path_factory.mktemp("drawn") / "pictures"
    draw_once(folder, images=12, validation=3, classes=3)
    return folder / "train"


@pytest.fixture(scope="session")
def real_images() -> Path:
    """The folder with archives of real images; skips the test if there is none."""
    folder = Path(os.environ.get("DLIO_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "tiny-imagenet-40.tar").exists():
        pytest.skip(f"no real images in {folder} (set DLIO_TEST_DATA)")
    return folder


@pytest.fixture(scope="session")
def imagenet(real_images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ImageNet pictures in class folders, `<wnid>/<name>.JPEG`."""
    folder = tmp_path_factory.mktemp("imagenet")
    with tarfile.open(real_images / "imagenet-sample-1000.tar") as archive:
        for member in archive.getmembers()[:200]:
            if not member.isfile():
                continue
            name = os.path.basename(member.name)
            class_folder = folder / name.split("_")[0]
            class_folder.mkdir(exist_ok=True)
            stream = archive.extractfile(member)
            assert stream is not None
            (class_folder / name).write_bytes(stream.read())
    return folder


@pytest.fixture(scope="module")
def open_mpi_segments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Point Open MPI's segments at a temporary folder.

    A process that uses Open MPI without mpirun leaves them behind. Lightning does so to find out
    if its process is a rank.
    """
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("segments")
        patch.setenv("OMPI_MCA_btl_sm_backing_directory", str(folder))
        yield


class MpiRun(Protocol):
    """Run a Python program on several ranks; raises when it outlasts its deadline."""

    def __call__(
        self,
        ranks: int,
        *args: str,
        env: dict[str, str] | None = None,
        timeout_s: float = 400,
        options: Sequence[str] = (),
    ) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture(scope="session")
def mpirun() -> MpiRun:
    """`mpirun(4, "script.py", "arg")` runs `python script.py arg` on 4 ranks."""
    environment = Path(sys.executable).parent / "mpirun"
    launcher = str(environment) if environment.exists() else shutil.which("mpirun")
    if launcher is None:
        pytest.skip("no mpirun: pip install 'dlio[mpi]'")

    def run(
        ranks: int,
        *args: str,
        env: dict[str, str] | None = None,
        timeout_s: float = 400,
        options: Sequence[str] = (),
    ) -> subprocess.CompletedProcess[str]:
        full = {
            **os.environ,
            "PYTHONPATH": SOURCES,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_btl": "^ofi",  # Looking for fabrics takes a second.
            "OMPI_MCA_mtl": "^ofi",
            "OMP_NUM_THREADS": "1",
            "DLIO_TIMEOUT": "180",
            **(env or {}),
        }
        command = [launcher, "--oversubscribe", "--bind-to", "none", "-n", str(ranks), *options]
        while True:
            done = subprocess.run(
                [*command, sys.executable, *args],
                env=full,
                timeout=timeout_s,
                capture_output=True,
                text=True,
                check=False,
            )
            # mpirun fails with this message, before any rank runs, when a network interface
            # vanishes while it lists them.
            if "listener thread failed to start" not in done.stderr:
                return done

    return run
