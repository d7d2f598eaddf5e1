"""The engine: a thread steps the model (schedule, run, process) for requests that arrive and leave at any time.

It uses the learner's parameters directly, or with adapters the merged weights that the learner uses too. After an
update `weights_changed` clears the cache and recomputes the requests in progress; each token records the version of the
weights that sampled it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from torch import Tensor

from toolwise.engine.blocks import BlockManager, check_length
from toolwise.engine.cpu_runner import CpuRunner
from toolwise.engine.cuda_runner import CudaRunner, supports_fused_kernels
from toolwise.engine.delivery import TokenStreams, deliver
from toolwise.engine.paths import FAST, TRANSFORMERS, engine_path, log_general_path
from toolwise.engine.request import NO_OPTIONS, ContinuationScores, LogitsMask, OnTokens, Request, ServingOptions
from toolwise.engine.results import Decode, OutputProcessor
from toolwise.engine.runner import Runner, batch_tokens
from toolwise.engine.sampler import NaNLogitsError
from toolwise.engine.scheduler import Plan, Scheduler
from toolwise.engine.weight_swap import fingerprint, keep_replies
from toolwise.errors import ModelError, PolicyError
from toolwise.models.decoder_layers import max_context
from toolwise.models.logits import logits_head
from toolwise.models.merged_weights import merged_copy
from toolwise.protocols import Generation, GenerationEngine, Metrics, Sampling
from toolwise.untrusted.user_code import describe

MAX_STEPS_WHILE_QUEUED = 8
"""Decode steps per scheduling round while other requests wait for a slot, so that finished ones make room soon."""
MAX_EVICTING_STEPS = 32
MANY_ARRIVALS = 8
ENOUGH_TOKENS = 16_384
"""So many of new prompts keep any device busy: those that arrive meanwhile join the next step."""
FIXED_ROWS = 64
"""Rows of each forward pass when results must be bitwise reproducible."""


class Engine(GenerationEngine):
    """`generate`, `score` and `encode` over one prefix cache, callable from any event loop."""

    def __init__(
        self,
        model: Any,
        *,
        blocks: int | None = None,
        memory_mb: int | None = None,
        block_size: int = 16,
        max_batch_tokens: int | None = None,
        max_requests: int = 256,
        prefix_cache: bool = True,
        deterministic: bool = False,
        decode: Decode | None = None,
        fused: bool | None = None,
    ) -> None:
        """`blocks` or `memory_mb` sets the cache size (default: a share of the free memory). `deterministic` makes
        results bitwise identical whatever else runs. `decode` turns tokens into text, for stop strings. `fused`: True
        uses the fused kernels, None uses them if the GPU supports them for this model, False uses the model's stock
        forward throughout, without the multi-step decoding of the CPU runner."""
        merged = merged_copy(model)
        path, reason = engine_path(merged)
        if path == TRANSFORMERS:
            raise ModelError(
                f'the engine cannot run {type(model).__name__}: {reason}; set rollout.engine = "transformers"'
            )
        config = model.get_decoder().config
        max_batch_tokens = max_batch_tokens or batch_tokens(merged)
        self.model = model
        self.max_context = max_context(config)
        self.vocabulary = int(config.vocab_size)
        self.version = 0
        self._parameters = list(model.parameters())
        self._weights = fingerprint(self._parameters)
        self.batch_wait_s = 0.001
        fixed_rows = FIXED_ROWS if deterministic else None
        head = logits_head(model, fixed_rows)
        self.runner: Runner
        if deterministic or fused is False:
            self.runner = Runner(model, block_size, fixed_rows=fixed_rows)
        elif fused or (path == FAST and supports_fused_kernels(merged)):
            self.runner = CudaRunner(model, block_size, head, max_requests=max_requests, max_context=self.max_context)
        elif path == FAST:
            self.runner = CpuRunner(model, block_size, head)
        else:
            log_general_path(type(model).__name__, reason)
            self.runner = Runner(model, block_size)
        count = blocks or min(
            max(1, self.runner.blocks_for(memory_mb)), max_requests * -(-self.max_context // block_size)
        )
        self.blocks = BlockManager(count, block_size, share=prefix_cache, full_blocks_only=deterministic)
        self.scheduler = Scheduler(
            self.blocks,
            max_batch_tokens=fixed_rows or max_batch_tokens,
            max_requests=max_requests,
            fixed_chunks=deterministic,
        )
        self.results = OutputProcessor(self.blocks, head, decode)
        self.steps, self.busy_s, self.streams = 0, 0.0, TokenStreams()
        self.most_blocks = 0
        """The most blocks that requests have held at a time."""
        self._pending_actions: deque[Callable[[], None]] = deque()
        """Actions for the engine's thread to run before its next step: add or cancel requests, clear the cache."""
        self._current_plan: Plan = {}
        """The requests in the current step: they get its error if it fails."""
        self._finished: list[Request] = []
        self._last_valid_prompt: list[int] = []
        """The last prompt whose token ids were checked."""
        self._lock = threading.Lock()
        self._working, self._arrived_tokens = False, 0  # tokens of the requests that are pending actions
        # A separate thread: tools that hang in the default executor must not block the model.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="toolwise-engine")

    # --- public API

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        stop_strings: Sequence[str] = (),
        logits_mask: LogitsMask | None = None,
        on_tokens: OnTokens | None = None,
        options: ServingOptions = NO_OPTIONS,
    ) -> Generation:
        """Continue a prompt until a stop token or stop string, which is included, or the length limit. `on_tokens`
        receives the tokens while they are sampled, a few at a time."""
        if sampling.max_new_tokens < 1 or not sampling.temperature > 0:
            raise PolicyError("max_new_tokens must be at least 1 and temperature above 0 (do_sample=False is greedy)")
        stop_strings = (*sampling.stop_strings, *stop_strings)
        if stop_strings and self.results.decode is None:
            raise PolicyError("stop strings need a decode function: pass Engine(decode=tokenizer.decode)")
        request = self._request("generate", prompt_ids, sampling, new_tokens=sampling.max_new_tokens)
        request.stop_strings, request.logits_mask = stop_strings, logits_mask
        request.on_tokens, request.options = on_tokens, options
        generation: Generation = await self._submit(request)
        return generation

    async def score(
        self, prefix_ids: Sequence[int], continuations: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[ContinuationScores]:
        """Log-probs and entropies of the tokens of each continuation. The prefix is computed once."""
        if not temperature > 0:
            raise PolicyError("temperature must be above 0")
        sampling = Sampling(temperature=temperature)
        requests = [self._score_request(prefix_ids, continuation, sampling) for continuation in continuations]
        if len(requests) > 1 and self.blocks.share:
            await self.encode(prefix_ids)
        scores: list[ContinuationScores] = await asyncio.gather(*map(self._submit, requests))
        return scores

    async def encode(
        self, prompt_ids: Sequence[int], *, pool: Literal["last", "mean"] = "last", wait: bool = True
    ) -> Tensor:
        """The hidden state of a prompt, [d] in fp32. Generating from the same prompt later reuses the computation;
        "mean" recomputes every token. With `wait=False` an idle engine starts at once, on a CPU in the caller's thread
        if prompt and model are small: requests that arrive in the next millisecond share its second pass instead of
        the first."""
        request = self._request("read", prompt_ids, Sampling())
        request.mean = pool == "mean"
        hidden: Tensor = await self._submit(request, wait=wait)
        return hidden

    def weights_changed(
        self, version: int, *, keep_cache: bool = False, write: Callable[[], None] = lambda: None
    ) -> None:
        """Call after the parameters changed, or with `write`, which changes them between two steps: see
        `replace_weights`. With `keep_cache`, replies that are being written go on with the keys and values that the old
        weights computed, and count as old."""

        def change() -> None:
            write()
            keep_replies(self.scheduler, self.version) if keep_cache else self._clear_cache()
            self._parameters = list(self.model.parameters())
            self.version, self._weights = version, fingerprint(self._parameters)
            self.runner.refresh()

        self.run_between_steps(change)

    def drop_cache(self, *, blocks: int | None = None) -> bool:
        """Free the memory of the cache and its captured graphs, immediately if the engine is idle, and return whether
        that freed any. The next request allocates it again; `blocks` is its new size, which only an idle engine
        takes."""

        def drop() -> None:
            self._clear_cache()
            self.runner.release()
            if blocks is not None and not self.scheduler.requests:
                self.blocks.resize(blocks)

        held = bool(self.runner.keys) and not self._working
        self.run_between_steps(drop)
        return held

    def metrics(self) -> Metrics:
        return {
            "engine/prefilled_tokens": float(self.results.prefilled_tokens),
            "engine/reused_tokens": float(self.scheduler.reused_tokens),
            "engine/decoded_tokens": float(self.results.decoded_tokens),
            "engine/preemptions": float(self.scheduler.preemptions),
            "engine/evictions": float(self.blocks.evictions),
            "engine/blocks_in_use": float(self.blocks.in_use),
            "engine/blocks": float(self.blocks.count),
            "engine/steps": float(self.steps),
        }

    # --- engine thread

    def step(self) -> None:
        """One step: schedule, run, process the results."""
        self._current_plan = plan = self.scheduler.schedule()
        finished = self._decode_multi_step(plan)
        if finished is None:
            self._prepare()
            states, rows = self.runner.run(plan, self.scheduler.chunks)
            finished = self.results.process_step(plan, states, rows, self.version, self._admit_followers)
        self.steps += 1
        self.most_blocks = max(self.most_blocks, self.blocks.in_use)
        self.streams.report(plan, finished)
        self._finish(finished)

    def _admit_followers(self) -> Plan:
        followers = self.scheduler.admit_followers()
        self._current_plan |= followers
        return followers

    def _decode_multi_step(self, plan: Plan) -> list[Request] | None:
        """Decode many steps at once if all requests only decode and the runner can; otherwise None."""
        runner = self.runner
        if not isinstance(runner, CudaRunner | CpuRunner) or not plan or not all(map(runner.supports, plan)):
            return None
        if isinstance(runner, CpuRunner) and not runner.has_room(list(plan)):
            return None
        others = bool(self.scheduler.waiting) or len(plan) < len(self.scheduler.running)
        max_steps = MAX_STEPS_WHILE_QUEUED if others else runner.max_decode_steps
        if any(request.streams for request in plan):
            max_steps = min(max_steps, self.streams.max_steps)
        steps = self._reserve_steps({r: min(max_steps, r.sampling.max_new_tokens - r.sampled) for r in plan})
        if not steps:
            return None
        self._prepare()
        start = time.perf_counter()
        more = (self.results.has_stop_string,) if isinstance(runner, CpuRunner) else ()
        tokens, logprobs = runner.decode_multi_step(list(plan), steps, lambda: bool(self._pending_actions), *more)
        self.streams.step_s = (time.perf_counter() - start) / len(tokens[0])
        finished = self.results.process_multi_step(list(plan), tokens, logprobs, self.version)
        for request in plan:  # if it was interrupted, others need the blocks that it has not used
            self.blocks.trim(request.lease, len(request.tokens))
        return finished

    def _reserve_steps(self, max_steps: Mapping[Request, int]) -> int:
        """Reserve blocks and return the number of steps they suffice for; 0 if hardly any. Evicts cached blocks for a
        few steps, but not for many."""
        steps = max(max_steps.values())
        while True:
            ends = {r: r.held + min(steps, limit) for r, limit in max_steps.items()}
            missing = sum(self.blocks.missing(r.lease, end) for r, end in ends.items())
            if missing <= (self.blocks.free if steps > MAX_EVICTING_STEPS else self.blocks.available):
                return steps if all(self.blocks.extend(r.lease, end) for r, end in ends.items()) else 0
            if steps <= MAX_STEPS_WHILE_QUEUED:
                return 0
            steps //= 2

    def _prepare(self) -> None:
        if not self.runner.keys:
            self.runner.allocate(self.blocks.count)
        copies, self.blocks.copies = self.blocks.copies, {}
        self.runner.copy(copies)

    def _finish(self, finished: Iterable[Request]) -> None:
        finished = list(finished)
        for request in finished:
            self.scheduler.finish(request, keep=request.fault is None)
        if any(isinstance(request.fault, NaNLogitsError) for request in finished):
            self._clear_cache()
            self.runner.release()  # NaNs in a block would corrupt the next request that gets it, even behind the mask
        self._finished += finished

    def _fail(self, fault: BaseException) -> None:
        """Fail the requests of the current step, so that none waits forever; the others are recomputed."""
        error = PolicyError(f"generation failed: {describe(fault)}")
        failed = [r for r in self._current_plan if r in self.scheduler.running] or self.scheduler.requests
        for request in failed:
            request.fault = error
            self.scheduler.finish(request, keep=False)
        self._clear_cache()
        self._finished += failed

    def _clear_cache(self) -> None:
        for request in list(self.scheduler.running):
            self.scheduler.preempt(request)
        self.blocks.clear()

    def _work(self, wait: bool, only: Request | None = None) -> None:
        """Run until nothing is left to do, or until `only` is done, when the engine's thread takes over; `wait` for
        more requests first."""
        if wait:
            self._wait_for_arrivals()
        if only is None:  # a brief request trusts the last look
            # Once: walking through the modules takes as long as a step.
            self._parameters = list(self.model.parameters())
            self.runner.begin()
        while True:
            has_work = self._run_pending_actions()
            # Delivered only now, so that a caller with the last result finds the engine idle.
            finished, self._finished = self._finished, []
            deliver(finished)
            if has_work and only is not None and (only in finished or only.cancelled):
                self._thread.submit(self._work, False)
                return
            if not has_work:
                return
            started = time.perf_counter()
            try:
                self.step()
            except BaseException as fault:  # also a Rust panic: otherwise the callers would wait forever
                self._fail(fault)
            self.busy_s += time.perf_counter() - started

    def _run_pending_actions(self) -> bool:
        """Run the actions queued between two steps; False when there is nothing left to do."""
        with self._lock:
            if self._pending_actions and self._weights != (now := fingerprint(self._parameters)):
                self._weights = now
                self.runner.refresh()
                self._clear_cache()
            self._arrived_tokens = 0
            while self._pending_actions:
                self._pending_actions.popleft()()
            self._working = bool(self.scheduler.running or self.scheduler.waiting)
            return self._working

    def _wait_for_arrivals(self) -> None:
        """Wait while requests keep arriving, so that they share the first step: a step costs more than this. Where
        several have come, more will: the rollouts of a batch begin one after the other."""
        count, enough = 0, min(ENOUGH_TOKENS, self.scheduler.max_batch_tokens)
        while count < len(self._pending_actions) < self.scheduler.max_requests and self._arrived_tokens < enough:
            count = len(self._pending_actions)
            time.sleep(self.batch_wait_s * (1 if count < MANY_ARRIVALS else 5))

    # --- hand-over between threads

    def run_between_steps(self, action: Callable[[], None]) -> None:
        """Run the action now if the engine is idle, otherwise on its thread before the next step."""
        with self._lock:
            if self._working:
                self._pending_actions.append(action)
            else:
                action()

    async def _submit(self, request: Request, *, wait: bool = True) -> Any:
        with self._lock:
            self._pending_actions.append(lambda: None if request.cancelled else self.scheduler.add(request))
            self._arrived_tokens += len(request.tokens)
            start, self._working = not self._working, True
        brief = not wait and isinstance(self.runner, CpuRunner) and self.runner.is_brief(len(request.tokens))
        if start and brief:
            self._work(False, only=request)
        elif start:
            self._thread.submit(self._work, wait)
        try:
            return await request.future
        except asyncio.CancelledError:
            request.cancelled = True
            self.run_between_steps(lambda: self.scheduler.finish(request))
            raise

    def _request(self, kind: Any, prompt_ids: Sequence[int], sampling: Sampling, *, new_tokens: int = 0) -> Request:
        """Create a request. Rejects bad input here, before it can fail the whole batch."""
        ids = list(prompt_ids)
        if not ids:
            raise PolicyError("the prompt has no tokens: give at least one message, or non-empty prompt_ids")
        shared = len(ids) - self.blocks.size  # other requests of a group share all but the end
        unchecked = ids[shared:] if shared > 0 and ids[:shared] == self._last_valid_prompt[:shared] else ids
        if not 0 <= min(unchecked) <= max(unchecked) < self.vocabulary:
            raise PolicyError(
                f"prompt_ids name tokens outside the model's {self.vocabulary}: are they another model's?"
            )
        if unchecked is ids:
            self._last_valid_prompt = ids.copy()
        check_length(len(ids), new_tokens, self.max_context, self.blocks)
        loop = asyncio.get_running_loop()
        return Request(kind, ids, len(ids), sampling, loop.create_future(), loop)

    def _score_request(self, prefix_ids: Sequence[int], continuation: Sequence[int], sampling: Sampling) -> Request:
        request = self._request("score", [*prefix_ids, *continuation], sampling)
        request.prompt_length, request.targets = len(prefix_ids), tuple(continuation)
        if not prefix_ids or not continuation:
            raise PolicyError("a prefix and each of its continuations need at least one token")
        request.tokens.pop()
        return request
