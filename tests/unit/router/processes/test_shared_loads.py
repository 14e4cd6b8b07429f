"""The loads that processes share, each with a map of its own of one file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from subprocess import DEVNULL, PIPE, Popen

import pytest

from patience import PATIENCE_S
from pdcluster_protocol.labels import Role
from pdcluster_router.core.engines.load import Load
from pdcluster_router.processes.shared_loads import SharedLoad, SharedLoads, make_table

NUM_SEATS = 3


@pytest.fixture
def file() -> Iterator[int]:
    """A table for ``NUM_SEATS``."""
    made = make_table(NUM_SEATS)
    yield made
    os.close(made)


@pytest.fixture
def tables(file: int) -> Iterator[list[SharedLoads]]:
    made = [SharedLoads(os.dup(file), NUM_SEATS, seat) for seat in range(NUM_SEATS)]
    yield made
    for table in made:
        table.close()


def entered(table: SharedLoads, key: str, role: Role = Role.DECODE) -> SharedLoad:
    load = table.enter(role, key)
    assert load is not None
    return load


def test_each_process_sees_what_the_others_have(tables: list[SharedLoads]) -> None:
    loads = [entered(table, "a") for table in tables]
    for load, num_tokens in zip(loads, (1, 20, 300), strict=True):
        load.tell(num_tokens)
    assert [load.others() for load in loads] == [320, 301, 21]
    loads[1].tell(0)
    assert [load.others() for load in loads] == [300, 301, 1]


def test_another_engine_has_a_load_of_its_own(tables: list[SharedLoads]) -> None:
    entered(tables[0], "a").tell(7)
    assert entered(tables[1], "b").others() == 0


def test_a_load_compares_what_all_processes_have(tables: list[SharedLoads]) -> None:
    others = entered(tables[1], "a")
    load = Load(100, others=entered(tables[0], "a"))
    others.tell(30)
    assert load.tokens(now=0.0) == 130
    others.tell(0)
    assert load.tokens(now=0.0) == 100


def test_engines_have_the_same_numbers_in_all_processes(tables: list[SharedLoads]) -> None:
    first = {key: entered(tables[0], key).number for key in ("a", "b", "c")}
    assert {key: entered(tables[1], key).number for key in ("c", "a", "b")} == first == {"a": 0, "b": 1, "c": 2}
    assert entered(tables[2], "p", Role.PREFILL).number == 0


def test_an_engine_that_comes_again_is_a_new_one_once_no_process_has_it(tables: list[SharedLoads]) -> None:
    mine, others = entered(tables[0], "a"), entered(tables[1], "a")
    mine.leave()
    assert entered(tables[0], "a").number == 0
    for load in (mine, others):
        load.leave()
    assert entered(tables[2], "a").number == 1


def test_a_full_table_shares_no_further_engine_until_one_leaves() -> None:
    table = SharedLoads(make_table(1, max_engines=2), 1, 0)
    first = entered(table, "a")
    first.tell(5)
    entered(table, "b")
    assert table.enter(Role.DECODE, "c") is None
    first.leave()
    again = entered(table, "c")
    assert (again.number, again.others()) == (2, 0)
    table.close()


def test_what_is_told_of_an_engine_that_has_left_is_no_other_engines_load(tables: list[SharedLoads]) -> None:
    left = entered(tables[0], "a")
    left.leave()
    entered(tables[0], "b").tell(700)
    left.tell(0)
    assert entered(tables[1], "b").others() == 700


def test_what_a_process_had_that_was_killed_is_forgotten(tables: list[SharedLoads]) -> None:
    mine, killed = entered(tables[0], "a"), entered(tables[1], "a")
    entered(tables[1], "b")
    killed.tell(500)
    assert tables[2].forget(1)
    assert mine.others() == 0
    assert entered(tables[0], "b").number == 2, "no process had it any more"


HOLDER = """
import fcntl, os, signal, sys
signal.alarm(60)
file = os.open(sys.argv[1], os.O_RDWR)
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_process_that_was_stopped_with_the_lock_holds_no_other_up(tables: list[SharedLoads], file: int) -> None:
    entered(tables[0], "a").tell(7)
    with Popen([sys.executable, "-c", HOLDER, f"/proc/{os.getpid()}/fd/{file}"], stdin=PIPE, stdout=PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == b"locked\n"
        assert tables[1].enter(Role.DECODE, "a") is None
        assert not tables[1].forget(0)
        holder.stdin.close()
    assert entered(tables[1], "a").others() == 0, "its tokens are forgotten all the same"


def test_the_lock_is_given_back(tables: list[SharedLoads], file: int) -> None:
    entered(tables[0], "a")
    with Popen([sys.executable, "-c", HOLDER, f"/proc/{os.getpid()}/fd/{file}"], stdin=DEVNULL, stdout=PIPE) as holder:
        assert holder.communicate(timeout=PATIENCE_S)[0] == b"locked\n"
