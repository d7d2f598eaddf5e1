"""Peak memory of `toolwise eval` against the model's weights and KV cache: `python benchmarks/eval_memory.py`.

Evaluates a random Llama of 100 million fp32 weights on the CPU, once with default settings and once with settings for
which a training run builds a critic, a reference model and a router. Each evaluation runs in its own process; its
peak is VmHWM minus what the process held after its imports. Exits with status 1 if a ratio exceeds the limit.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import toolwise

LIMIT = 1.3
CACHE_MB, TASKS, NEW_TOKENS = 64, 8, 16
SHAPE = {"hidden_size": 768, "intermediate_size": 2560, "num_hidden_layers": 12, "num_attention_heads": 12}
SMALL = Path(toolwise.__file__).parent / "models" / "small"
IMPORTS = (
    "transformers.models.llama.modeling_llama",
    "toolwise.cli",
    "toolwise.learner.builder",
    "toolwise.policies.local",
    "toolwise.routing.head.builder",
    "toolwise.training.evaluate",
    "toolwise.training.inputs",
)
VARIANTS: dict[str, dict[str, Any]] = {
    "default settings": {},
    "gae, kl and router": {
        "algorithm": {"adv_estimator": "gae", "kl": "loss"},
        "router": {"enable": True, "backbone": "full", "optimizer": "own"},
    },
}


def memory_mb(field: str) -> float:
    """`VmRSS`: what the process holds; `VmHWM`: the most it ever held."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def make_model(folder: Path) -> None:
    """Write random weights with the tokenizer of the model that ships."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(SMALL, trust_remote_code=False)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, **ids, vocab_size=2048, max_position_embeddings=4096))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_inputs(folder: Path, settings: dict[str, Any]) -> Path:
    """Write the tasks and the configuration; return the configuration's path."""
    import tomli_w

    from toolwise.demo.tasks import make_rows

    rows = [json.dumps(row) for row in make_rows(TASKS, seed=0, split="heldout")]
    (folder / "tasks.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    config = {
        "model": {"path": str(folder / "model"), "device": "cpu"},
        "data": {"val": "tasks.jsonl"},
        "tools": ["calculator", "search"],
        "rollout": {"max_new_tokens": NEW_TOKENS, "cache_mb": CACHE_MB},
        "multi_turn": {"max_turns": 1},
        "reward": {"function": "toolwise.demo.reward:small_world_reward", "sandbox": {"tier": "off"}},
    }
    path = folder / "run.toml"
    path.write_text(tomli_w.dumps(config | settings), encoding="utf-8")
    return path


def evaluate(config: str) -> None:
    """In the process of its own: print the peak in MiB, and the metrics."""
    for name in IMPORTS:
        import_module(name)
    from toolwise.cli import main

    sys.argv = ["toolwise", "eval", config, "--json"]
    imports, out = memory_mb("VmRSS"), StringIO()
    with redirect_stdout(out):
        try:
            main()
        except SystemExit as ended:
            if ended.code:
                raise
    print(json.dumps({"peak_mb": memory_mb("VmHWM") - imports, "metrics": json.loads(out.getvalue())}))


def run(*arguments: str) -> str:
    return subprocess.run([sys.executable, __file__, *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> int:
    worst = 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run("--make-model", str(folder / "model"))
        weights = (folder / "model" / "model.safetensors").stat().st_size / 2**20
        print(f"weights {weights:.0f} MiB, KV cache {CACHE_MB} MiB")
        for label, settings in VARIANTS.items():
            result = json.loads(run("--evaluate", str(write_inputs(folder, settings))))
            ratio = result["peak_mb"] / (weights + CACHE_MB)
            worst = max(worst, ratio)
            print(f"{label}: peak {result['peak_mb']:.0f} MiB over imports, ratio {ratio:.2f} (limit {LIMIT})")
            if "--metrics" in sys.argv:
                print(json.dumps(result["metrics"]))
    return int(worst > LIMIT)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--make-model"]:
        make_model(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["--evaluate"]:
        evaluate(sys.argv[2])
    else:
        sys.exit(main())
