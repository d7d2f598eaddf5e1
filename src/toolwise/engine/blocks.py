"""The KV cache: fixed-size blocks of keys and values, shared through a prefix tree.

A node of the tree is one block and the tokens whose keys and values it holds; the path from the root gives the tokens
before them. Requests hold the nodes of their path and write into private blocks, which join the tree when full. Nodes
that no request holds stay as a cache, and the oldest leaves are evicted when blocks run short.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolwise.errors import ContextFullError

TokenKey = tuple[int, ...]
_NO_CHILDREN: dict[Any, Any] = {}
"""Shared by all leaves, of which there are many: never written to."""


class PrefixNode:
    """A block in the tree. A partly filled block is a leaf that other requests copy and continue from."""

    __slots__ = ("block", "children", "hidden", "keys", "parent", "refs", "tokens")

    def __init__(self, parent: PrefixNode | None, tokens: TokenKey, block: int) -> None:
        self.parent, self.tokens, self.block = parent, tokens, block
        self.children: dict[TokenKey, PrefixNode] = _NO_CHILDREN
        self.keys: list[TokenKey] | None = None
        """The children's keys, sorted on first use: those with the longest common prefix are neighbours."""
        self.refs = 0
        """Leases that end here plus children that are held: holding a node holds all its ancestors."""
        self.hidden: Any = None
        """Hidden state of the last token, if it was computed: a request that ends here need not run the model again."""


@dataclass(slots=True)
class Lease:
    """What one request holds: nodes of the tree, then private blocks; the first `held` tokens are computed."""

    path: list[PrefixNode] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    """All blocks, in order."""
    held: int = 0
    hidden: Any = None
    """The last token's hidden state, if the tree had the whole prompt."""
    private: bool = False
    """Whether its tokens were computed by older weights: no other request may use them."""


class BlockManager:
    """`count` blocks of `size` tokens. Without `share` nothing is reused; `full_blocks_only` shares only full
    blocks."""

    def __init__(self, count: int, size: int, *, share: bool = True, full_blocks_only: bool = False) -> None:
        self.count, self.size, self.share, self.full_blocks_only = count, size, share, full_blocks_only
        self.copies: dict[int, int] = {}
        """Target block -> source block, to copy before the next forward pass; all copies happen at once."""
        self.evictions = 0
        self._free = list(range(count - 1, -1, -1))
        self._root = PrefixNode(None, (), -1)
        self._evictable: OrderedDict[PrefixNode, None] = OrderedDict()
        """Leaves that no request holds, oldest first."""
        self._last_walk: tuple[Sequence[int], list[PrefixNode]] = (), []
        """The tokens of the last lookup and the nodes they matched."""
        self._cached = 0
        """Nodes that no request holds. Nor are their descendants, so each of them can be evicted eventually."""

    @property
    def available(self) -> int:
        return len(self._free) + self._cached

    @property
    def free(self) -> int:
        """Blocks that hold nothing, not even cached data."""
        return len(self._free)

    @property
    def in_use(self) -> int:
        return self.count - self.available

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.size)

    # --- life cycle of a request: open, extend, commit, close

    def open(self, tokens: Sequence[int], *, end: int) -> Lease:
        """Hold as much of `tokens[:end]` as the tree has; all of it only if the last hidden state is cached too."""
        path, source, held = self._match(tokens, end)
        last = source if source is not None else path[-1] if path else None
        hidden = None
        if held == end and end:
            hidden = last.hidden if last is not None and held % self.size == len(last.tokens) % self.size else None
            if hidden is None:
                path, source, held = self._match(tokens, end - 1)
        if path:
            self._retain(path[-1])
        lease = Lease(path, [], [node.block for node in path], held, hidden)
        if source is not None:
            block = self._allocate(protect=source)
            if block is None:
                lease.held, lease.hidden = len(path) * self.size, None
            else:
                self._copy(source.block, block)
                lease.own.append(block)
                lease.table.append(block)
        return lease

    def next_block(self, tokens: Sequence[int], end: int) -> tuple[int, TokenKey]:
        """The first block of `tokens[:end]` that the tree lacks: its parent's id and the tokens it will hold."""
        path = self._walk(tokens, end)
        start = len(path) * self.size
        return id(path[-1] if path else self._root), tuple(tokens[start : min(end, start + self.size)])

    def missing(self, lease: Lease, length: int) -> int:
        """Blocks the lease lacks for `length` tokens."""
        return max(0, self.needed(length) - len(lease.table))

    def extend(self, lease: Lease, length: int) -> bool:
        """Allocate blocks for `length` tokens; allocates nothing and returns False if there are not enough."""
        missing = self.missing(lease, length)
        if not missing:
            return True
        if missing > self.available:
            return False
        for block in self._allocate_many(missing):
            lease.own.append(block)
            lease.table.append(block)
        return True

    def trim(self, lease: Lease, length: int) -> None:
        """Give back blocks beyond `length` tokens, which were allocated for tokens that are not computed."""
        extra = len(lease.table) - self.needed(length)
        if extra > 0:
            self._free += lease.own[-extra:]
            del lease.own[-extra:], lease.table[-extra:]

    def commit(self, lease: Lease, tokens: Sequence[int], held: int, *, share_up_to: int | None = None) -> None:
        """Record that `held` tokens are computed: blocks that became full join the tree."""
        lease.held = held
        if not self.share or lease.private:
            return
        limit = held if share_up_to is None else min(held, share_up_to)
        path, size = lease.path, self.size
        first, full = len(path), limit // size
        if full <= first:
            return
        parent = previous_end = path[-1] if path else self._root
        blocks, lease.own = lease.own[: full - first], lease.own[full - first :]
        added = 0
        for index, block in zip(range(first, full), blocks, strict=True):
            key = tuple(tokens[index * size : (index + 1) * size])
            node = parent.children.get(key)
            if node is None:
                node = self._attach(parent, key, block)
                node.refs = 1  # from the next node, or from this lease
                added += 1
            else:  # another request computed the same block meanwhile: keep one of the two
                lease.table[index] = node.block
                self._free.append(block)
            path.append(node)
            parent = node
        existing = path[-1 - added] if len(path) > added else self._root
        if existing is not previous_end:  # the lease holds the new nodes through their existing parent
            self._retain(existing)
            self._release(previous_end)

    def share_tail(self, lease: Lease, tokens: Sequence[int], hidden: Any) -> None:
        """Let other requests continue from the end of `tokens`, which are all computed: copies the last block."""
        if not self.share or self.full_blocks_only or lease.private:
            return
        assert lease.held >= len(tokens), "cannot share tokens that are not computed"
        parent, key = self._split_tail(lease, tokens)
        if not key:
            parent.hidden = hidden
        elif key in parent.children:
            parent.children[key].hidden = hidden
        elif self._free:  # optional, so not worth an eviction
            block = self._free.pop()
            self._copy(lease.table[len(tokens) // self.size], block)
            self._insert(parent, key, block).hidden = hidden

    def close(self, lease: Lease, tokens: Sequence[int], hidden: Any = None, *, keep: bool = True) -> None:
        """Free everything. Nodes in the tree stay as a cache; with `keep`, the last block joins them."""
        if keep and self.share and not self.full_blocks_only and not lease.private:
            parent, key = self._split_tail(lease, tokens[: lease.held])
            if key and key not in parent.children and lease.own:
                self._insert(parent, key, lease.own.pop(0))
            if hidden is not None:
                end = parent.children.get(key) if key else parent
                if end is not None:
                    end.hidden = hidden
        self._free += lease.own
        if lease.path:
            self._release(lease.path[-1])
        lease.path, lease.own, lease.table, lease.held, lease.hidden = [], [], [], 0, None
        lease.private = False

    def clear(self) -> None:
        """Drop everything that no request holds."""
        if not self.in_use:  # at once: after each update there are thousands of nodes
            self._root, self._last_walk = PrefixNode(None, (), -1), ((), [])
            self._evictable.clear()
            self._free, self._cached = list(range(self.count - 1, -1, -1)), 0
        while self._evictable:
            self._evict(self._evictable.popitem(last=False)[0])
        self.copies.clear()

    def forget(self, leases: Iterable[Lease]) -> None:
        """Begin a new tree, in which nothing is found that is cached now. `leases`, which are all that hold blocks,
        keep them for themselves."""
        while self._evictable:
            self._evict(self._evictable.popitem(last=False)[0])
        self._root, self._last_walk = PrefixNode(None, (), -1), ((), [])
        for lease in leases:
            lease.private = True

    def resize(self, count: int) -> None:
        """Change the number of blocks; no request may hold any."""
        self.clear()
        assert not self.in_use, "blocks are in use"
        self.count, self._free = count, list(range(count - 1, -1, -1))

    # --- the tree

    def _match(self, tokens: Sequence[int], end: int) -> tuple[list[PrefixNode], PrefixNode | None, int]:
        """Full blocks of `tokens[:end]` in the tree, then the block to copy: the one that matches most of the rest."""
        if not self.share:
            return [], None, 0
        path = self._walk(tokens, end)
        node = path[-1] if path else self._root
        held = len(path) * self.size
        rest = tuple(tokens[held : min(end, held + self.size)])
        if self.full_blocks_only or not rest:
            return path, None, held
        if node.keys is None:
            node.keys = sorted(node.children)
        index = bisect_left(node.keys, rest)
        candidates = [(_common_length(key, rest), key) for key in node.keys[max(0, index - 1) : index + 1]]
        common, key = max(candidates, default=(0, ()))
        return (path, node.children[key], held + common) if common else (path, None, held)

    def _walk(self, tokens: Sequence[int], end: int) -> list[PrefixNode]:
        """The nodes of the full blocks of `tokens[:end]`. Starts from the last lookup, because consecutive prompts
        often share a prefix."""
        size, (last_tokens, last_path) = self.size, self._last_walk
        full = min(end // size, len(last_path))
        same_prefix = full > 0 and (last_tokens is tokens or last_tokens[: full * size] == tokens[: full * size])
        path = last_path[:full] if same_prefix else []
        node = path[-1] if path else self._root
        while (len(path) + 1) * size <= end:
            child = node.children.get(tuple(tokens[len(path) * size : (len(path) + 1) * size]))
            if child is None:
                break
            path.append(child)
            node = child
        self._last_walk = tokens, path[:]
        return path

    def _split_tail(self, lease: Lease, tokens: Sequence[int]) -> tuple[PrefixNode, TokenKey]:
        """The node of the last full block of a sequence, and the remaining tokens, fewer than a block."""
        full = len(tokens) // self.size
        parent = lease.path[full - 1] if full else self._root
        return parent, tuple(tokens[full * self.size :])

    def _insert(self, parent: PrefixNode, key: TokenKey, block: int) -> PrefixNode:
        """Add a leaf that no request holds yet."""
        node = self._attach(parent, key, block)
        self._evictable.pop(parent, None)
        self._evictable[node] = None
        self._cached += 1
        return node

    def _attach(self, parent: PrefixNode, key: TokenKey, block: int) -> PrefixNode:
        node = PrefixNode(parent, key, block)
        if parent.children is _NO_CHILDREN:
            parent.children = {}
        parent.children[key] = node
        if parent.keys is not None:
            insort(parent.keys, key)
        return node

    def _retain(self, node: PrefixNode) -> None:
        while node.parent is not None:
            node.refs += 1
            if node.refs > 1:
                return
            self._evictable.pop(node, None)
            self._cached -= 1
            node = node.parent

    def _release(self, node: PrefixNode) -> None:
        while node.parent is not None:
            node.refs -= 1
            if node.refs:
                return
            self._cached += 1
            if not node.children:
                self._evictable[node] = None
            node = node.parent

    def _allocate_many(self, count: int) -> list[int]:
        """Allocate `count` blocks, which must be available."""
        if len(self._free) >= count and not self.copies:
            blocks = self._free[: -count - 1 : -1]
            del self._free[-count:]
            return blocks
        blocks = []
        for _ in range(count):
            block = self._allocate()
            assert block is not None
            blocks.append(block)
        return blocks

    def _allocate(self, protect: PrefixNode | None = None) -> int | None:
        if not self._free:
            victim = next((leaf for leaf in self._evictable if leaf is not protect), None)
            if victim is None:
                return None
            del self._evictable[victim]
            self._evict(victim)
            self.evictions += 1
        block = self._free.pop()
        self.copies.pop(block, None)
        return block

    def _evict(self, node: PrefixNode) -> None:
        self._cached -= 1
        self._free.append(node.block)
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens]
        self._last_walk = (), []
        if parent.keys is not None:
            del parent.keys[bisect_left(parent.keys, node.tokens)]
        if not parent.children and not parent.refs and parent.parent is not None:
            self._evictable[parent] = None

    def _copy(self, source: int, target: int) -> None:
        """If `source` itself is still waiting to be copied, copy from where its content is."""
        self.copies[target] = self.copies.get(source, source)


def _common_length(a: TokenKey, b: TokenKey) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def check_length(tokens: int, new_tokens: int, max_context: int, blocks: BlockManager) -> None:
    """Reject a prompt that cannot fit, before it can fail the whole batch."""
    what = f"a prompt of {tokens} tokens and {new_tokens} new ones do not fit"
    if tokens + new_tokens > max_context:
        raise ContextFullError(f"{what} the model's {max_context}: shorten the prompt or lower rollout.max_new_tokens")
    if blocks.needed(tokens + new_tokens) > blocks.count:
        raise ContextFullError(
            f"{what} the engine's cache of {blocks.count * blocks.size} tokens: give it more memory, or shorten the "
            "prompt"
        )
