"""What a worker is on a node of a Ray cluster: an actor around the loop that worker processes run too.

    driver ──tell(order, parcels)──► courier ──► inbox ──► work loop ──► engine
    driver ◄──hear()── outbox ◄── courier ◄──────────── reports ◄─────────┘

Three threads, one a concurrency group of Ray: `work` for ever, `tell` in the order of the calls, `hear` as a
long poll, which gathers what was said meanwhile. Knows no scheduler; imports no Ray, so that it can be tested
without.
"""

from __future__ import annotations

import queue
from pathlib import Path

from executor import worker
from executor.protocols import Order, Report
from executor.ray_courier import Courier, Delivery, Parcel, make_root
from executor.wire import Crashed, Hello, Message, WorkerSpec

Said = Hello | Delivery | Crashed


class WorkerActor:
    """One incarnation of a worker; without `is_shared` the run folder is out of its sight."""

    def __init__(self, spec: WorkerSpec, is_shared: bool, above: Path | None = None) -> None:
        self._spec = spec
        self._courier = None if is_shared else Courier(make_root(above))
        self._inbox: worker.Inbox = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Said] = queue.SimpleQueue()

    def work(self) -> None:
        """Be a worker until the engine raises; then `hear` has told so."""
        worker.work(self._spec, self._inbox, self._post)

    def tell(self, order: Order, *parcels: Parcel) -> None:
        """Queue an order, with the folders it needs laid out."""
        try:
            self._inbox.put(self._courier.unpack(order, parcels) if self._courier else order)
        except OSError as error:
            self._post(worker.failures(order, worker.one_line(error)))

    def is_here(self) -> None:
        """Nothing but a sign of life."""

    def hear(self) -> list[Said]:
        """What was said since the last time; waits for something."""
        said = [self._outbox.get()]
        while not self._outbox.empty():
            said.append(self._outbox.get())
        return said

    def _post(self, message: Message | list[Report]) -> None:
        if isinstance(message, list):
            self._outbox.put(self._courier.pack(message) if self._courier else Delivery(reports=message))
        elif isinstance(message, Hello | Crashed):
            self._outbox.put(message)
