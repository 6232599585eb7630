"""Makes machine code of the hot modules, with mypyc and the C compiler of this machine.

Made aside and moved to its place whole, so that nobody ever finds half of it. `marlaas compile` is this.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from importlib.util import find_spec
from pathlib import Path

from experiments.compiled import MODULES, PACKAGES, ROOT, folder
from marlaas.errors import InputError

_SETUP = """\
from mypyc.build import mypycify
from setuptools import setup

setup(name="compiled", packages=[], ext_modules=mypycify({files!r}, opt_level="3", debug_level="0"))
"""
_GO_ON = "or go on in plain Python"


def make() -> Path:
    """Compile the hot modules, unless these very sources have been compiled before; where they are now.

    Takes about a minute and replaces what was made of other sources. Raises `InputError` where mypy,
    setuptools or a C compiler is missing, or the environment's folder cannot be written.
    """
    at = folder()
    if at.is_dir():
        return at
    missing = [name for name in ("mypyc", "setuptools") if find_spec(name) is None]
    if missing:
        wanted = f"pip install 'marlaas[compile]', {_GO_ON}"
        raise InputError("compile", f"not installed: {', '.join(missing)}", wanted)
    try:
        at.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=at.parent, prefix="making-") as making:
            _compile(Path(making))
            for old in at.parent.iterdir():
                if not old.name.startswith("making-"):
                    shutil.rmtree(old)
            (Path(making) / "built").rename(at)
    except OSError as error:
        wanted = f"make that folder writable, {_GO_ON}"
        raise InputError("compile", f"{at.parent}: {error.strerror}", wanted) from None
    return at


def _compile(making: Path) -> None:
    """Leave the compiled modules in `built` in this folder."""
    work = making / "work"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, work / package, ignore=shutil.ignore_patterns("__pycache__"))
    files = [name.replace(".", "/") + ".py" for name in MODULES]
    (work / "setup.py").write_text(_SETUP.format(files=files), encoding="utf-8")
    (work / "mypy.ini").write_text("[mypy]\nignore_missing_imports = True\n", encoding="utf-8")
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", str(making / "built")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        said = [line for line in (run.stderr + run.stdout).splitlines() if "error" in line.lower()]
        why = textwrap.shorten(said[0] if said else f"exit code {run.returncode}", 160)
        wanted = f"install a C compiler and the headers of Python (gcc, python3-dev), {_GO_ON}"
        raise InputError("compile", f"the modules could not be compiled: {why}", wanted)
