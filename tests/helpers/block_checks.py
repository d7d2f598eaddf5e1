"""Checks that a block manager has lost nothing, for tests between steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from toolwise.engine import Engine
from toolwise.engine.blocks import BlockManager, Lease, PrefixNode


def check_engine(engine: Engine) -> None:
    check_blocks(engine.blocks, (request.lease for request in engine.scheduler.running))


def check_blocks(blocks: BlockManager, leases: Iterable[Lease]) -> None:
    """Raises AssertionError unless every block is in exactly one place and every reference count is right."""
    leases = list(leases)
    nodes, held, own = list(_nodes(blocks, leases)), Counter[int](), []
    for lease in leases:
        held.update(id(node) for node in lease.path[-1:])
        own += lease.own
        assert lease.table == [node.block for node in lease.path] + lease.own, "a block table does not match its lease"
    places = [*blocks._free, *own, *(node.block for node in nodes)]
    assert sorted(places) == list(range(blocks.count)), "a block is lost or in two places"
    held.update(id(node.parent) for node in nodes if node.refs)
    assert all(node.refs == held[id(node)] for node in nodes), "a reference count is wrong"
    assert blocks._cached == sum(not node.refs for node in nodes), "cached blocks are miscounted"
    unheld_leaves = {n for n in nodes if not n.refs and not n.children}
    assert set(blocks._evictable) == unheld_leaves, "an unheld leaf is not evictable"
    assert all(n.keys is None or sorted(n.children) == n.keys for n in nodes), "children are out of order"


def _nodes(blocks: BlockManager, leases: Iterable[Lease]) -> Iterator[PrefixNode]:
    """Those of the tree, and of trees that were forgotten."""
    known = [blocks._root, *blocks._evictable, *(node for lease in leases for node in lease.path)]
    roots = {id(root): root for root in map(_root_of, known)}
    pending = [node for root in roots.values() for node in root.children.values()]
    while pending:
        node = pending.pop()
        yield node
        pending.extend(node.children.values())


def _root_of(node: PrefixNode) -> PrefixNode:
    while node.parent is not None:
        node = node.parent
    return node
