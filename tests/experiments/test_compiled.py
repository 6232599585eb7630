"""Machine code is made of the hot modules, and only that of these very sources is used."""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from experiments import compiled
from experiments.compiled import make as making
from marlaas.errors import InputError

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("cc") or shutil.which("gcc")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment and sources of their own, of which one small module is hot; the sources are returned."""
    root = tmp_path / "sources"
    for package in compiled.PACKAGES:
        shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    for module in (compiled, making):
        monkeypatch.setattr(module, "ROOT", root)
        monkeypatch.setattr(module, "MODULES", ("marlaas.waiting",))
    return root


@pytest.mark.parametrize("name", ["marlaas/spec.py", "sim/rules.py", "traces/metrics/steps.py"])
def test_other_sources_have_another_folder(elsewhere: Path, name: str) -> None:
    """One letter in any module that others are compiled against is enough."""
    before = compiled.folder()
    file = elsewhere / name
    file.write_text(file.read_text().replace("a", "b", 1))
    assert compiled.folder() != before


def test_nothing_is_preferred_once_a_hot_module_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of them compiled would not know the classes of the other half."""
    assert any(name in sys.modules for name in compiled.MODULES)
    monkeypatch.delenv(compiled.PURE)
    before = list(sys.meta_path)
    compiled.prefer()
    assert sys.meta_path == before
    assert not compiled.is_preferred()


def test_every_hot_module_is_there() -> None:
    """A module that was renamed is found here, before anybody compiles."""
    assert all(find_spec(name) is not None for name in compiled.MODULES)
    assert {name.split(".")[0] for name in compiled.MODULES} <= set(compiled.PACKAGES)


def test_what_is_missing_is_named(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without mypy there is one message that says how to have it, and nothing is written."""
    monkeypatch.setattr(making, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"mypyc, setuptools.*marlaas\[compile\]"):
        making.make()
    assert not Path(sys.prefix).exists()


@pytest.mark.slow
def test_a_compiler_that_fails_leaves_nothing(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line of what it said is in the message, and plain Python goes on."""
    monkeypatch.setenv("CC", "false")
    with pytest.raises(InputError, match=r"could not be compiled: error: .*'false'"):
        making.make()
    assert not list(compiled.folder().parent.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_what_was_made_of_other_sources_is_replaced(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made once, found again, and not found any more when the source has changed."""
    first = making.make()
    made = {path: path.stat().st_mtime_ns for path in first.rglob("*.so")}
    assert any(path.parent.name == "marlaas" and path.name.startswith("waiting.") for path in made)
    assert making.make() == first
    assert {path: path.stat().st_mtime_ns for path in first.rglob("*.so")} == made
    source = elsewhere / "marlaas" / "waiting.py"
    source.write_text(source.read_text() + "\nADDED = 1\n")
    second = making.make()
    assert second != first
    assert list(second.parent.iterdir()) == [second]
