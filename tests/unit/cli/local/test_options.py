"""The options of ``pdcluster local``: what they say, and what contradicts itself is refused in one line."""

from __future__ import annotations

import pytest

from pdcluster_cli.local.options import DEFAULT_START_TIMEOUT_S, Options, parse_options
from pdcluster_cli.processes.engines import LocalDevice
from pdcluster_cli.processes.parallelism import ONE_RANK, ParallelSizes
from pdcluster_protocol.errors import ConfigError
from pdcluster_protocol.launch import RouterPolicy


def parse(*words: str) -> Options:
    return parse_options(words)


def test_without_options_it_is_one_engine_of_each_role_and_the_tiny_model() -> None:
    assert parse() == Options(
        model=None,
        prefill=1,
        decode=1,
        port=8000,
        prefill_parallelism=ONE_RANK,
        decode_parallelism=ONE_RANK,
        prefill_args=(),
        decode_args=(),
        device=None,
        policy=None,
        start_timeout_s=DEFAULT_START_TIMEOUT_S,
        is_once=False,
        question=None,
    )


def test_every_option_arrives() -> None:
    words = ["--model", "/m", "--prefill", "2", "--decode", "3", "--port", "9", "--device", "npu"]
    words += ["--prefill-tp", "4", "--prefill-pp", "2", "--decode-tp", "3", "--decode-dp", "5", "--start-timeout", "90"]
    words += ["--policy", "affinity"]
    options = parse(*words, "--prefill-args", "--a 'b c'", "--decode-args", "--x", "--once", "Why?")
    assert options == Options(
        model="/m",
        prefill=2,
        decode=3,
        port=9,
        prefill_parallelism=ParallelSizes(4, 2, 1),
        decode_parallelism=ParallelSizes(3, 1, 5),
        prefill_args=("--a", "b c"),
        decode_args=("--x",),
        device=LocalDevice.NPU,
        policy=RouterPolicy.AFFINITY,
        start_timeout_s=90.0,
        is_once=True,
        question="Why?",
    )
    assert (options.num_engines, options.num_ranks) == (5, 2 * 8 + 3 * 15)


def test_once_alone_asks_the_built_in_question() -> None:
    options = parse("--once")
    assert (options.is_once, options.question) == (True, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prefill", "0"], "0 engines: use 1 to 64"),
        (["--decode", "65"], "65 engines: use 1 to 64"),
        (["--port", "0"], "port 0: use 1 to 65535"),
        (["--port", "65536"], "port 65536: use 1 to 65535"),
        (["--prefill-args", "--a 'b"], "No closing quotation: check the quotes"),
        (["--prefill-tp", "0"], "use 1 to 64"),
        (["--decode-pp", "two"], "use 1 to 64"),
        (["--start-timeout", "0"], "0 seconds: use 1 to 86400"),
        (["--start-timeout", "nan"], "nan seconds: use 1 to 86400"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--decode", "many"], "many engines: use 1 to 64"),
        (["--port", "http"], "port http: use 1 to 65535"),
        (["--start-timeout", "soon"], "soon seconds: use 1 to 86400"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(*words)
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert words[0] in last
    assert message in last


def test_only_the_word_after_engine_arguments_is_taken_with_them() -> None:
    options = parse("--prefill-args", "--x", "--once", "--decode-args=--y")
    assert (options.prefill_args, options.is_once, options.decode_args) == (("--x",), True, ("--y",))
    with pytest.raises(SystemExit):
        parse("--decode-args")


@pytest.mark.parametrize(
    "words", ["--tensor-parallel-size 2", "--tensor-parallel-size=2", "-tp 2", "--tensor_parallel_size 2"]
)
def test_sizes_in_vllms_own_words_are_the_same_sizes(words: str) -> None:
    options = parse("--prefill-args", f"{words} --block-size 32")
    assert options.prefill_parallelism == ParallelSizes(tensor=2)
    assert options.prefill_args == ("--block-size", "32")
    assert options.decode_parallelism == ONE_RANK


def test_a_size_may_be_said_twice_and_not_in_two_ways() -> None:
    assert parse("--decode-tp", "2", "--decode-args", "-tp 2 -dp 3").decode_parallelism == ParallelSizes(2, 1, 3)
    with pytest.raises(
        ConfigError, match=r"^--decode-args: tensor parallel size is both 2 and 4 \(--tensor-parallel-si"
    ):
        parse("--decode-tp", "2", "--decode-args", "--tensor-parallel-size 4")


@pytest.mark.parametrize("words", ["-tp", "-tp x", "--data-parallel-size=0", "-pp 65"])
def test_a_size_that_is_none_is_refused_by_name(words: str) -> None:
    name = words.partition("=")[0].split()[0]
    with pytest.raises(ConfigError, match=f"^--prefill-args: {name} .*: use 1 to 64$"):
        parse("--prefill-args", words)


@pytest.mark.parametrize("words", ["--tensor-parallel 2", "--pipeline_parallel=2", "--data-parallel-si 2"])
def test_a_shortened_size_is_refused_for_vllm_would_take_it_and_we_would_not(words: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^--prefill-args: --(tensor|pipeline|data)-parallel\S*: write --\w+-parallel-size$"
    ):
        parse("--prefill-args", words)


def test_other_options_of_data_parallel_are_left_alone() -> None:
    words = "--data-parallel-size-local 1 --data-parallel-backend mp"
    assert parse("--prefill-args", words).prefill_args == tuple(words.split())


@pytest.mark.parametrize("executor", ["mp", "ray", "external_launcher", "my.Executor"])
def test_any_executor_that_is_asked_for_is_left_alone(executor: str) -> None:
    words = f"--distributed-executor-backend {executor}"
    assert parse("--prefill-tp", "2", "--prefill-args", words).prefill_args == tuple(words.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--distributed-executor-backend foo", "foo"),
        ("--distributed_executor_backend=MP", "MP"),
        ("--distributed-executor-backend", "without a value"),
    ],
)
def test_an_executor_that_vllm_does_not_have_is_refused_with_those_that_it_has(words: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse("--decode-args", words)
    assert str(refused.value) == (
        f"--decode-args: --distributed-executor-backend {said}: vLLM has mp, ray, uni and external_launcher, or takes "
        "a class by its whole name (module.Class)"
    )


@pytest.mark.parametrize("words", ["--distributed-executor-backend uni", "--distributed_executor_backend=uni"])
def test_an_executor_of_one_rank_is_refused_for_two(words: str) -> None:
    assert parse("--prefill-dp", "2", "--prefill-args", words)
    with pytest.raises(
        ConfigError, match=r"^--prefill-args: --distributed-executor-backend uni runs one rank, and TP 2 x"
    ):
        parse("--prefill-tp", "2", "--prefill-args", words)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize(
    "words",
    [
        *("--port 9999", "--port=9999", "--host 0.0.0.0", "--uds /x", "--ssl_keyfile k", "--headless"),
        *("--por 9999", "--hos=0.0.0.0", "--ud /x", "--ssl_key=k", "--ssl-ca c", "--headl"),  # vLLM takes these too.
    ],
)
def test_what_would_take_an_engine_from_where_it_is_asked_is_refused(role: str, words: str) -> None:
    """Ten minutes later it would be told as an engine that does not become ready, behind its own "startup complete"."""
    name = words.replace("=", " ").split()[0].replace("_", "-")
    with pytest.raises(ConfigError, match=rf"--{role}-args: {name} .*: leave it out"):
        parse(f"--{role}-args", words)


@pytest.mark.parametrize("words", ["--grpc-port 1", "--ssl-cert-reqs 2", "-- x", "-O 1", "--load-format auto -h"])
def test_what_only_begins_alike_is_left_to_vllm(words: str) -> None:
    assert parse("--prefill-args", words).prefill_args == tuple(words.split())


def test_a_number_with_more_digits_than_python_reads_is_refused_as_any_other() -> None:
    digits = "9" * 5000
    with pytest.raises(ConfigError, match=r": use 1 to 64$"):
        parse("--prefill-args", f"-tp {digits}")
