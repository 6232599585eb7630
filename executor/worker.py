"""The worker process: one engine between two pipes, taking orders and sending reports.

    driver ──Order──► reader thread ──► inbox ──► main loop ──► engine ──list[Report]──► driver

Owns the process: its cores, its death with the driver, its two loops. Knows no scheduler and no clock;
what an order means is the engine's business. Started as `python -m executor.worker NAME DRIVER_PID`, with
orders on standard input and reports on standard output; what anybody prints goes to standard error.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import BinaryIO, cast

from executor.affinity import pin
from executor.protocols import EngineLost, Order, Report, RolloutEngine, TrainingEngine
from executor.wire import Crashed, Hello, Message, WorkerSpec, pack, read
from marlaas.commands import Generate
from marlaas.errors import MarlaasError
from marlaas.events import CommandFailed

Send = Callable[[Message], None]
Inbox = queue.SimpleQueue[Order]

_PR_SET_PDEATHSIG = 1


def main(driver_pid: int) -> None:
    """Be a worker until the driver is gone or the engine raises."""
    die_with_driver(driver_pid)
    orders, reports = _take_pipes()

    def send(message: Message) -> None:
        reports.write(pack(message))
        reports.flush()

    spec = cast(WorkerSpec, read(orders))
    if spec.is_pinned:
        pin(spec.cores)
    serve(spec, orders, send)


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pipes found as standard input and output, out of reach of whoever reads or prints."""
    orders, reports = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return orders, reports


def die_with_driver(driver_pid: int) -> None:
    """See to it that this process does not outlive the driver, however that ends.

    Interrupts of the terminal, and the SIGTERM that systemd and Slurm send to every process of a job, are the
    driver's to handle. On Linux the kernel kills this process with the
    driver's, even in the middle of a computation; elsewhere the reader thread's end of file has to do.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A handler and not SIG_IGN, which the engine's own processes would inherit.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != driver_pid:  # the driver died before the request above was made
        os._exit(1)


def serve(spec: WorkerSpec, stream: BinaryIO, send: Send) -> None:
    """Work until the engine raises, with orders read from a stream; then, or at its end, end the process."""
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=_read_orders, args=(stream, inbox), daemon=True).start()
    work(spec, inbox, send)
    sys.stderr.flush()
    os._exit(1)  # the reader thread and the engine's own must not hold the process up


def work(spec: WorkerSpec, inbox: Inbox, send: Send) -> None:
    """Build the engine, say hello, carry out orders until an exception ends it, which is sent."""
    try:
        engine = build(spec)
        send(Hello(pid=os.getpid()))
        if spec.kind == "replica":
            _roll_out(cast(RolloutEngine, engine), inbox, send)
        else:
            _train(cast(TrainingEngine, engine), inbox, send)
    except Exception as error:  # noqa: BLE001 - whatever an engine raises is told to the driver
        traceback.print_exc()
        with contextlib.suppress(OSError):  # the driver may be what is gone
            send(Crashed(reason=one_line(error)))


def build(spec: WorkerSpec) -> RolloutEngine | TrainingEngine:
    """Call the engine's factory, named `package.module:function`."""
    module, _, function = spec.engine.partition(":")
    factory = getattr(importlib.import_module(module), function)
    return cast(RolloutEngine | TrainingEngine, factory(spec))


def one_line(error: BaseException) -> str:
    """An exception as `Type: message`, one of our own as its message; on one line of bounded length."""
    told = str(error) if isinstance(error, MarlaasError) else f"{type(error).__name__}: {error}"
    text = " ".join(told.split())
    return text if len(text) <= 500 else text[:497] + "..."


def _read_orders(stream: BinaryIO, inbox: Inbox) -> None:
    try:
        while True:
            inbox.put(cast(Order, read(stream)))
    except (EOFError, OSError):
        os._exit(0)  # the driver is gone: nobody wants the rest of this computation


def _roll_out(engine: RolloutEngine, inbox: Inbox, send: Send) -> None:
    """Take what orders there are, run one iteration, report; wait only when the engine has nothing to do."""
    while True:
        reports: list[Report] = []
        for order in _waiting_orders(inbox, block=not engine.is_busy()):
            try:
                engine.start(order)
            except Exception as error:  # noqa: BLE001 - one order's failure is its own
                traceback.print_exc()
                reports += failures(order, one_line(error))
        reports += engine.step()
        if reports:
            send(reports)


def _train(engine: TrainingEngine, inbox: Inbox, send: Send) -> None:
    while True:
        order = inbox.get()
        try:
            report = engine.run(order)
        except EngineLost:
            raise
        except Exception as error:  # noqa: BLE001 - one order's failure is its own
            traceback.print_exc()
            send(failures(order, one_line(error)))
        else:
            send([report])


def failures(order: Order, reason: str) -> list[Report]:
    """The reports that an order could not be carried out: one per trajectory for `Generate`, else one."""
    command = order.command
    trajectories = command.trajectories if isinstance(command, Generate) else (None,)
    return [
        Report(event=CommandFailed(at=0, command=command.id, reason=reason, trajectory=trajectory))
        for trajectory in trajectories
    ]


def _waiting_orders(inbox: Inbox, block: bool) -> Iterator[Order]:
    try:
        yield inbox.get(block=block)
        while True:
            yield inbox.get_nowait()
    except queue.Empty:
        return


if __name__ == "__main__":
    main(
        driver_pid=int(sys.argv[2])
    )  # the first argument is the worker's name, for people who list processes
