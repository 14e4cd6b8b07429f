"""Prints the rooms of each package and the arrows between them: ``python -m tools.rooms``.

A room is a folder of a package, or a file beside its folders. An arrow means that one room imports another, however
often. The order of rooms from the outside in is that of import-linter's layers in ``pyproject.toml``. An arrow against
this order is upward. ``test_rooms.py`` checks that there is no upward arrow and no circle.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grimp

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGES: Final = (
    "pdcluster_protocol",
    "pdcluster_router",
    "pdcluster_connector",
    "pdcluster_operator",
    "pdcluster_kube",
    "pdcluster_cli",
)
Arrow = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Plan:
    """The rooms of one package. ``upward``: arrows against the order of its layers. ``unordered``: rooms without a
    place in the order, so that their arrows cannot be judged."""

    package: str
    rooms: frozenset[str]
    num_files: int
    arrows: frozenset[Arrow]
    upward: frozenset[Arrow]
    unordered: frozenset[str] = frozenset()

    @property
    def circles(self) -> list[tuple[str, ...]]:
        """Groups of rooms that reach each other, each group once."""
        inner = {room: {target for source, target in self.arrows if source == room} for room in self.rooms}
        reached = {room: _reach(room, inner) for room in self.rooms}
        found = {
            tuple(sorted(other for other in reached[room] if room in reached[other]))
            for room in self.rooms
            if room in reached[room]
        }
        return sorted(found)


def _reach(room: str, inner: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = [room]
    while waiting:
        for target in inner[waiting.pop()] - seen:
            seen.add(target)
            waiting.append(target)
    return seen


def plans() -> list[Plan]:
    """The plans of all packages. Reads all their files, which takes about a second."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    return [_plan_of(package, graph) for package in PACKAGES]


def _plan_of(package: str, graph: grimp.ImportGraph) -> Plan:
    modules = sorted(name for name in graph.modules if name.startswith(f"{package}."))
    room_of = {name: name.removeprefix(f"{package}.").partition(".")[0] for name in modules}
    arrows = {
        (room_of[source], room_of[target])
        for source in modules
        for target in graph.find_modules_directly_imported_by(source)
        if target in room_of and room_of[source] != room_of[target]
    }
    floor = _floors(package)
    upward = {(source, target) for source, target in arrows if floor.get(source, 0) > floor.get(target, 0)}
    rooms = frozenset(room_of.values())
    return Plan(package, rooms, len(modules), frozenset(arrows), frozenset(upward), rooms - floor.keys())


def _floors(package: str) -> dict[str, int]:
    """Place of each room in the order; 0: outermost."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    for contract in contracts:
        if contract["type"] == "layers" and contract["containers"] == [package]:
            return {room.strip(): floor for floor, line in enumerate(contract["layers"]) for room in line.split("|")}
    return {}


def main() -> None:
    for plan in plans():
        counts = f"{len(plan.rooms)} rooms, {plan.num_files} files, {len(plan.arrows)} arrows"
        print(f"{plan.package}: {counts}, {len(plan.circles)} circles, {len(plan.upward)} upward imports")
        for room in sorted(plan.rooms):
            inner = sorted(target for source, target in plan.arrows if source == room)
            print(f"    {room} -> {', '.join(inner) or 'nothing'}")


if __name__ == "__main__":
    main()
