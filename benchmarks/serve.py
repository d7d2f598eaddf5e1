"""Benchmark `toolwise serve` on a CPU beside vLLM: tokens per second and time to the first token of concurrent streams.

    python benchmarks/serve.py FOLDER                                    our server alone
    python benchmarks/serve.py FOLDER --vllm .venv-vllm/bin/python       both, in turn (make vllm-env installs it)

FOLDER is a model folder, such as the SmolLM2 of scripts/make_smollm2.py. Both servers run it in fp32 with the same
number of threads, each in its own process, one after the other, for --rounds rounds. 32 and 64 clients at once stream
one reply of 64 tokens each, past the end of the turn, to a prompt of about 256 tokens of their own. Tokens are those
that the server's `usage` counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

START_S, STOP_S, REQUEST_S = 600, 60, 1200
NEW_TOKENS, PROMPT_TOKENS = 64, 256


def prompts(folder: Path, count: int, seed: int) -> list[str]:
    """Texts of the wanted number of tokens, template included, that share no beginning but the template's."""
    from transformers import AutoTokenizer

    tokenizer, drawn = AutoTokenizer.from_pretrained(folder), random.Random(seed)
    words = [word for word in tokenizer.get_vocab() if word[1:].isalpha() and word.isascii()] or ["word"]

    def tokens(text: str) -> int:
        messages = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return len(tokenizer(rendered, add_special_tokens=False)["input_ids"])

    texts = []
    for _ in range(count):
        chosen = [drawn.choice(words) for _ in range(PROMPT_TOKENS)]
        while tokens(" ".join(chosen)) > PROMPT_TOKENS:
            chosen.pop()
        texts.append(" ".join(chosen))
    return texts


@contextmanager
def served(command: list[str], environment: dict[str, str], port: int) -> Iterator[None]:
    with subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            deadline = time.monotonic() + START_S
            while time.monotonic() < deadline and process.poll() is None:
                with suppress(httpx.TransportError):
                    if httpx.get(f"http://127.0.0.1:{port}/v1/models").status_code == 200:
                        break
                time.sleep(0.5)
            else:
                raise SystemExit(f"{command[0]} did not start")
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


async def stream(client: httpx.AsyncClient, url: str, model: str, text: str) -> tuple[float, int]:
    """Seconds to the first token, and the number of tokens."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": NEW_TOKENS,
        "temperature": 1.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start, first, count = time.perf_counter(), 0.0, 0
    async with client.stream("POST", f"{url}/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if not first and chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                first = time.perf_counter() - start
            count = (chunk.get("usage") or {}).get("completion_tokens", count)
    return first or time.perf_counter() - start, count


async def crowd(url: str, model: str, texts: list[str]) -> dict[str, float]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=REQUEST_S, limits=limits) as client:
        await stream(client, url, model, "Hello")  # warm
        start = time.perf_counter()
        results = await asyncio.gather(*(stream(client, url, model, text) for text in texts))
        seconds = time.perf_counter() - start
    firsts = sorted(first for first, _ in results)
    tokens = sum(count for _, count in results)
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "first_median_s": statistics.median(firsts),
        "first_p95_s": firsts[int(0.95 * (len(firsts) - 1))],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vllm", type=Path, help="the Python of an environment with vLLM")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--clients", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no server is left behind
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    folder, threads = str(given.folder), {"OMP_NUM_THREADS": str(given.threads), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "toolwise", "serve", folder, "--mode", "model", "--name", "m", "--port", str(port)]
    command += ["--set", "model.dtype=float32", "--set", "model.device=cpu"]
    servers = {"toolwise": (command, threads)}
    if given.vllm:
        # The `vllm` command looks up the version of a package "vllm", but the CPU build has another name.
        command = [str(given.vllm), "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
        command += ["--served-model-name", "m", "--port", str(port), "--generation-config", "vllm"]
        command += ["--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", str(max(given.clients))]
        # "nobind" leaves the number of threads to OpenMP, as on our side.
        more = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_NO_USAGE_STATS": "1"}
        servers["vllm"] = (command, threads | more | {"HF_HUB_OFFLINE": "1"})
    for number in range(given.rounds):
        for name, (command, environment) in servers.items():
            with served(command, environment, port):
                for clients in given.clients:
                    texts = prompts(given.folder, clients, seed=1000 * number + clients)
                    figures = asyncio.run(crowd(f"http://127.0.0.1:{port}/v1", "m", texts))
                    load = os.getloadavg()[0]
                    shown = "  ".join(f"{key} {value:.2f}" for key, value in figures.items())
                    print(f"{name}  clients {clients}  {shown}  threads {given.threads}  load {load:.1f}", flush=True)


if __name__ == "__main__":
    main()
