"""Chooses the requests of the next forward pass and how many tokens of each: decodes, running prompts, new requests.

Blocks are allocated as tokens are computed. When they run out, the latest request is preempted: its blocks are freed
and it is recomputed later. The earliest request is never preempted, so every request makes progress.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from toolwise.engine.blocks import BlockManager
from toolwise.engine.request import Request

Plan = dict[Request, int]
"""Tokens to compute per request; 0 if the prefix cache has all of them and the request only needs its result."""


class Scheduler:
    """`fixed_chunks`: compute prompts block by block and replies token by token, however much room there is."""

    def __init__(
        self, blocks: BlockManager, *, max_batch_tokens: int, max_requests: int, fixed_chunks: bool = False
    ) -> None:
        self.blocks = blocks
        self.max_batch_tokens = max_batch_tokens
        self.max_requests = max_requests
        self.fixed_chunks = fixed_chunks
        self.running: list[Request] = []
        """In order of arrival."""
        self.waiting: list[Request] = []
        """In order of arrival too: a preempted request comes before those that arrived later."""
        self.preemptions = 0
        self.reused_tokens = 0
        self._arrivals = 0
        self._followers: list[Request] = []
        """Requests that wait for a prefix another request is computing."""

    @property
    def requests(self) -> list[Request]:
        return [*self.running, *self.waiting]

    def add(self, request: Request) -> None:
        request.number, self._arrivals = self._arrivals, self._arrivals + 1
        self.waiting.append(request)

    def schedule(self) -> Plan:
        plan: Plan = {}
        decoding = [r for r in self.running if r.pending == 1]
        prompts = [r for r in self.running if r.pending != 1]
        room = self.max_batch_tokens
        for request in (*decoding, *prompts):
            if request.lease.table:  # else it was preempted meanwhile
                room -= self._schedule_running(request, plan, room)
        self._followers = []
        self._admit(plan, room, list(self.waiting))
        return plan

    def admit_followers(self) -> Plan:
        """Admit requests that waited for a prompt which is now in the tree, though a device may still be computing it.
        Returns those with nothing left to compute; the others run in the next step."""
        plan: Plan = {}
        self._admit(plan, self.max_batch_tokens - len(self.running), [r for r in self._followers if r in self.waiting])
        return {request: count for request, count in plan.items() if not count}

    def finish(self, request: Request, *, keep: bool = True) -> None:
        """Remove a request that is done, failed or cancelled, and free all its blocks."""
        is_prompt_end = request.kind == "read" and request.held == len(request.tokens) and not request.mean
        self.blocks.close(request.lease, request.tokens, request.hidden if is_prompt_end else None, keep=keep)
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)

    def preempt(self, request: Request) -> None:
        self.blocks.close(request.lease, request.tokens)
        request.reset_computed()
        self.running.remove(request)
        insort(self.waiting, request, key=lambda r: r.number)
        self.preemptions += 1

    def chunks(self, request: Request, count: int) -> Iterator[tuple[int, int]]:
        """(start, length) of each chunk of `count` tokens, attended one at a time."""
        if not self.fixed_chunks:
            yield request.held, count
            return
        start = request.held
        while start < request.held + count:
            length = self._chunk_length(request, start)
            yield start, length
            start += length

    def _chunk_length(self, request: Request, start: int) -> int:
        return min(self.blocks.size - start % self.blocks.size, max(request.prompt_length - start, 1))

    def _count_to_compute(self, request: Request, budget: int) -> int:
        """Number of tokens to compute for a request with room for `budget`."""
        if not self.fixed_chunks:
            return min(request.pending, budget)
        count = 0
        while count < request.pending:
            length = self._chunk_length(request, request.held + count)
            if count + length > budget:
                break
            count += length
        return count

    def _schedule_running(self, request: Request, plan: Plan, room: int) -> int:
        """Returns the number of tokens added to the plan; negative if others had to be preempted."""
        count = self._count_to_compute(request, room)
        if not count:
            return 0
        freed = 0
        while not self.blocks.extend(request.lease, request.held + count):
            youngest = self.running[-1]
            self.preempt(youngest)
            freed += plan.pop(youngest, 0)
            if youngest is request:
                return -freed
        plan[request] = count
        return count - freed

    def _admit(self, plan: Plan, budget: int, waiting: list[Request]) -> None:
        # Requests whose prompt is being computed, by the next block they add to the tree.
        leaders = {self.blocks.next_block(r.tokens, r.prompt_length): r for r in self.running if self._is_prefilling(r)}
        for request in waiting:
            if budget <= 0 or len(self.running) >= self.max_requests:
                return
            block = self.blocks.next_block(request.tokens, request.reusable_tokens or request.prompt_length)
            if request.reusable_tokens and block in leaders:  # being computed: cached by the next step
                leaders[block].has_followers = True
                self._followers.append(request)
                continue
            if not self._has_room_for(request):
                return
            request.lease = self.blocks.open(request.tokens, end=request.reusable_tokens)
            count = self._count_to_compute(request, budget)
            if (request.pending and not count) or not self.blocks.extend(request.lease, request.held + count):
                self.blocks.close(request.lease, request.tokens, keep=False)
                request.reset_computed()
                return
            self.reused_tokens += request.held
            self.waiting.remove(request)
            insort(self.running, request, key=lambda r: r.number)
            plan[request] = count
            budget -= count
            if self._is_prefilling(request):
                leaders[block] = request

    def _is_prefilling(self, request: Request) -> bool:
        min_pending = self.blocks.size if self.blocks.full_blocks_only else 1
        return self.blocks.share and not request.sampled and request.pending >= min_pending

    def _has_room_for(self, request: Request) -> bool:
        """Whether there is room for its tokens plus one block per running request; a lone request is always
        admitted."""
        needed = self.blocks.needed(len(request.tokens) + 1) + len(self.running)
        return not self.running or needed <= self.blocks.available
