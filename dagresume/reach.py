"""How far a word about some paths goes: below them, and around them up to the root.

What encloses a path is entered again, but not all that is in it runs again. So the set is a tree of graph
instances, each of which says which of its nodes, items and rounds run again as a whole; asking about a path
is a walk down this tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dagresume.events import segments
from dagresume.planner import Body, Vertex

__all__ = ["Reach"]

Step = tuple[str, int | None]


class Reach:
    """What is reached of one instance of a graph.

    `whole`: nodes with all that is in them; `items`: of these maps only the items of these indexes; `rounds`:
    loops from this round on; `inside`: instances of graphs of which a part is reached. `touched`: maps, loops
    and nodes with a graph that are entered again themselves.
    """

    def __init__(self, body: Body) -> None:
        self.body = body
        self.whole: set[str] = set()
        self.items: dict[str, set[int]] = {}
        self.rounds: dict[str, int] = {}
        self.inside: dict[Step, Reach] = {}
        self.touched: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self.whole or self.touched)

    def add(self, steps: Sequence[Step]) -> None:
        """Reach the path of these steps, with all that is in it."""
        *around, (node, index) = steps
        here = self._at(around)
        if index is None:
            here.whole.add(node)
            return
        here.touched.add(node)
        if here.body.by_id[node].is_loop:
            here.rounds[node] = min(index, here.rounds.get(node, index))
        else:
            here.items.setdefault(node, set()).add(index)

    def touch(self, steps: Sequence[Step]) -> None:
        """Reach the path itself and what is around it, nothing of what is in it."""
        *around, (node, index) = steps
        if index is None:
            self._at(around).touched.add(node)
        else:
            self._at(steps)

    def _at(self, steps: Iterable[Step]) -> Reach:
        here = self
        for step in steps:
            inner = here.inside.get(step)
            if inner is None:
                body = here.body.by_id[step[0]].body
                assert body is not None  # else there were no path below it
                inner = here.inside[step] = Reach(body)
                here.touched.add(step[0])
            here = inner
        return here

    def spread(self) -> None:
        """Reach what is below, everywhere: of chained maps the items below those that are reached."""
        todo = [self]
        for reach in todo:  # grows while it is walked
            todo.extend(reach.inside.values())
            reach._spread()

    def _spread(self) -> None:
        entered: dict[str, set[int]] = {}
        for node, index in self.inside:
            if index is not None and self.body.by_id[node].is_loop:
                self.rounds[node] = min(index + 1, self.rounds.get(node, index + 1))
            elif index is not None:
                entered.setdefault(node, set()).add(index)
        first = min((self.body.by_id[node].index for node in (*self.whole, *self.touched)), default=0)
        for vertex in self.body.rules[first:]:
            if vertex.id in self.whole or vertex.id in self.touched:
                self._spread_below(vertex, self.items.get(vertex.id, set()) | entered.get(vertex.id, set()))

    def _spread_below(self, vertex: Vertex, some: set[int]) -> None:
        only = vertex.is_map and vertex.id not in self.whole
        for child in vertex.children:
            below = self.body.rules[child]
            if only and vertex.index in below.chained:
                self.touched.add(below.id)
                self.items.setdefault(below.id, set()).update(some)
            else:
                self.whole.add(below.id)

    def covers(self, path: str) -> bool:
        """Say whether a path is reached."""
        here = self
        steps = segments(path)
        for n, (node, index) in enumerate(steps, 1):
            if node in here.whole or here._has(node, index):
                return True
            if n == len(steps) and index is None:
                return node in here.touched
            inner = here.inside.get((node, index))
            if inner is None or n == len(steps):
                return inner is not None
            here = inner
        return False

    def _has(self, node: str, index: int | None) -> bool:
        if index is None:
            return False
        first = self.rounds.get(node)
        return index in self.items.get(node, ()) or (first is not None and index >= first)
