"""Where the boxes of a drawn graph stand: to the right of what they need, and never on each other."""

import time
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from dagresume.layout import Box, laid_out, layers


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, list[str]]:
    """A graph, parents before children."""
    count = draw(st.integers(0, 25))
    return {
        f"n{i}": [f"n{p}" for p in draw(st.lists(st.integers(0, i - 1), max_size=4))] if i else []
        for i in range(count)
    }


def boxes_of(parents: dict[str, list[str]]) -> list[Box]:
    return [Box(node, 40.0 + 7 * (n % 5), 20.0 + 11 * (n % 3)) for n, node in enumerate(parents)]


def overlap(one: Box, other: Box) -> bool:
    beside = one.x + one.width <= other.x or other.x + other.width <= one.x
    return not (beside or one.y + one.height <= other.y + 1e-6 or other.y + other.height <= one.y + 1e-6)


@settings(max_examples=200)
@given(graphs())
def test_no_box_is_on_another_and_edges_go_to_the_right(parents: dict[str, list[str]]) -> None:
    layout = laid_out(boxes_of(parents), parents)
    placed = list(layout.boxes.values())
    assert not [(a.id, b.id) for a, b in combinations(placed, 2) if overlap(a, b)]
    for child, above in parents.items():
        for parent in above:
            one, other = layout.boxes[parent], layout.boxes[child]
            assert one.x + one.width < other.x
            points = layout.edges[parent, child]
            assert points[0] == (one.x + one.width, one.y + one.height / 2)
            assert points[-1] == (other.x, other.y + other.height / 2)
            assert [x for x, _ in points] == sorted(x for x, _ in points)
    for box in placed:
        assert box.x >= 0
        assert box.y >= -1e-6
        assert box.x + box.width <= layout.width + 1e-6
        assert box.y + box.height <= layout.height + 1e-6


@given(graphs())
def test_the_same_graph_is_drawn_the_same(parents: dict[str, list[str]]) -> None:
    assert laid_out(boxes_of(parents), parents).edges == laid_out(boxes_of(parents), parents).edges


def test_a_layer_is_one_more_than_the_last_of_its_parents() -> None:
    assert layers({"a": [], "b": ["a"], "c": ["a", "b"], "d": []}) == {"a": 0, "b": 1, "c": 2, "d": 0}


def test_crossings_that_need_not_be_are_none() -> None:
    parents = {"a": [], "b": [], "c": [], "x": ["c"], "y": ["b"], "z": ["a"]}
    placed = laid_out(boxes_of(parents), parents).boxes
    above, below = "abc", "zyx"
    assert [placed[n].y for n in above] == sorted(placed[n].y for n in above)
    assert [placed[n].y for n in below] == sorted(placed[n].y for n in below)


def test_a_long_chain_and_a_large_graph_take_no_time() -> None:
    chain = {f"n{i}": [f"n{i - 1}"] if i else [] for i in range(1500)}
    wide = {f"{layer}.{k}": [f"{layer - 1}.{k}"] if layer else [] for layer in range(50) for k in range(100)}
    star = {"a": [], **{f"n{i}": ["a"] for i in range(5000)}, "z": ["a", "n7"]}
    begun = time.process_time()
    for parents in (chain, wide, star):
        laid_out(boxes_of(parents), parents)
    assert time.process_time() - begun < 6
