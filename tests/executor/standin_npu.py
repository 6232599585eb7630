"""Makes torch see devices of kind `npu` that have no kernels of their own, the way torch_npu would.

A folder on the import path carries a distribution whose `torch.backends` entry point is `autoload`, as
torch_npu's does: whatever process imports torch gets the device, and the code under test needs no change.
What `standin_npu.cpp` computes, it computes with the CPU's kernels on copies. This is also `torch.npu`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

SOURCE = Path(__file__).with_suffix(".cpp")
LIBRARY, SEEN = "STANDIN_NPU_LIBRARY", "STANDIN_NPU_SEEN"


def build(folder: Path) -> Path:
    """Compile the device against the installed torch, in a quarter of a minute or so."""
    import torch
    from torch.utils.cpp_extension import include_paths, library_paths

    library = folder / "libstandin_npu.so"
    includes = [f"-I{path}" for path in include_paths()]
    (torch_libraries,) = library_paths()
    links = [f"-L{torch_libraries}", "-lc10", "-ltorch_cpu", "-ltorch", f"-Wl,-rpath,{torch_libraries}"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    compiler = ["g++", "-std=c++20", "-O0", "-w", "-shared", "-fPIC", abi, *includes]
    subprocess.run([*compiler, str(SOURCE), "-o", str(library), *links], check=True)
    return library


def install(folder: Path) -> Path:
    """Lay out a path entry under which torch_npu seems to be installed, of the release of this torch."""
    import torch

    version = torch.__version__.partition("+")[0]
    info = folder / f"torch_npu-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch_npu\nVersion: {version}\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = standin_npu:autoload\n")
    return folder


def surroundings(site: Path, library: Path | None, seen: Path) -> dict[str, str]:
    """The environment of a process with the device, or of one like it on the CPU.

    Notes go to `seen`: PID.operators has what fell back to the CPU, PID.functions what ran of `executor/`.
    """
    path = [str(site), str(SOURCE.parent), *filter(None, sys.path)]
    device = {} if library is None else {LIBRARY: str(library)}
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), SEEN: str(seen), **device}


def autoload() -> None:
    """What `import torch` calls: register the device, if there is to be one.

    The CPU's fused attention sums in another order than the formula that every other device gets: without it
    both compute the same numbers.
    """
    import torch

    torch.backends.cuda.enable_flash_sdp(False)
    if LIBRARY not in os.environ:
        return
    torch.ops.load_library(os.environ[LIBRARY])
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    torch.ops.standin_npu.start()
    import standin_hccl

    standin_hccl.register()
    _note_functions(Path(os.environ[SEEN]))


def _note_functions(folder: Path) -> None:
    """Note every function of `executor/` that runs in this process, once, and which devices it sees."""
    seen: set[CodeType] = set()
    lines = (folder / f"{os.getpid()}.functions").open("a", buffering=1, encoding="utf-8")
    lines.write(f"devices {os.environ.get('ASCEND_RT_VISIBLE_DEVICES')}\n")

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code not in seen:
            seen.add(code)
            file = Path(code.co_filename)
            if file.parent.name == "executor" and (file.parents[1].name != "tests" or "hccl" in file.stem):
                lines.write(f"{file.stem}.{code.co_qualname}\n")

    threading.setprofile(note)
    sys.setprofile(note)


# --- the device module, `torch.npu` ---------------------------------------------------------------------


def is_available() -> bool:
    """Where there is a device to see."""
    return device_count() > 0


def is_initialized() -> bool:
    """From the start."""
    return True


def device_count() -> int:
    """Devices that this process sees."""
    import torch

    return int(torch.ops.standin_npu.device_count())


def current_device() -> int:
    """Index of this thread's device."""
    import torch

    return int(torch.ops.standin_npu.current_device())


def set_device(device: int) -> None:
    """Choose this thread's device."""
    import torch

    torch.ops.standin_npu.set_device(int(device))


class Stream:
    """All work is done when the call returns: nothing to wait for."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Any = None) -> Event:
        """It has happened."""
        return event or Event()


class Event:
    """It has happened."""

    def record(self, stream: Any = None) -> None:
        """Nothing to note."""

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


def current_stream(device: Any = None) -> Stream:
    """The only one."""
    return Stream()


def stream(stream: Stream) -> contextlib.AbstractContextManager[None]:
    """Work in it is work at once."""
    return contextlib.nullcontext()


def _is_in_bad_fork() -> bool:
    return False


def manual_seed_all(seed: int) -> None:
    """Nothing to do: the CPU's kernels draw from the CPU's generator."""
