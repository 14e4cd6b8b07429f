"""Of all that an engine's log says about a failure, the cause: as vLLM 0.32 writes it, and as others do."""

from __future__ import annotations

import pytest

from pdcluster_cli.processes.root_cause import MAX_CHARACTERS, last_cause, root_cause

CORE = "[prefill-0] (EngineCore pid=71) ERROR 11-22 16:39:40 [core.py:1201] "
WORKER = "[prefill-0] (Worker_TP1 pid=72) ERROR 11-22 16:39:39 [multiproc_executor.py:866] "
SERVER = "[prefill-0] (APIServer pid=70) "


def traceback(prefix: str, *raised: str) -> str:
    frames = ("Traceback (most recent call last):", '  File "a.py", line 1, in f', "    f()", "    ^^^")
    return "".join(f"{prefix}{line}\n" for line in (*frames, *raised))


WORKERS_FAILURE = (
    f"{WORKER}WorkerProc failed to start.\n"
    + traceback(WORKER, "pdcluster_protocol.errors.ConfigError: kv_role is 'kv_both': start a prefill engine")
    + traceback(CORE, "Exception: WorkerProc initialization failed due to an exception in a background process. "
                "See stack trace for root cause.")
    + traceback(SERVER, "RuntimeError: Engine core initialization failed. See root cause above.")
)  # fmt: skip


def test_a_workers_error_counts_and_not_its_echoes() -> None:
    cause = "pdcluster_protocol.errors.ConfigError: kv_role is 'kv_both': start a prefill engine"
    assert root_cause(WORKERS_FAILURE) == cause


def test_of_a_chain_the_last_exception_counts_for_it_says_what_the_first_one_meant() -> None:
    log = traceback(
        CORE, "KeyError: 'foo'", "", "During handling of the above exception, another exception occurred:", ""
    )
    log += traceback(CORE, "ValueError: Transformers does not recognize this architecture")
    assert root_cause(log) == "ValueError: Transformers does not recognize this architecture"


def test_two_failures_that_are_no_chain_are_two_and_the_first_counts() -> None:
    log = traceback(WORKER, "MemoryError") + traceback(WORKER, "ConnectionError: the other rank has gone")
    assert root_cause(log) == "MemoryError"


def test_of_pydantics_page_only_vllms_own_words_are_kept() -> None:
    log = traceback(
        SERVER,
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig",
        "  Value error, Total number of attention heads (8) must be divisible by tensor parallel size (3). "
        "[type=value_error, input_value=ArgsKwargs((), {})]",
        "    For further information visit a page",
    )
    assert root_cause(log) == "Total number of attention heads (8) must be divisible by tensor parallel size (3)."


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("[d] api_server.py: error: unrecognized arguments: --nonsense", "unrecognized arguments: --nonsense"),
        ("terminate called\n  what():  out of file descriptors", "out of file descriptors"),
        (f"{CORE}Worker proc VllmWorker-1 died unexpectedly", "Worker proc VllmWorker-1 died unexpectedly"),
    ],
)
def test_without_a_traceback_an_error_line_is_the_cause(line: str, cause: str) -> None:
    assert root_cause(f"[d] INFO 11-22 16:39:40 [a.py:1] all is well\n{line}\n") == cause


def test_what_vllm_only_warns_about_is_no_cause() -> None:
    warned = traceback("[d] WARNING 11-22 16:39:40 [a.py:1] ", "ImportError: no such kernel")
    assert root_cause(warned) is None
    assert root_cause(warned + traceback(CORE, "ValueError: why")) == "ValueError: why"


@pytest.mark.parametrize("log", ["", "\n", "[d] INFO 11-22 16:39:40 [a.py:1] ready\n", traceback(SERVER)])
def test_a_log_without_an_error_has_no_cause(log: str) -> None:
    assert root_cause(log) is None


def test_an_interrupt_is_the_end_and_not_the_cause() -> None:
    assert root_cause(traceback(SERVER, "KeyboardInterrupt: terminated")) is None


def test_a_cause_is_one_line_of_bounded_length() -> None:
    found = root_cause(traceback(CORE, "ValueError: " + "x" * 5000))
    assert found is not None
    assert len(found) < MAX_CHARACTERS + 10


def test_an_engine_core_that_was_killed_is_the_cause_for_it_leaves_no_word() -> None:
    """As vLLM's API server says it. Most often the kernel did it, for want of memory."""
    said = "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': -9}"
    log = f'[d] Traceback (most recent call last):\n[d]   File "x.py", line 1, in f\n[d] RuntimeError: {said}'
    assert root_cause(log) == (
        "EngineCore has ended by signal 9: killed from outside, as the kernel does when memory runs out"
    )
    assert root_cause(f"RuntimeError: {said}".replace("-9", "1")) is None


def line(at: str) -> str:
    return f"(APIServer pid=70) INFO {at} [launcher.py:1] {at}\n"


def error(at: str, why: str) -> str:
    return traceback(f"(EngineCore pid=71) ERROR {at} [core.py:1201] ", f"ValueError: {why}")


OLD, NEW = error("11-22 12:00:00", "old"), error("11-22 16:00:00", "new")


SURVIVED = {
    "two errors": (OLD + NEW, "ValueError: new"),
    "an echo behind it": (OLD + NEW + error("11-22 16:00:59", "an echo"), "ValueError: new"),
    "noise of the interpreter behind it": (
        OLD + NEW + "Exception ignored in: <function f>\n" + traceback("", "AttributeError: noise"),
        "ValueError: new",
    ),
    "one without a time": (OLD + line("11-22 16:00:00") + traceback("", "ValueError: new"), "ValueError: new"),
    "survived for hours": (OLD + line("11-22 16:05:00"), None),
    "no times": (traceback("", "ValueError: the only one"), "ValueError: the only one"),
    "times that are none": (error("13-45 99:99:99", "new"), "ValueError: new"),
    "a new year": (error("12-31 23:59:59", "old") + error("01-01 00:00:01", "new"), "ValueError: new"),
    "told again without a time": (OLD + NEW + traceback("", "RuntimeError: Executor failed."), "ValueError: new"),
    "no log": ("", None),
}


@pytest.mark.parametrize("case", SURVIVED)
def test_a_process_that_has_served_has_survived_all_errors_but_the_last(case: str) -> None:
    log, cause = SURVIVED[case]
    assert last_cause(log) == cause
