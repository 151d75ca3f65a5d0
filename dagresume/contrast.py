"""What differs between two runs: definition, inputs, statuses, outputs, times, what they used up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dagresume.definition import differences
from dagresume.events import COMPLETED, Snapshot
from dagresume.masks import Mask
from dagresume.store import Loaded
from dagresume.timeline import timeline
from dagresume.views import RunInfo, run_info

__all__ = ["Change", "Contrast", "contrast"]


class Change(NamedTuple):
    """The same thing in the first run and in the second one; None where one of them has none."""

    name: str
    first: str | None
    second: str | None


@dataclass(frozen=True, slots=True)
class Contrast:
    """What differs between two runs. `definition`: in words. `inputs`: by name, packed. `statuses`: by path.
    `outputs`: paths that completed in both and gave another thing, by digest. `seconds`: what the attempts of
    each node took together; `used`: usage, both also where they are equal.
    """

    runs: tuple[RunInfo, RunInfo]
    definition: Sequence[str]
    inputs: Sequence[Change]
    statuses: Sequence[Change]
    outputs: Sequence[Change]
    seconds: Mapping[str, tuple[float, float]]
    used: Mapping[str, tuple[float, float]]

    def masked(self, masks: Sequence[Mask]) -> Contrast:
        """Give the same without the secrets of the two runs. That two secrets differ is told."""

        def hidden(mask: Mask, name: str, text: str | None) -> str | None:
            if text is None:
                return None
            return json.dumps(mask.value({name: json.loads(text)})[name], ensure_ascii=False)

        inputs = [
            Change(c.name, hidden(masks[0], c.name, c.first), hidden(masks[1], c.name, c.second))
            for c in self.inputs
        ]
        return replace(self, inputs=inputs)

    @property
    def same(self) -> bool:
        """Whether they differ in nothing but times and what they used up."""
        return not (self.definition or self.inputs or self.statuses or self.outputs)


def contrast(first: Loaded, second: Loaded, inputs: tuple[Mapping[str, str], Mapping[str, str]]) -> Contrast:
    """Compare two runs. `inputs`: those of each, packed, by name."""
    infos = (run_info(first.row, first.holder, first), run_info(second.row, second.holder, second))
    folds = (Snapshot(first.records), Snapshot(second.records))
    return Contrast(
        infos,
        _definitions(first, second),
        _inputs(*inputs),
        _statuses(*infos),
        _outputs(*folds),
        _seconds(first, second),
        {
            name: (folds[0].used.get(name, 0), folds[1].used.get(name, 0))
            for name in {**folds[0].used, **folds[1].used}
        },
    )


def _definitions(first: Loaded, second: Loaded) -> list[str]:
    found = []
    if first.row.workflow != second.row.workflow:
        found.append(f"workflow {first.row.workflow!r} is {second.row.workflow!r} in the second one")
    if first.graph != second.graph:
        changes = differences(first.graph, second.graph)
        only_names = (
            changes == ["the order of its nodes changed"] and first.row.definition == second.row.definition
        )
        found += [] if only_names else changes
    return found


def _inputs(first: Mapping[str, str], second: Mapping[str, str]) -> list[Change]:
    return [
        Change(name, first.get(name), second.get(name))
        for name in {**first, **second}
        if first.get(name) != second.get(name)
    ]


def _statuses(first: RunInfo, second: RunInfo) -> list[Change]:
    paths = {**first.nodes, **second.nodes}
    return [
        Change(path, *statuses)
        for path in paths
        if (statuses := (_status(first, path), _status(second, path)))[0] != statuses[1]
    ]


def _status(info: RunInfo, path: str) -> str | None:
    return info.nodes[path].status.value if path in info.nodes else None


def _outputs(first: Snapshot, second: Snapshot) -> list[Change]:
    """Compare by digest what completed in both. A map is what its items are: it is named only for itself if
    no item of it is.
    """
    found: list[Change] = []
    for path, one in first.paths.items():
        other = second.paths.get(path)
        if other is None or one.kind != COMPLETED or other.kind != COMPLETED or path in first.counts:
            continue
        if one.digest != other.digest and one.digest is not None and other.digest is not None:
            found.append(Change(path, one.digest.hex(), other.digest.hex()))
    return found


def _seconds(first: Loaded, second: Loaded) -> dict[str, tuple[float, float]]:
    sums = [
        {
            name: sum(bar.stop - bar.start for bar in bars if bar.end != "waiting") / 1e6
            for name, bars in each.items()
        }
        for each in (timeline(first).bars, timeline(second).bars)
    ]
    return {name: (sums[0].get(name, 0.0), sums[1].get(name, 0.0)) for name in {**sums[0], **sums[1]}}
