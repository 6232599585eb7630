"""A YAML file in, a resolved `Experiment` out, or one `InputError` that says what to mend and where.

Owns defaults that need files, `count`, `--set` and `--system`. Resolved means: every key is present, `count`
is 1 everywhere, files are absolute or shipped with the project; dumped and loaded again it is the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from experiments import checks, costs
from experiments.environment_files import is_sample, map_files
from experiments.overrides import Override, read_overrides
from experiments.schema import Misfit, convert, one_of
from experiments.yaml_strict import Document, dump, parse, render
from marlaas.errors import InputError
from marlaas.spec import Experiment

if TYPE_CHECKING:
    from sim.profile import Profile

T = TypeVar("T")
_ROOT = Path(__file__).parent.parent
MODELS = _ROOT / "executor" / "models"
PROFILES = (_ROOT / "experiments" / "profiles", _ROOT / "sim" / "library" / "profiles")


def load_experiment(
    path: Path, settings: Iterable[str] = (), system: str | None = None, *, with_kv_pool: bool = True
) -> Experiment:
    """Read, override, check and resolve an experiment; raises `InputError`.

    With `with_kv_pool`, one that does not say its KV pool gets the one that its profile computes, if it does.
    """
    document = parse(read_text(path, "an experiment"), str(path))
    if not isinstance(document.data, dict):
        raise InputError(str(path), "not a mapping of keys to values", "wanted at least name and tasks")
    overrides = read_overrides(settings, system, document.data)
    experiment = _with_places(lambda: _convert(document.data), document, overrides, path)
    experiment = _resolve(experiment, path)
    if not with_kv_pool or costs.says_kv_tokens(document.data) or not _names_hardware(experiment):
        return experiment
    experiment = costs.with_kv_pool(experiment, load_profile(experiment, check=False))
    _with_places(lambda: checks.check(experiment), document, overrides, path)
    return experiment


def read_text(path: Path, what: str) -> str:
    """The text of a file the user named; raises `InputError` with the nearest existing name."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(str(path), "no such file", f"wanted {what}; {_neighbours(path)}") from None
    except IsADirectoryError:
        raise InputError(str(path), "this is a folder", f"wanted {what}, a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(str(path), f"cannot be read ({error})", f"wanted {what}, YAML in UTF-8") from None


def dump_experiment(experiment: Experiment) -> str:
    """The resolved experiment as YAML that `load_experiment` reads back to the same."""
    return dump(msgspec.to_builtins(experiment))


def model_folder(experiment: Experiment) -> Path:
    """The folder of the base model; raises `InputError` where there is none."""
    path = experiment.model.path
    folder = MODELS / path if (MODELS / path).is_dir() else Path(path)
    if not (folder / "config.json").is_file():
        shipped = sorted(inner.name for inner in MODELS.glob("*") if inner.is_dir())
        problem = f"no model with a config.json at {str(folder)!r}"
        wanted = f"wanted a Hugging Face model folder or a shipped model; {one_of(path, shipped, 'models')}"
        raise InputError("model.path", problem, wanted)
    return folder


def profile_file(experiment: Experiment) -> Path:
    """The file of the simulator's profile; raises `InputError` where none is named or it is not there."""
    if experiment.profile is None:
        wanted = "name one in the YAML or with --set profile=FILE; `marlaas calibrate` makes one from a run"
        raise InputError("profile", "the simulator needs a profile of costs", wanted)
    path = _shipped_profile(experiment.profile) or Path(experiment.profile)
    if not path.is_file():
        names = sorted(file.stem for folder in PROFILES for file in folder.glob("*.yaml"))
        wanted = (
            f"wanted a profile YAML or a shipped profile; {one_of(experiment.profile, names, 'profiles')}"
        )
        raise InputError("profile", f"no such file {str(path)!r}", wanted)
    return path


def load_profile(experiment: Experiment, *, check: bool = True) -> Profile:
    """The profile an experiment is simulated with; raises `InputError`.

    With `check`, an experiment that asks for more KV than fits what the profile describes is refused too.
    """
    path = profile_file(experiment)
    document = parse(read_text(path, "a profile"), str(path))
    read = partial(costs.read_profile, document.data, experiment, path.parent)
    profile = _with_places(read, document, [], path)
    if check:
        try:
            costs.check_kv_pool(experiment, profile)
        except Misfit as misfit:
            raise InputError(render(misfit.path), misfit.problem, misfit.wanted) from None
    return profile


def _names_hardware(experiment: Experiment) -> bool:
    """Whether the experiment's profile is there and computes its costs; reading it whole takes longer."""
    try:
        text = profile_file(experiment).read_text(encoding="utf-8")
    except (InputError, OSError, UnicodeDecodeError):
        return False
    return re.search(rf"^{costs.HARDWARE}\s*:", text, re.MULTILINE) is not None


def _shipped_profile(name: str) -> Path | None:
    """The file of a shipped profile."""
    files = (folder / f"{name}.yaml" for folder in PROFILES)
    return next((file for file in files if file.is_file()), None)


def _convert(data: Any) -> Experiment:
    experiment = _with_own_limits(convert(data, Experiment), data)
    checks.check(experiment)
    tasks = tuple(one for task in experiment.tasks for one in checks.expand_task(task))
    return msgspec.structs.replace(experiment, tasks=tasks)


def _with_own_limits(experiment: Experiment, data: Any) -> Experiment:
    """Let a task's `limits` override the experiment's key by key, as a reader of the YAML expects."""
    replace = msgspec.structs.replace
    tasks = []
    for task, given in zip(experiment.tasks, data["tasks"], strict=True):
        if task.limits is not None:
            own = {key: getattr(task.limits, key) for key in given["limits"]}
            task = replace(task, limits=replace(experiment.limits, **own))
        tasks.append(task)
    return replace(experiment, tasks=tuple(tasks))


def _resolve(experiment: Experiment, path: Path) -> Experiment:
    """Make the paths of files independent of where the YAML lies; shipped names stay as they are."""
    model = msgspec.structs.replace(
        experiment.model,
        path=_absolute(experiment.model.path, path, (MODELS / experiment.model.path).is_dir()),
    )
    profile = experiment.profile
    if profile is not None:
        profile = _absolute(profile, path, _shipped_profile(profile) is not None)
    environments = {
        name: map_files(environment, lambda file: _absolute(file, path, is_sample(file)))
        for name, environment in experiment.environments.items()
    }
    return msgspec.structs.replace(experiment, model=model, profile=profile, environments=environments)


def _absolute(name: str, yaml: Path, is_shipped: bool) -> str:
    """A path beside the YAML made absolute where it exists; a name that exists nowhere is kept as typed."""
    beside = (yaml.parent / name).resolve()
    return name if is_shipped or not beside.exists() else str(beside)


def _with_places(work: Callable[[], T], document: Document, overrides: list[Override], path: Path) -> T:
    """Turn a `Misfit` into an `InputError` that names the setting or the line that is to blame."""
    try:
        return work()
    except Misfit as misfit:
        where = f"{_place(misfit, document, overrides, path)}: {render(misfit.path)}"
        raise InputError(where, misfit.problem, misfit.wanted) from None


def _place(misfit: Misfit, document: Document, overrides: list[Override], path: Path) -> str:
    for override in reversed(overrides):
        if misfit.path[: len(override.path)] == override.path:
            return override.typed
    for length in range(len(misfit.path), 0, -1):
        line = document.lines.get(misfit.path[:length])
        if line is not None:
            return f"{path}:{line}"
    return str(path)


def _neighbours(path: Path) -> str:
    """What is there instead: the nearest name in the folder, or the folder that is missing."""
    if not path.parent.is_dir():
        return f"the folder {path.parent} does not exist"
    names = sorted(file.name for file in path.parent.glob("*.yaml"))
    return one_of(path.name, names, f"files in {path.parent}")
