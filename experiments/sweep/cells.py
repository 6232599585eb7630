"""Cells: the experiment and profile of every combination of axis values and seed.

    study ──► configurations ──► base + settings, checked ──► × seeds ──► cells, each with its key

The seeds are the same for every configuration, and the simulator draws its workload from streams keyed by
seed and names, so configurations meet the same workload: common random numbers.

A value that no combination accepts is the user's mistake and refused; a combination that contradicts itself,
of values that others accept, is a cell with an error. Simulates nothing.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

import msgspec

from experiments import checks, costs
from experiments.load import load_experiment, profile_file, read_text
from experiments.overrides import Override, read_overrides
from experiments.schema import Misfit, one_of
from experiments.sweep.axes import NUM_TASKS, Scalar, Setting
from experiments.sweep.study import SYSTEM, Places, Study
from experiments.yaml_strict import Document, Path, parse, render
from marlaas.errors import InputError
from marlaas.spec import Experiment, Kill
from marlaas.systems import SYSTEMS
from traces.schema import hash_of

if TYPE_CHECKING:
    from sim.hardware_profile import Site
    from sim.profile import Profile

PROFILE = "profile."
KV_TOKENS_KEY = render(costs.KV_TOKENS)
UNKNOWN_KEY = "unknown key"


class Question(msgspec.Struct, frozen=True):
    """What a cell simulates: an experiment, whose own `profile` is not looked at, and a profile."""

    experiment: Experiment
    profile: Profile


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the results: where it stands, and what to simulate or why that cannot be.

    `key` names what is simulated, by content; cells that ask the same question share it.
    """

    columns: dict[str, Scalar]
    seed: int
    key: str = ""
    question: Question | None = None
    error: str | None = None


class Configuration(msgspec.Struct, frozen=True):
    """A combination of one point from every axis."""

    columns: dict[str, Scalar]
    settings: tuple[Setting, ...]


def configurations(study: Study) -> list[Configuration]:
    """Every combination, the last axis running fastest."""
    return [
        Configuration(
            {axis.name: point.label for axis, point in zip(study.axes, points, strict=True)},
            study.fixed + tuple(setting for point in points for setting in point.settings),
        )
        for points in itertools.product(*(axis.points for axis in study.axes))
    ]


def expand(study: Study, base: Base, code: str) -> list[Cell]:
    """Every cell, seeds running fastest; raises `InputError` for a value that no combination accepts.

    `code` says what simulates; another code asks another question.
    """
    found = [(one, _answer(base, one)) for one in configurations(study)]
    _refuse_mistakes(study, found)
    cells: list[Cell] = []
    for one, answer in found:
        if isinstance(answer, InputError):
            seeds = range(base.experiment.seed, base.experiment.seed + study.replications)
            cells += [Cell(columns=one.columns, seed=seed, error=str(answer)) for seed in seeds]
        else:
            cells += _replicate(one.columns, answer, study.replications, code)
    return cells


def _answer(base: Base, configuration: Configuration) -> Question | InputError:
    try:
        return base.question(configuration.settings)
    except InputError as error:
        return error


def _refuse_mistakes(study: Study, found: Sequence[tuple[Configuration, Question | InputError]]) -> None:
    for axis in study.axes:
        for label in axis.labels:
            answers = [answer for one, answer in found if one.columns[axis.name] == label]
            _raise_if_all_fail(answers)
    _raise_if_all_fail([answer for _, answer in found])


def _raise_if_all_fail(answers: Sequence[Question | InputError]) -> None:
    errors = [answer for answer in answers if isinstance(answer, InputError)]
    if len(errors) == len(answers):
        raise errors[0]


def _replicate(columns: dict[str, Scalar], question: Question, num: int, code: str) -> list[Cell]:
    profile = sha256(msgspec.json.encode(question.profile, order="sorted")).hexdigest()
    first = question.experiment.seed
    cells = []
    for seed in range(first, first + num):
        experiment = msgspec.structs.replace(question.experiment, seed=seed, profile=None)
        key = sha256(" ".join([hash_of(experiment), profile, code]).encode()).hexdigest()
        inner = Question(experiment, question.profile)
        cells.append(Cell(columns=columns, seed=seed, key=key, question=inner))
    return cells


# --- the base and what settings make of it -----------------------------------------------------------


class Base:
    """The base experiment of a study, and what settings make of it; remembers what it has read.

    The number of tasks and a system's name are applied to a loaded experiment: those two vary most, and
    loading is what takes time.
    """

    def __init__(self, study: Study) -> None:
        """Read the base with what the study fixes; raises `InputError`."""
        self._study = study
        self._data = parse(read_text(study.base, "the base experiment"), str(study.base)).data
        self._experiments: dict[bytes, Experiment] = {}
        self._documents: dict[str | None, Document] = {}
        self._profiles: dict[tuple[str | None, bytes, Site | None], Profile] = {}
        self.experiment = self._experiment(study.fixed)

    def question(self, settings: Sequence[Setting]) -> Question:
        """The experiment and profile under these settings; raises `InputError`."""
        from sim.profile import workload_of

        experiment = self._experiment(settings)
        profile = self._profile(experiment, [one for one in settings if one.key.startswith(PROFILE)])
        experiment = self._with_kv_pool(experiment, profile, settings)
        for task in experiment.tasks:
            workload_of(task, profile)
        return Question(experiment, profile)

    def _experiment(self, settings: Sequence[Setting]) -> Experiment:
        own = [one for one in settings if not one.key.startswith(PROFILE) and one.key != NUM_TASKS]
        systems = [one for one in own if one.key.split(".")[0] == SYSTEM]
        if all(one.key == SYSTEM and isinstance(one.value, str) for one in systems):
            own = [one for one in own if one not in systems]
        else:
            systems = []
        experiment = self._load(own)
        if systems:
            experiment = msgspec.structs.replace(experiment, system=_require_system(systems[-1]))
        counts = [one for one in settings if one.key == NUM_TASKS]
        return _take(experiment, counts[-1]) if counts else experiment

    def _load(self, settings: Sequence[Setting]) -> Experiment:
        key = _key(settings)
        if key not in self._experiments:
            applied = apply(copy.deepcopy(self._data), settings)
            typed = [override.typed.removeprefix("--set ") for override, _ in applied]
            try:
                self._experiments[key] = load_experiment(self._study.base, typed, with_kv_pool=False)
            except InputError as error:
                raise _blamed(error, applied) from None
        return self._experiments[key]

    def _profile(self, experiment: Experiment, settings: Sequence[Setting]) -> Profile:
        from sim.hardware_profile import site_of

        file = None if self._study.profile is not None else str(profile_file(experiment))
        document = self._profile_document(file)
        computed = isinstance(document.data, dict) and costs.HARDWARE in document.data
        key = file, _key(settings), site_of(experiment) if computed else None
        if key not in self._profiles:
            self._profiles[key] = self._read_profile(file, document, experiment, settings)
        return self._profiles[key]

    def _profile_document(self, file: str | None) -> Document:
        """The profile as plain data, from its file or, without one, from the study."""
        if file not in self._documents:
            if file is None:
                self._documents[file] = Document(self._study.profile, {})
            else:
                self._documents[file] = parse(read_text(FilePath(file), "a profile"), file)
        return self._documents[file]

    def _read_profile(
        self, file: str | None, document: Document, experiment: Experiment, settings: Sequence[Setting]
    ) -> Profile:
        """A profile with settings applied; raises `InputError` at the setting or where the data stands."""
        source = self._study.base if file is None else FilePath(file)
        data = copy.deepcopy(document.data)
        applied = apply(data, settings, PROFILE)
        try:
            return costs.read_profile(data, experiment, source.parent)
        except Misfit as misfit:
            if file is None:
                where = self._study.places(("profile", *misfit.path))
            else:
                where = Places(source, document.lines)(misfit.path)
            for override, setting in applied:
                if _is_to_blame(override, misfit):
                    where = f"{setting.place}: {render(misfit.path)}"
            raise InputError(where, misfit.problem, misfit.wanted) from None

    def _with_kv_pool(
        self, experiment: Experiment, profile: Profile, settings: Sequence[Setting]
    ) -> Experiment:
        """The experiment with the KV pool that the profile computes, unless the base or a setting says it."""
        said = any(one.key == KV_TOKENS_KEY for one in settings) or costs.says_kv_tokens(self._data)
        if profile.replica.kv_tokens is None:
            return experiment
        try:
            if said:
                costs.check_kv_pool(experiment, profile)
            else:
                experiment = costs.with_kv_pool(experiment, profile)
                checks.check(experiment)
        except Misfit as misfit:
            raise InputError(render(misfit.path), misfit.problem, misfit.wanted) from None
        return experiment


def _is_to_blame(override: Override, misfit: Misfit) -> bool:
    """Whether a change made what does not fit: below its path, or a key on the way there."""
    ours, theirs = override.path, misfit.path
    is_on_the_way = misfit.problem == UNKNOWN_KEY and ours[: len(theirs)] == theirs
    return is_on_the_way or theirs[: len(ours)] == ours


def _key(settings: Sequence[Setting]) -> bytes:
    return msgspec.json.encode([(one.key, one.value) for one in settings])


def apply(data: Any, settings: Iterable[Setting], prefix: str = "") -> list[tuple[Override, Setting]]:
    """Apply settings to plain data in place, `*` to every item; `prefix` is left out of their keys.

    Returns each change with the setting that asked for it; raises `InputError` at the setting's place.
    """
    applied = []
    for setting in settings:
        value = msgspec.json.encode(setting.value).decode()
        for key in _spread(data, setting.key.removeprefix(prefix), setting):
            try:
                (override,) = read_overrides([f"{key}={value}"], None, data)
            except InputError as error:
                raise InputError(setting.place, error.problem, error.wanted) from None
            applied.append((override, setting))
    return applied


def _spread(data: Any, key: str, setting: Setting) -> list[str]:
    """The keys that a key with `*` stands for."""
    parts = re.sub(r"\[(\d+|\*)\]", r".\1", key).split(".")
    if "*" not in parts:
        return [key]
    found: list[tuple[Path, Any]] = [((), data)]
    for part in parts:
        found = [(path + step, inner) for path, here in found for step, inner in _below(here, part)]
    if not found:
        wanted = "wanted every * to stand for the items of a list or a mapping that the base has"
        raise InputError(setting.place, f"{key} matches nothing", wanted)
    return [".".join(map(str, path)) for path, _ in found]


def _below(here: Any, part: str) -> list[tuple[Path, Any]]:
    """The steps from `here` that a part of a key allows; a key that is not there yet leads to nothing."""
    if part == "*":
        items = enumerate(here) if isinstance(here, list) else here.items() if isinstance(here, dict) else ()
        return [((name,), inner) for name, inner in items]
    if isinstance(here, list):
        is_index = part.isdigit() and int(part) < len(here)
        return [((part,), here[int(part)] if is_index else None)]
    return [((part,), here.get(part) if isinstance(here, dict) else None)]


def _blamed(error: InputError, applied: Sequence[tuple[Override, Setting]]) -> InputError:
    """The same error, at the place in the study that asked for what is wrong."""
    for override, setting in reversed(applied):
        if error.where == override.typed or error.where.startswith(f"{override.typed}: "):
            where = setting.place + error.where[len(override.typed) :]
            return InputError(where, error.problem, error.wanted)
        path = error.where.rpartition(": ")[2]
        if error.problem == UNKNOWN_KEY and render(override.path).startswith((f"{path}.", f"{path}[")):
            return InputError(f"{setting.place}: {path}", error.problem, error.wanted)
    return error


def _require_system(setting: Setting) -> str:
    if setting.value not in SYSTEMS:
        wanted = one_of(setting.value, SYSTEMS, "systems")
        raise InputError(setting.place, f"unknown system {setting.value!r}", wanted)
    return str(setting.value)


def _take(experiment: Experiment, setting: Setting) -> Experiment:
    """The experiment with its first tasks only, and without what was to be done to the others."""
    num, most = setting.value, len(experiment.tasks)
    if not isinstance(num, int) or isinstance(num, bool) or not 1 <= num <= most:
        raise InputError(setting.place, f"got {num!r}", f"wanted a whole number from 1 to {most}")
    tasks = experiment.tasks[:num]
    names = {task.name for task in tasks}
    operations = tuple(one for one in experiment.operations if isinstance(one, Kill) or one.task in names)
    return msgspec.structs.replace(experiment, tasks=tasks, operations=operations)
