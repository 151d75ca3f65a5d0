"""The sequences of a result."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dagresume.results import Executed

PATHS = st.one_of(
    st.sampled_from(["a", "b", "m", "m[3]/x"]), st.tuples(st.sampled_from("mn"), st.integers(0, 9))
)


@given(st.lists(PATHS))
def test_what_was_executed_is_the_list_of_what_was_added(added: list[str | tuple[str, int]]) -> None:
    executed, plain = Executed(), []
    for path in added:
        if isinstance(path, str):
            executed.append(path)
            plain.append(path)
        else:
            executed.append_item(*path)
            plain.append(f"{path[0]}[{path[1]}]")
    assert (len(executed), list(executed), repr(executed)) == (len(plain), plain, repr(plain))
    assert plain == executed
    assert executed != [*plain, "more"]
    assert executed[1:-1] == plain[1:-1]
    assert all(executed[n] == path and executed[n - len(plain)] == path for n, path in enumerate(plain))
    assert all(path in executed for path in plain)
    assert "c" not in executed
