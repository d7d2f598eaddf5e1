"""Benchmark `toolwise serve`: tokens per second and time to the first token of concurrent streams.

    python benchmarks/serve.py FOLDER                                    our server alone, on a CPU
    python benchmarks/serve.py FOLDER --vllm .venv-vllm/bin/python       beside vLLM (make vllm-env installs it)
    python benchmarks/serve.py --device cuda --shape 1.6b --concurrent 256 --rounds 3 --out serve.json
    python benchmarks/serve.py --paced --new-tokens 256 --slower 6          the server's own cost, on a CPU

With FOLDER, a model folder such as the SmolLM2 of scripts/make_smollm2.py, both servers run it in fp32 with the same
number of threads, each in its own process. Both are started once and answer the same prompts in turns, so that other
work on the machine disturbs both alike; `idle_cpu_s` is what the one that waits uses meanwhile. With --shape, the model
has random weights, in bf16 on a GPU, and the server is compared with its engine without HTTP ("offline"): once for each
of --intervals, the milliseconds for which chunks of a stream are collected (0: an event for each token). A table at the
end has the median round of each kind.

With --paced, a stand-in takes the time that an H200 takes for a 1.6B model (paced_server.py), and all else is real: the
table at the end has the server's CPU time, of its event loop + its other threads (the engine's and those for text), per
request, per event and per token. Wall-clock times say little there unless the machine has four idle cores: --slower 6
makes steps and intervals six times as long, so that a busy machine keeps up and events have as many tokens as on the
GPU. --before compares with another version's src folder, in turns.

Clients run in processes of their own and read from plain sockets. Each streams one reply after the other, past the end
of the turn, to a prompt of its own that shares no beginning with others. Tokens are those that the server's `usage`
counts, `cpu_s` is the server's CPU time, which other work on the machine disturbs less than the seconds. A round of
each kind that is not timed comes first on a GPU: it compiles kernels and captures graphs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

START_S, STOP_S, REQUEST_S = 600, 60, 1200
Figures = dict[str, Any]


def make_prompts(folder: Path, count: int, tokens: int, seed: int) -> list[str]:
    """Texts of about the wanted number of tokens, template included, that share no beginning but the template's."""
    from transformers import AutoTokenizer

    tokenizer, drawn = AutoTokenizer.from_pretrained(folder), random.Random(seed)
    words = [word for word in tokenizer.get_vocab() if word[1:].isalpha() and word.isascii()] or ["word"]

    def count_tokens(text: str) -> int:
        messages = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return len(tokenizer(rendered, add_special_tokens=False)["input_ids"])

    texts = []
    for _ in range(count):
        chosen = [drawn.choice(words) for _ in range(tokens)]
        while (over := count_tokens(" ".join(chosen)) - tokens) > 0:
            del chosen[-max(1, over // 4) :]
        texts.append(" ".join(chosen))
    return texts


def stat_fields(stat: Path) -> list[int]:
    """The numbers of a `stat` file in /proc, from the parent's id on."""
    return list(map(int, stat.read_text().rpartition(")")[2].split()[1:]))  # after the name, which may have spaces


def cpu_seconds(session: int) -> float:
    """CPU time of all processes of a session, with the children that they have waited for."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat_fields(stat)
            if fields[2] == session:
                ticks += sum(fields[10:14])
    return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def served(command: list[str], environment: dict[str, str], port: int) -> Iterator[int]:
    """Yields the id of the server's session."""
    with subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            deadline = time.monotonic() + START_S
            while time.monotonic() < deadline and process.poll() is None:
                with suppress(URLError, OSError), urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5):
                    break
                time.sleep(0.5)
            else:
                raise SystemExit(f"{command[0]} did not start")
            yield process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def request_bytes(text: str, new_tokens: int) -> bytes:
    body: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": new_tokens,
        "temperature": 1.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    raw = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw


async def stream(port: int, text: str, new_tokens: int) -> tuple[float, int, int]:
    """Seconds to the first token, the number of tokens, and the number of events with text."""
    start, first, events, tail = time.perf_counter(), 0.0, 0, b""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    writer.write(request_bytes(text, new_tokens))
    while piece := await reader.read(1 << 16):
        new = piece.count(b'"content": "') + piece.count(b'"content":"')  # one cut in two is not counted
        new -= piece.count(b'"content": ""') + piece.count(b'"content":""')
        if new and not events:
            first = time.perf_counter() - start
        events += max(0, new)
        tail = (tail + piece)[-4096:]
    writer.close()
    if b"[DONE]" not in tail or b'"usage"' not in tail:
        raise SystemExit(f"a stream ended early: {tail[-300:]!r}")
    usage = tail[tail.rindex(b'"completion_tokens"') :]
    count = int(usage.split(b":")[1].split(b",")[0].split(b"}")[0])
    return first or time.perf_counter() - start, count, events


def run_clients(port: int, texts: Sequence[Sequence[str]], new_tokens: int) -> Figures:
    """The clients of one process: each sends its texts one after the other."""

    async def client(own: Sequence[str]) -> list[tuple[float, int, int]]:
        return [await stream(port, text, new_tokens) for text in own]

    async def all_clients() -> list[list[tuple[float, int, int]]]:
        async with asyncio.timeout(REQUEST_S):
            return await asyncio.gather(*map(client, texts))

    start = time.monotonic()
    results = [result for own in asyncio.run(all_clients()) for result in own]
    return {"start": start, "end": time.monotonic(), "results": results}


def measure(
    pool: ProcessPoolExecutor, port: int, texts: list[str], new_tokens: int, options: argparse.Namespace
) -> Figures:
    processes, clients = options.client_processes, options.clients
    own = [texts[number::clients] for number in range(clients)]
    shares = [own[number::processes] for number in range(processes)]
    work = [pool.submit(run_clients, port, share, new_tokens) for share in shares if share]
    parts = [task.result() for task in work]
    seconds = max(part["end"] for part in parts) - min(part["start"] for part in parts)
    results = [result for part in parts for result in part["results"]]
    firsts = sorted(first for first, _, _ in results)
    tokens = sum(count for _, count, _ in results)
    return {
        "new_tokens": new_tokens,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "tokens_per_event": tokens / max(1, sum(events for _, _, events in results)),
        "first_median_s": statistics.median(firsts),
        "first_p95_s": firsts[int(0.95 * (len(firsts) - 1))],
    }


Round = tuple[int, list[str]]
"""New tokens per reply, and the prompts."""


def measure_offline(folder: Path, settings: list[str], rounds: list[Round]) -> list[Figures]:
    """The engine alone: all requests of a round at once, without HTTP."""
    from toolwise.agent.agent import Agent
    from toolwise.concurrency.garbage import relaxed_gc
    from toolwise.messages import Message
    from toolwise.protocols import Sampling

    policy = Agent.load(folder, tools=[], overrides=settings).policy
    figures = []

    async def generate(prompts: list[list[int]], new_tokens: int) -> int:
        work = (
            policy.generate(ids, Sampling(max_new_tokens=new_tokens, seed=number)) for number, ids in enumerate(prompts)
        )
        return sum(len(result.token_ids) for result in await asyncio.gather(*work))

    for new_tokens, texts in rounds:
        prompts = [policy.chat.start([Message(role="user", content=text)]) for text in texts]
        with relaxed_gc():
            start = time.perf_counter()
            tokens = asyncio.run(generate(prompts, new_tokens))
            seconds = time.perf_counter() - start
        figures.append(
            {"new_tokens": new_tokens, "tokens": tokens, "seconds": seconds, "tokens_per_s": tokens / seconds}
        )
    policy.close()
    return figures


def host_cpu(pid: int) -> tuple[float, float, float]:
    """CPU seconds of a server: its event loop's thread, its other threads, and its child processes."""
    of_thread = {
        path.parent.name: sum(stat_fields(path)[10:12]) / os.sysconf("SC_CLK_TCK")
        for path in Path(f"/proc/{pid}/task").glob("*/stat")
    }
    of_loop, threads = of_thread[str(pid)], sum(of_thread.values())
    return of_loop, threads - of_loop, max(0.0, cpu_seconds(pid) - threads)


def beside_stand_in(options: argparse.Namespace, pool: ProcessPoolExecutor, report: Report, port: int) -> None:
    """What the server itself costs per request, event and token: with an engine that takes the time of a GPU."""
    from random_model import make_folder

    script = str(Path(__file__).with_name("paced_server.py"))
    (options.clients,) = options.concurrent
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as servers:
        folder = Path(scratch) / "model"
        make_folder(folder, "stand-in", "cpu", "float32")
        ports: dict[str, tuple[int, int]] = {}
        for interval in options.intervals:
            for source in dict.fromkeys((None, options.before)):
                name, port = f"every {interval:g} ms{', before' * (source is not None)}", free_port()
                command = [sys.executable, script, str(folder), "--port", str(port), "--slower", f"{options.slower:g}"]
                command += ["--stream-interval-ms", f"{interval:g}"]
                environment = {"OMP_NUM_THREADS": "1"} | ({"PYTHONPATH": str(source)} if source else {})
                ports[name] = port, servers.enter_context(served(command, environment, port))
        for number in range(-1, options.rounds):  # the first is not counted
            for new_tokens in (1, *options.new_tokens):  # of one token: what requests cost
                texts = make_prompts(folder, options.clients, options.prompt_tokens, 10 * number + new_tokens)
                for name, (port, pid) in ports.items():
                    before = host_cpu(pid)
                    figures = measure(pool, port, texts, new_tokens, options)
                    used = [now - then for now, then in zip(host_cpu(pid), before, strict=True)]
                    figures |= dict(zip(("loop_s", "threads_s", "children_s"), used, strict=True))
                    report.add(name if number >= 0 else "warm-up", options.clients, figures)
    report.host_costs()


def count_events(row: Figures) -> float:
    return float(row["tokens"]) / float(row["tokens_per_event"])


class Report:
    """Prints figures as they come and, with --out, keeps them in a file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.path: Path | None = options.out
        settings = {name: str(value) for name, value in vars(options).items() if value is not None}
        self.content: dict[str, Any] = {"settings": settings, "python": sys.version.split()[0], "rows": []}

    def add(self, name: str, clients: int, figures: Figures, **more: Any) -> None:
        row = {"name": name, "clients": clients, **figures, **more, "load": os.getloadavg()[0]}
        self.content["rows"].append(row)
        print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
        self._write()

    def compare(self) -> None:
        """A table of each kind's rounds: medians, and the rate as a share of the engine's without HTTP."""
        rows: dict[tuple[int, str], list[Figures]] = {}
        for row in self.content["rows"]:
            if row["name"] != "warm-up":
                rows.setdefault((row["new_tokens"], row["name"]), []).append(row)
        print(
            "| new tokens | events | tokens/s (each round) | share | tokens per event | first token, median and p95 |"
        )
        print("|---|---|---|---|---|---|")
        self.content["share_of_offline"] = shares = {}
        for (new, name), rounds in sorted(rows.items(), key=lambda item: item[0][0]):
            rates = [row["tokens_per_s"] for row in rounds]
            offline = [row["tokens_per_s"] for row in rows.get((new, "offline"), [])]
            share = statistics.median(rates) / statistics.median(offline) if offline else math.nan
            shares[f"{name}, {new} tokens"] = share
            size, first, p95 = (
                statistics.median(row.get(key, math.nan) for row in rounds)
                for key in ("tokens_per_event", "first_median_s", "first_p95_s")
            )
            each = " ".join(f"{rate:,.0f}" for rate in rates)
            print(f"| {new} | {name} | {statistics.median(rates):,.0f} ({each}) | {share:.2f} ", end="")
            print("| | |" if name == "offline" else f"| {size:.1f} | {first:.2f} and {p95:.2f} s |", flush=True)
        self._write()

    def host_costs(self) -> None:
        """A table of CPU time: per request, of replies of one token, and per event and token of the rest."""
        print("| server | CPU µs per request | per event | per token | tokens per event |\n|---|---|---|---|---|")
        rows = [row for row in self.content["rows"] if row["name"] != "warm-up"]
        for name in sorted({row["name"] for row in rows}):
            own = [row for row in rows if row["name"] == name]
            short, long = ([row for row in own if (row["new_tokens"] == 1) is only] for only in (True, False))
            events, tokens = (sum(map(count, long)) for count in (count_events, lambda row: row["tokens"]))
            cells = []
            for kind in ("loop_s", "threads_s"):
                request = statistics.mean(row[kind] for row in short) / short[0]["clients"]
                more = sum(row[kind] - request * row["clients"] for row in long)
                cells.append((1e6 * request, 1e6 * more / events, 1e6 * more / tokens))
            text = " | ".join(f"{loop:,.3g} + {threads:,.3g}" for loop, threads in zip(*cells, strict=True))
            print(f"| {name} | {text} | {tokens / events:.1f} |", flush=True)

    def _write(self) -> None:
        if self.path is not None:
            self.path.write_text(json.dumps(self.content, indent=1))


def our_command(folder: Path, port: int, settings: list[str], interval_ms: float | None = None) -> list[str]:
    command = [sys.executable, "-m", "toolwise", "serve", str(folder), "--mode", "model", "--name", "m"]
    command += ["--port", str(port), *(part for setting in settings for part in ("--set", setting))]
    return command if interval_ms is None else [*command, "--stream-interval-ms", f"{interval_ms:g}"]


def vllm_command(python: Path, folder: Path, port: int, clients: int) -> list[str]:
    # The `vllm` command looks up the version of a package "vllm", but the CPU build has another name.
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", "m", "--port", str(port), "--generation-config", "vllm"]
    return [*command, "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", str(clients)]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def beside_vllm(options: argparse.Namespace, pool: ProcessPoolExecutor, report: Report, port: int) -> None:
    """Our server and vLLM's on the model folder: both run, and answer in turns, for each number of clients."""
    # Idle threads sleep, since other work may need the cores, but not between two parallel regions of a layer.
    threads = {"OMP_NUM_THREADS": str(options.threads), "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}
    settings = ["model.dtype=float32", "model.device=cpu"]
    ports = {"toolwise": port}
    with ExitStack() as servers:
        sessions = {
            "toolwise": servers.enter_context(served(our_command(options.folder, port, settings), threads, port))
        }
        if options.vllm:
            ports["vllm"] = free_port()
            # "nobind" leaves the number of threads to OpenMP, as on our side.
            more = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_NO_USAGE_STATS": "1"}
            command = vllm_command(options.vllm, options.folder, ports["vllm"], max(options.concurrent))
            environment = threads | more | {"HF_HUB_OFFLINE": "1"}
            sessions["vllm"] = servers.enter_context(served(command, environment, ports["vllm"]))
        for number in range(options.rounds):
            for clients in options.concurrent:
                options.clients = clients
                texts = make_prompts(options.folder, clients, options.prompt_tokens, 1000 * number + clients)
                for name in sorted(sessions, reverse=number % 2 == 1):
                    pool.submit(run_clients, ports[name], [["Hello"]], 4).result()  # warm
                    before = {each: cpu_seconds(session) for each, session in sessions.items()}
                    figures = measure(pool, ports[name], texts, options.new_tokens[0], options)
                    used = {each: cpu_seconds(session) - before[each] for each, session in sessions.items()}
                    idle = sum(used.values()) - used[name]
                    report.add(
                        name, clients, figures | {"cpu_s": used[name], "idle_cpu_s": idle}, threads=options.threads
                    )


def beside_engine(options: argparse.Namespace, pool: ProcessPoolExecutor, report: Report, port: int) -> None:
    """Our server on a random model, and its engine offline."""
    from random_model import make_folder

    dtype = "float32" if options.device == "cpu" else "bfloat16"
    settings = [f"model.dtype={dtype}", f"model.device={options.device}"]
    (options.clients,) = options.concurrent
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        fresh = {"max_workers": 1, "mp_context": multiprocessing.get_context("spawn")}
        with ProcessPoolExecutor(**fresh) as one:  # a process of its own: it leaves no memory on the GPU
            one.submit(make_folder, folder, options.shape, options.device, dtype).result()
        count, size = options.clients * options.replies, options.prompt_tokens
        warm = [options.new_tokens[0]] * options.warm_rounds
        lengths = warm + options.new_tokens * options.rounds
        rounds = [(new, make_prompts(folder, count, size, seed)) for seed, new in enumerate(lengths)]
        with ProcessPoolExecutor(**fresh) as one:
            offline = one.submit(measure_offline, folder, settings, rounds).result()
        for number, figures in enumerate(offline):
            report.add("offline" if number >= len(warm) else "warm-up", options.clients, figures)
        for interval in options.intervals:
            name = f"every {interval:g} ms" if interval else "every token"
            with served(our_command(folder, port, settings, interval), {}, port):
                for number, (new_tokens, texts) in enumerate(rounds):
                    figures = measure(pool, port, texts, new_tokens, options)
                    report.add(name if number >= len(warm) else "warm-up", options.clients, figures)
    report.compare()


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="model folder; or give --shape")
    parser.add_argument("--vllm", type=Path, help="the Python of an environment with vLLM")
    parser.add_argument("--shape", help="a random model: 0.1m, 0.9m, 135m, 1.6b, 3b, 8b")
    parser.add_argument(
        "--paced", action="store_true", help="a stand-in takes the time of a GPU: the server's own cost"
    )
    parser.add_argument("--slower", type=float, default=1.0, help="slows the stand-in and intervals down (--paced)")
    parser.add_argument("--before", type=Path, help="the src folder of another version to compare with (--paced)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of the random model")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--concurrent", type=int, nargs="+", default=None, help="clients at once; 32 64, or 256")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--warm-rounds", type=int, help="rounds that are not timed; 1 on a GPU")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[64], help="several with --shape only")
    parser.add_argument("--replies", type=int, default=1, help="replies per client, one after the other (--shape)")
    parser.add_argument("--intervals", type=float, nargs="+", default=[20.0, 0.0], help="milliseconds (--shape)")
    parser.add_argument("--client-processes", type=int, help="4 on a GPU, else 1")
    parser.add_argument("--out", type=Path, help="JSON file for all figures")
    parser.add_argument(
        "--limit-s", type=int, default=3600, help="give up after this time; --out has what was measured"
    )
    options = parser.parse_args()
    if sum((options.folder is not None, options.shape is not None, options.paced)) != 1:
        parser.error("give a model folder, --shape or --paced")
    if options.folder is not None and len(options.new_tokens) > 1:
        parser.error("give one number of --new-tokens")
    options.concurrent = options.concurrent or ([32, 64] if options.folder else [256])
    on_gpu = options.device == "cuda"
    options.warm_rounds = int(on_gpu) if options.warm_rounds is None else options.warm_rounds
    options.client_processes = options.client_processes or (4 if on_gpu else 1)
    return options


def give_up(*_: object) -> None:
    """End without leaving a client or a server behind: contexts end the servers."""
    for child in multiprocessing.active_children():
        child.kill()
    sys.exit("the time is over, or the benchmark was ended")


def main() -> None:
    options = read_options()
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, give_up)
    signal.alarm(options.limit_s)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.client_processes, mp_context=context) as pool:
        (beside_stand_in if options.paced else beside_engine if options.shape else beside_vllm)(
            options, pool, Report(options), free_port()
        )


if __name__ == "__main__":
    main()
