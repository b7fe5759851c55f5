"""The emulated CUDA driver, built once for all tests, and an engine's memory on its devices.

The driver is a library that exports the CUDA driver's symbols; `emulation/world.h` has its settings, `emulation/faults.h` the
orders that it takes: failures of calls, copies that hang, delays. The product loads it by its path:

    hbm.driver of a daemon, KVPOOL_CUDA_DRIVER of a client, the first argument of `kvpool_native.Device`

Its memory must not be touched by the host: who reads or writes it otherwise than by copies dies. A forked child cannot use it.

With KVPOOL_TEST_CUDA_DRIVER (a path, or `libcuda.so.1`) the same tests use that driver instead (`make test-gpu`): it takes
no orders and counts no calls, and a machine may have one device. Tests that need more skip and say so.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import weakref
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

REAL = os.environ.get("KVPOOL_TEST_CUDA_DRIVER", "")
SOURCES = Path(__file__).parent / "emulation"
OLDER = Path(__file__).parent / "older_driver.cpp"
BUILT = Path(__file__).parents[3] / "build" / "emulated-driver"
FLAGS = ["-std=c++20", "-O1", "-g", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"]
WARNINGS = ["-Wall", "-Wextra", "-Wconversion", "-Wsign-conversion", "-Wshadow", "-Werror"]
BUILD_TIMEOUT_S = 300.0
# What has the driver offer each method of copies. Read when a device is opened: a test sets it before.
METHODS = {
    "batch": {"KVPOOL_EMULATED_VERSION": "13000", "KVPOOL_EMULATED_JIT": "1"},
    "kernel": {"KVPOOL_EMULATED_VERSION": "12040", "KVPOOL_EMULATED_JIT": "1"},
    "single": {"KVPOOL_EMULATED_VERSION": "12040", "KVPOOL_EMULATED_JIT": "0"},
}
# A delay of copies that only shuffles their order; a longer one is waited for.
DELAY_US_UNSEEN = 2000
NEEDS_ORDERS = pytest.mark.skipif(bool(REAL), reason="a real driver takes no orders")
LEGACY_STREAM = 1
KINDS = ("contexts", "memory", "reservations", "mappings", "host", "registrations", "streams", "events", "modules")


def driver_path() -> str:
    """The library; of a real driver the one whose method the test has chosen. Skips the test where there is no compiler."""
    return os.environ.get("KVPOOL_CUDA_DRIVER", REAL) if REAL else _emulated_driver()


@cache
def _emulated_driver() -> str:
    sources = sorted(SOURCES.iterdir())
    return _built("emulated_driver", sources, [str(source) for source in sources if source.suffix == ".cpp"])


@cache
def _older_driver(flag: str) -> str:
    """The real driver without its batch call, or without a compiler, too."""
    return _built("older_driver", [OLDER], [str(OLDER), flag, "-Wl,--no-as-needed", _file_of(REAL)])


def _built(name: str, sources: list[Path], arguments: list[str]) -> str:
    """A library of these sources, built where they or the arguments have changed."""
    digest = hashlib.blake2b(" ".join([*FLAGS, *arguments]).encode(), digest_size=8)
    for source in sources:
        digest.update(source.read_bytes())
    library = BUILT / f"{name}-{digest.hexdigest()}.so"
    if library.exists():
        return str(library)
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed: apt-get install g++")
    BUILT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILT) as directory:
        made = Path(directory) / "made.so"
        command = [compiler, *FLAGS, *WARNINGS, *arguments, "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
        assert done.returncode == 0, done.stderr
        made.rename(library)
    return str(library)


def _file_of(library: str) -> str:
    """The file of a library that the loader finds by this name or path. The name may be a link to one with a longer version."""
    ctypes.CDLL(library)
    name = Path(library).name.partition(".so")[0] + ".so"
    rows = (row.split() for row in Path("/proc/self/maps").read_text().splitlines())
    return next(row[-1] for row in rows if Path(row[-1]).name.startswith(name))


def environment(method: str = "batch", **settings: str) -> dict[str, str]:
    """The variables of a process whose clients are to use the driver; `order="1,0"` is KVPOOL_EMULATED_ORDER and so on."""
    if REAL:
        if set(settings) - {"delay_us"}:
            pytest.skip(f"a real driver has no {', '.join(settings)} to set")
        drivers = {
            "batch": lambda: REAL,
            "kernel": lambda: _older_driver("-DHAS_JIT=1"),
            "single": lambda: _older_driver("-DHAS_JIT=0"),
        }
        return {"KVPOOL_CUDA_DRIVER": drivers[method]()}
    named = {f"KVPOOL_EMULATED_{name.upper()}": value for name, value in settings.items()}
    return {"KVPOOL_CUDA_DRIVER": driver_path(), **METHODS[method], **named}


def order(text: str) -> None:
    """Gives the driver of this process orders, as in `faults.h`. Skips the test where it takes none."""
    if not _is_for_all(text):
        _library().kvpool_emulated_control(text.encode())


def calls(name: str) -> int:
    """How often this process has made a call. Skips the test where nobody counts them."""
    _require_emulated("counts no calls")
    return int(_library().kvpool_emulated_calls(name.encode()))


def live() -> dict[str, int]:
    """What lives of this process on the driver, by kind. Skips the test where nobody counts it."""
    _require_emulated("does not say what lives on it")
    return {kind: int(_library().kvpool_emulated_live(kind.encode())) for kind in KINDS}


def count_devices() -> int:
    """How many there are."""
    found = ctypes.c_int()
    _check("cuInit", _library().cuInit(0))
    _check("cuDeviceGetCount", _library().cuDeviceGetCount(ctypes.byref(found)))
    return found.value


def require_two_devices() -> None:
    """Skips the test where there are fewer."""
    if (found := count_devices()) < 2:
        pytest.skip(f"there are {found} devices here, expected 2")


def _is_for_all(text: str) -> bool:
    """Whether a real driver is used, which obeys these orders by what it is: no fault, and delays that no test waits for. Skips
    the test where it does not."""
    orders = [line.split() for line in text.splitlines()]
    if REAL and not all(
        words[0] == "clear" or (words[0] == "delay_us" and int(words[1]) <= DELAY_US_UNSEEN) for words in orders
    ):
        _require_emulated("takes no orders")
    return bool(REAL)


def _require_emulated(why: str) -> None:
    if REAL:
        pytest.skip(f"a real driver {why}")


class Control:
    """A file of orders for the drivers of other processes; give them `environment`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.order("")

    @property
    def environment(self) -> dict[str, str]:
        """The variable that has a process read the file."""
        return {"KVPOOL_EMULATED_CONTROL": str(self.path)}

    def order(self, text: str) -> None:
        """Replaces all orders; processes follow within some milliseconds, at their next call or copy. Skips as `order` does."""
        if _is_for_all(text):
            return
        written = self.path.with_suffix(".new")
        written.write_text(text)
        os.replace(written, self.path)


class EmulatedArray:
    """An engine's array in the memory of an emulated device, as libraries share arrays: `__cuda_array_interface__`.

    Read and written whole, by copies of the driver that are done when the call returns.
    """

    def __init__(self, array: npt.NDArray[np.generic], *, ordinal: int = 0) -> None:
        self._context = _context_of(ordinal)
        self._dtype = array.dtype
        self._size = array.nbytes
        self.shape = array.shape
        address = ctypes.c_uint64()
        with self._context:
            _check("cuMemAlloc_v2", _library().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(self._size)))
        self.address = address.value
        self._finalizer = weakref.finalize(self, _free, self._context, self.address)
        self.write(array)

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {
            "shape": self.shape,
            "typestr": self._dtype.str,
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }

    def write(self, array: npt.NDArray[np.generic]) -> None:
        """Copies an array of the same shape and type to the device."""
        assert (array.shape, array.dtype) == (self.shape, self._dtype)
        source = np.ascontiguousarray(array)
        pointer = ctypes.c_void_p(source.ctypes.data)
        with self._context:
            failed = _library().cuMemcpyHtoD_v2(ctypes.c_uint64(self.address), pointer, ctypes.c_size_t(self._size))
            _check("cuMemcpyHtoD_v2", failed)
            # Of memory that is not registered the call returns before the last bytes are there.
            _check("cuStreamSynchronize", _library().cuStreamSynchronize(ctypes.c_void_p(LEGACY_STREAM)))

    def read(self) -> npt.NDArray[np.generic]:
        """Copies it from the device, behind the default stream."""
        target = np.empty(self.shape, self._dtype)
        pointer = ctypes.c_void_p(target.ctypes.data)
        with self._context:
            failed = _library().cuMemcpyDtoH_v2(pointer, ctypes.c_uint64(self.address), ctypes.c_size_t(self._size))
            _check("cuMemcpyDtoH_v2", failed)
        return target

    def free(self) -> None:
        """Gives the memory back."""
        self._finalizer()


class EmulatedStream:
    """An engine's own stream: what it writes there arrives later, and not before what it was given first."""

    def __init__(self) -> None:
        self._context = _context_of(0)
        self._sources: list[npt.NDArray[np.generic]] = []  # of copies that may not be done
        handle = ctypes.c_void_p()
        with self._context:
            _check("cuStreamCreate", _library().cuStreamCreate(ctypes.byref(handle), 1))
        self.handle = int(handle.value or 0)
        self._finalizer = weakref.finalize(self, _destroy, self._context, self.handle)

    def write(self, target: EmulatedArray, array: npt.NDArray[np.generic]) -> None:
        """Gives the stream a copy of an array to a device array of the same size. Returns before it is done."""
        source = np.ascontiguousarray(array).copy()
        self._sources.append(source)
        pointers = ctypes.c_uint64(target.address), ctypes.c_uint64(source.ctypes.data)
        size, stream = ctypes.c_size_t(source.nbytes), ctypes.c_void_p(self.handle)
        with self._context:
            _check("cuMemcpyAsync", _library().cuMemcpyAsync(*pointers, size, stream))

    def synchronize(self) -> None:
        """Waits for everything that the stream was given."""
        with self._context:
            _check("cuStreamSynchronize", _library().cuStreamSynchronize(ctypes.c_void_p(self.handle)))
        self._sources.clear()

    def free(self) -> None:
        """Waits, and gives the stream back."""
        self.synchronize()
        self._finalizer()


class _Context:
    """A device's primary context as the thread's current one. Retained once, for as long as the process lives."""

    def __init__(self, ordinal: int) -> None:
        _check("cuInit", _library().cuInit(0))
        self._handle = ctypes.c_void_p()
        _check("retain", _library().cuDevicePrimaryCtxRetain(ctypes.byref(self._handle), ordinal))

    def __enter__(self) -> None:
        _check("push", _library().cuCtxPushCurrent_v2(self._handle))

    def __exit__(self, *_: object) -> None:
        popped = ctypes.c_void_p()
        _check("pop", _library().cuCtxPopCurrent_v2(ctypes.byref(popped)))


@cache
def _context_of(ordinal: int) -> _Context:
    return _Context(ordinal)


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(REAL or _emulated_driver())
    if not REAL:
        library.kvpool_emulated_calls.restype = ctypes.c_uint64
        library.kvpool_emulated_live.restype = ctypes.c_uint64
    return library


def _free(context: _Context, address: int) -> None:
    with context:
        _check("cuMemFree_v2", _library().cuMemFree_v2(ctypes.c_uint64(address)))


def _destroy(context: _Context, handle: int) -> None:
    with context:
        _check("cuStreamDestroy_v2", _library().cuStreamDestroy_v2(ctypes.c_void_p(handle)))


def _check(name: str, code: int) -> None:
    if code != 0:
        raise RuntimeError(f"{name} failed: {code}")
