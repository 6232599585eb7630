"""How adapters reach workers that do not see the run folder, and how what these make comes back.

    driver's run folder ──parcel──► object store ──► a folder of the worker's node ──► engine
    driver's run folder ◄──commit── driver ◄──parcel── a folder of the worker's node ◄── engine

Owns the translation of an order's folders and the life of their copies: engines read and write ordinary
folders, and durability stays in one place, the driver's. Knows neither Ray nor what is in a folder.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
from msgspec.structs import replace

from executor.commits import commit_folder, sweep_optimizers
from executor.folders import is_optimizer
from executor.protocols import (
    AdapterFolder,
    NewAdapter,
    NextVersion,
    Order,
    Payload,
    Report,
    TrainingBatch,
)
from marlaas.commands import LoadAdapter, UnloadAdapter
from marlaas.events import AdapterCreated, AdapterPublished, CommandFailed

Ref = TypeVar("Ref")

_PREFIX, _LOCK = "marlaas-worker-", ".lock"


class Parcel(msgspec.Struct, frozen=True, kw_only=True):
    """A folder's files by name; `folder` is its path in the driver's run folder."""

    folder: str
    files: dict[str, bytes]


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """Reports of a worker, and the folders that must be durable before anybody hears them, in order."""

    reports: list[Report]
    parcels: list[Parcel] = []


def pack_folder(folder: str, path: Path | None = None) -> Parcel | None:
    """The parcel of a folder of the run, read from `path` if its copy is there; None if there is none."""
    place = path or Path(folder)
    if not place.is_dir():
        return None
    return Parcel(folder=folder, files={file.name: file.read_bytes() for file in sorted(place.iterdir())})


def needed(payload: Payload | None) -> list[str]:
    """The folders that are read to carry out an order."""
    match payload:
        case AdapterFolder(folder=folder):
            return [folder]
        case TrainingBatch(adapter_folder=adapter, optimizer_folder=optimizer):
            return [adapter, optimizer]
    return []


def made(payload: Payload | None) -> list[str]:
    """The folders that carrying out an order makes, in the order they must become durable."""
    match payload:
        case NewAdapter() | NextVersion():
            return [payload.optimizer_folder, payload.adapter_folder]
    return []


class Stock(Generic[Ref]):
    """The driver's side, outward: the present version of each task's folders, put away once for all."""

    def __init__(self, put: Callable[[Parcel], Ref]) -> None:
        self._put = put
        self._present: dict[Path, tuple[str, Ref]] = {}

    def refs(self, order: Order) -> list[Ref]:
        """The parcels an order needs; a folder that is not there is left out, for the engine to miss."""
        found = (self._ref(folder) for folder in needed(order.payload))
        return [ref for ref in found if ref is not None]

    def _ref(self, folder: str) -> Ref | None:
        kind = Path(folder).parent
        held = self._present.get(kind)
        if held is not None and held[0] == folder:
            return held[1]
        parcel = pack_folder(folder)
        if parcel is None:
            return None
        self._present[kind] = folder, self._put(parcel)
        return self._present[kind][1]

    def renew(self, folder: str) -> None:
        """Forget what was put away of a folder that has been made again."""
        if self._present.get(Path(folder).parent, ("",))[0] == folder:
            del self._present[Path(folder).parent]


def commit(delivery: Delivery) -> list[Report]:
    """The driver's side, inward: make what came durable; the reports, which tell of a failure to do so."""
    try:
        for parcel in delivery.parcels:
            commit_folder(Path(parcel.folder), parcel.files)
            if is_optimizer(parcel.folder):
                sweep_optimizers(Path(parcel.folder))
    except OSError as error:
        events = [report.event for report in delivery.reports]
        return [
            Report(event=CommandFailed(at=0, command=event.command, reason=str(error)))
            for event in events
            if isinstance(event, AdapterCreated | AdapterPublished)
        ]
    return delivery.reports


class Courier:
    """The worker's side: keeps the folders that orders speak of under `root`, which it owns."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._payloads: dict[int, Payload | None] = {}
        self._held: dict[tuple[str, int], Path] = {}

    def unpack(self, order: Order, parcels: Sequence[Parcel]) -> Order:
        """Lay out what an order needs; the order with its folders under `root`."""
        for parcel in parcels:
            _lay_out(self._here(parcel.folder), parcel.files)
        command = order.command
        if isinstance(command, LoadAdapter) and isinstance(order.payload, AdapterFolder):
            self._held[command.task, command.version] = self._here(order.payload.folder)
        elif needed(order.payload) or made(order.payload):
            self._payloads[command.id] = order.payload
        elif isinstance(command, UnloadAdapter):
            # Only now: an engine may read an adapter it holds again, when it is short of memory.
            held = self._held.pop((command.task, command.version), None)
            if held is not None:
                shutil.rmtree(held, ignore_errors=True)
        return replace(order, payload=self._translated(order.payload))

    def pack(self, reports: list[Report]) -> Delivery:
        """Reports with what they say was made; copies that have served are removed."""
        parcels: list[Parcel] = []
        for report in reports:
            payload = self._payloads.pop(getattr(report.event, "command", 0), None)
            if isinstance(report.event, AdapterCreated | AdapterPublished):
                packed = [pack_folder(folder, self._here(folder)) for folder in made(payload)]
                parcels += [parcel for parcel in packed if parcel is not None]
            for folder in needed(payload) + made(payload):
                shutil.rmtree(self._here(folder), ignore_errors=True)
        return Delivery(reports=reports, parcels=parcels)

    def _here(self, folder: str) -> Path:
        """The copy of a run's folder `.../adapters/<task>/v<k>` or `.../optimizer/<task>/v<k>`."""
        return self._root.joinpath(*Path(folder).parts[-3:])

    def _translated(self, payload: Payload | None) -> Payload | None:
        match payload:
            case AdapterFolder(folder=folder):
                return replace(payload, folder=str(self._here(folder)))
            case TrainingBatch() | NewAdapter() | NextVersion():
                return replace(
                    payload,
                    adapter_folder=str(self._here(payload.adapter_folder)),
                    optimizer_folder=str(self._here(payload.optimizer_folder)),
                )
        return payload


def _lay_out(folder: Path, files: dict[str, bytes]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def make_root(above: Path | None = None) -> Path:
    """A new folder of this process on this machine; those of processes that have died are removed first.

    Workers are killed and cannot tidy up. A live one holds a lock on its folder, whatever container it is in.
    """
    place = above or Path(tempfile.gettempdir())
    for lock in place.glob(f"{_PREFIX}*/{_LOCK}"):
        _remove_if_dead(lock)
    root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
    handle = open(root / "lock", "wb")  # noqa: SIM115 - open, and so locked, as long as the process lives
    fcntl.flock(handle, fcntl.LOCK_EX)
    _locks.append(handle)
    (root / "lock").rename(root / _LOCK)  # it is not looked for before it is locked
    return root


_locks: list[object] = []


def _remove_if_dead(lock: Path) -> None:
    try:
        with lock.open("rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
    except OSError:  # it lives, belongs to somebody else, or is gone by now
        return
