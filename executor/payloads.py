"""What a worker needs beyond a scheduler's command: folders, fingerprints, contexts, samples, seeds.

Owns the mapping from command to `Order`. Seeds are fixed by names and numbers alone, so that a retry
repeats what it retries and a tenant's samples do not depend on its neighbours.
"""

from __future__ import annotations

from executor.environments import seed_of
from executor.folders import RunFolder
from executor.protocols import (
    AdapterFolder,
    NewAdapter,
    NextVersion,
    Order,
    Payload,
    TrainingBatch,
    TurnRequest,
    TurnRequests,
)
from executor.transcripts import Transcripts
from marlaas.commands import Command, CreateAdapter, Generate, LoadAdapter, Publish, Train
from marlaas.spec import Experiment


class Payloads:
    """Makes orders of commands; remembers which fingerprint each version was published with."""

    def __init__(self, experiment: Experiment, folder: RunFolder, transcripts: Transcripts) -> None:
        self._experiment = experiment
        self._tasks = {task.name: task for task in experiment.tasks}
        self._folder = folder
        self._transcripts = transcripts
        self._fingerprints: dict[tuple[str, int], str] = {}

    def published(self, task: str, version: int, fingerprint: str) -> None:
        """Remember the fingerprint that later loads of this version must find."""
        self._fingerprints[task, version] = fingerprint

    def order(self, command: Command) -> Order:
        """The order for a worker; raises `Unusable` for a batch that must not be trained on."""
        return Order(command=command, payload=self._payload(command))

    def _payload(self, command: Command) -> Payload | None:
        match command:
            case LoadAdapter(task=task, version=version):
                fingerprint = self._fingerprints[task, version]
                return AdapterFolder(folder=self._folder.adapter(task, version), fingerprint=fingerprint)
            case Generate():
                return self._turns(command)
            case CreateAdapter(task=task):
                return self._new_adapter(task)
            case Train():
                return self._batch(command)
            case Publish(task=task, version=version):
                return NextVersion(
                    adapter_folder=self._folder.adapter(task, version),
                    optimizer_folder=self._folder.optimizer(task, version),
                    cursor={"step": version},
                )
        return None

    def _turns(self, command: Generate) -> TurnRequests:
        task = self._tasks[command.task]
        names = (self._experiment.seed, command.task, command.step)
        return TurnRequests(
            requests=[
                TurnRequest(
                    trajectory=trajectory,
                    context=self._transcripts.begin_turn(command, trajectory),
                    max_new_tokens=task.max_new_tokens,
                    temperature=task.temperature,
                    seed=seed_of("turn", *names, *divmod(trajectory, task.samples), command.turn),
                )
                for trajectory in command.trajectories
            ]
        )

    def _new_adapter(self, name: str) -> NewAdapter:
        return NewAdapter(
            adapter_folder=self._folder.adapter(name, 0),
            optimizer_folder=self._folder.optimizer(name, 0),
            lora=self._experiment.model.lora,
            training=self._tasks[name].training,
            seed=seed_of("adapter", self._experiment.seed, name),
        )

    def _batch(self, command: Train) -> TrainingBatch:
        task = self._tasks[command.task]
        return TrainingBatch(
            samples=self._transcripts.samples(command.task, command.step, command.trajectories),
            adapter_folder=self._folder.adapter(command.task, command.version),
            optimizer_folder=self._folder.optimizer(command.task, command.version),
            training=task.training,
            temperature=task.temperature,
            seed=seed_of("training", self._experiment.seed, command.task, command.step),
        )
