"""A replica in simulated time: an engine behind slots, waking only when its batch changes.

Owns residency and what is said of it, and dies silently: nothing it was doing is answered any more. How
long the batch takes is the engine's; what trajectories do is the plans'.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from marlaas.commands import AbortTurns, Generate, LoadAdapter, UnloadAdapter
from marlaas.events import (
    AdapterLoaded,
    AdapterUnloaded,
    CommandFailed,
    EngineMeasured,
    Event,
    TurnGenerated,
    TurnsAborted,
)
from marlaas.runtime import Emit
from sim.costs import FS_PER_NS, IterationCosts
from sim.engine import Chore, Counters, Engine
from sim.host import Host, Percent
from sim.rules import EngineRules
from sim.sequences import Adapter, Sequence
from sim.timeline import Timeline
from sim.workload import Plans


class ReplicaTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of a replica beside its engine's, in nanoseconds."""

    load_ns: int
    unload_ns: int
    overhead_ns: int
    measure_every_ns: int | None = None


def fingerprint(adapter: Adapter) -> str:
    """What stands for the weights of an adapter version, which the simulation does not have."""
    task, version = adapter
    return f"{task}-v{version}"


class Replica:
    """One incarnation of a replica; a restart makes a new one."""

    def __init__(
        self,
        name: str,
        costs: IterationCosts,
        rules: EngineRules,
        times: ReplicaTimes,
        num_slots: int,
        plans: Plans,
        timeline: Timeline,
        host: Host,
        emit: Emit,
    ) -> None:
        self.name = name
        self.is_alive = True
        self._costs = costs
        self._engine = Engine(costs, rules, counts=times.measure_every_ns is not None)
        self._times = times
        self._num_slots = num_slots
        self._plans = plans
        self._timeline = timeline
        self._emit = emit
        self._slots: set[Adapter] = set()
        self._is_busy = False
        self._wake_ns: int | None = None
        self._counted = Counters()
        self._host = host
        host.join(name, self._set_pace)

    def stop(self) -> None:
        """Die silently."""
        self.is_alive = False
        self._host.leave(self.name)

    # --- orders ----------------------------------------------------------------------------------

    def load(self, command: LoadAdapter) -> None:
        """Take a slot at the next boundary; the batch stands still while weights are copied."""
        adapter = (command.task, command.version)
        if adapter not in self._slots and len(self._slots) == self._num_slots:
            self._fail(command.id, f"all {self._num_slots} slots hold an adapter; unload one first")
            return
        self._slots.add(adapter)
        answer = partial(AdapterLoaded, command=command.id, fingerprint=fingerprint(adapter))
        self._run_chore(self._times.load_ns, answer)

    def unload(self, command: UnloadAdapter) -> None:
        """Give a slot up; refused while turns use it."""
        adapter = (command.task, command.version)
        if self._engine.is_using(adapter):
            self._fail(command.id, f"{fingerprint(adapter)} has running turns")
            return
        self._slots.discard(adapter)
        self._run_chore(self._times.unload_ns, partial(AdapterUnloaded, command=command.id))

    def generate(self, command: Generate) -> None:
        """Queue one turn of each trajectory; refused where the adapter is not resident."""
        adapter = (command.task, command.version)
        if adapter not in self._slots:
            for trajectory in command.trajectories:
                self._fail(command.id, f"{fingerprint(adapter)} is not resident", trajectory)
            return
        now_ns = self._timeline.now_ns
        self._catch_up(now_ns)
        self._engine.submit(now_ns, self._sequences(command, adapter))
        self._arm(now_ns)

    def abort(self, command: AbortTurns) -> None:
        """Stop turns at the next boundary."""
        now_ns, overhead_ns = self._timeline.now_ns, self._times.overhead_ns
        self._catch_up(now_ns)

        def answer() -> None:
            event = TurnsAborted(at=self._timeline.now_ns + overhead_ns, command=command.id)
            self._timeline.put(overhead_ns, self._tell, event)

        trajectories = frozenset(command.trajectories)
        self._engine.abort(now_ns, command.generate, trajectories, Chore(0, answer))
        self._arm(now_ns)

    def _sequences(self, command: Generate, adapter: Adapter) -> list[Sequence]:
        plan, spec = self._plans.of(command.task, command.step), self._plans.tasks[command.task]
        contexts, outputs, prompts = plan.contexts[command.turn], plan.outputs[command.turn], plan.contexts[0]
        number, limit, samples = command.id, spec.max_new_tokens, spec.samples
        return [
            Sequence(number, i, adapter, contexts[i], outputs[i], limit, i // samples, prompts[i])
            for i in command.trajectories
        ]

    def _run_chore(self, duration_ns: int, answer: Callable[..., Event]) -> None:
        now_ns = self._timeline.now_ns
        self._catch_up(now_ns)
        self._engine.run_chore(now_ns, Chore(duration_ns, partial(self._answer, answer)))
        self._arm(now_ns)

    # --- time ------------------------------------------------------------------------------------

    def _set_pace(self, pace: Percent) -> None:
        """Go on slower or faster from the next boundary on."""
        now_ns = self._timeline.now_ns
        self._catch_up(now_ns)
        self._engine.set_costs(now_ns, self._costs.scaled(pace))
        self._arm(now_ns)

    def _arm(self, now_ns: int) -> None:
        """Make sure to wake when the engine's pass ends; a wake-up that became too early is let pass."""
        wake_ns = self._engine.wake_ns
        if (wake_ns is None) is self._is_busy:
            self._is_busy = not self._is_busy
            self._host.note(self.name, self._is_busy)
        if wake_ns is not None and (self._wake_ns is None or wake_ns < self._wake_ns):
            self._wake_ns = wake_ns
            self._timeline.put(wake_ns - now_ns, self._wake, wake_ns)

    def _wake(self, now_ns: int) -> None:
        if now_ns == self._wake_ns and self.is_alive:
            self._wake_ns = None
            self._catch_up(now_ns)
            self._arm(now_ns)

    def _catch_up(self, now_ns: int) -> None:
        """Carry the engine to the present and pass on what ended; to be done before every order."""
        ended = self._engine.advance(now_ns)
        if ended:
            self._pass_on(now_ns, ended)
        if self._times.measure_every_ns is not None:
            self._measure(self._times.measure_every_ns)

    def _pass_on(self, now_ns: int, ended: list[Sequence | Chore]) -> None:
        """Tell of turns, after the overhead that lies between engine and scheduler, and do chores."""
        overhead_ns = self._times.overhead_ns
        told_ns = now_ns + overhead_ns
        for item in ended:
            if isinstance(item, Chore):
                item.done()
                continue
            task, version = item.adapter
            turn = TurnGenerated(
                at=told_ns,
                command=item.command,
                trajectory=item.trajectory,
                task=task,
                version=version,
                prompt_tokens=item.prompt_tokens,
                output_tokens=item.output_tokens,
            )
            if overhead_ns:
                self._timeline.put(overhead_ns, self._tell, turn)
            elif self.is_alive:
                self._emit(turn)

    def _measure(self, every_ns: int) -> None:
        """Report the engine's counters when it has been busy long enough, or has come to rest."""
        counters, before = self._engine.counters, self._counted
        busy_fs = counters.busy_fs - before.busy_fs
        is_resting = self._engine.wake_ns is None
        if busy_fs and (is_resting or busy_fs >= every_ns * FS_PER_NS):
            self._counted = msgspec.structs.replace(counters)
            self._emit(_measured(self.name, counters, before, self._timeline.now_ns))

    def _answer(self, event: Callable[..., Event]) -> None:
        self._emit(event(at=self._timeline.now_ns))

    def _fail(self, command: int, reason: str, trajectory: int | None = None) -> None:
        self._answer(partial(CommandFailed, command=command, reason=reason, trajectory=trajectory))

    def _tell(self, event: Event) -> None:
        if self.is_alive:
            self._emit(event)


def _measured(name: str, now: Counters, before: Counters, at: int) -> EngineMeasured:
    """The difference of two readings as an event."""
    return EngineMeasured(
        at=at,
        worker=name,
        num_iterations=now.num_iterations - before.num_iterations,
        busy_ns=(now.busy_fs - before.busy_fs) // FS_PER_NS,
        sequences_sum=now.sequences_sum - before.sequences_sum,
        kv_tokens_sum=now.kv_tokens_sum - before.kv_tokens_sum,
        adapters_sum=now.adapters_sum - before.adapters_sum,
        num_prefills=now.num_prefills - before.num_prefills,
        prefill_tokens=now.prefill_tokens - before.prefill_tokens,
        prefill_ns=(now.prefill_fs - before.prefill_fs) // FS_PER_NS,
    )
