"""What the samples of ``soak.py`` say: slopes, and whether something grows. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.figures import format_table, slope

SAMPLE_COLUMNS: Final = ("process", "requests", "memory MiB", "threads", "descriptors")
SLOPE_COLUMNS: Final = ("process", "memory KiB / 1,000 requests", "threads", "descriptors", "flat")
_SHOWN: Final = 8
_NOISE_KIB: Final = 1024


@dataclass(frozen=True, slots=True)
class Sample:
    """One process after ``num_done`` requests. ``memory_kib``: resident."""

    num_done: int
    memory_kib: int
    num_threads: int
    num_descriptors: int


@dataclass(frozen=True, slots=True)
class Growth:
    """Over the last three quarters of a soak."""

    memory_kib_per_1000: float
    more_threads: int
    more_descriptors: int
    is_flat: bool


def growth_of(samples: Sequence[Sample]) -> Growth:
    """The first quarter is left out: pools and caches fill then. At least one sample.

    Example: 100 MiB at every sample, 12 threads and 40 descriptors throughout → flat.
    """
    settled = samples[len(samples) // 4 :]
    first, last = settled[0], settled[-1]
    per_request = slope([(sample.num_done, sample.memory_kib) for sample in settled])
    more_threads, more_descriptors = (
        last.num_threads - first.num_threads,
        last.num_descriptors - first.num_descriptors,
    )
    is_steady = per_request * (last.num_done - first.num_done) < max(_NOISE_KIB, _noise_kib(settled))
    return Growth(
        per_request * 1000, more_threads, more_descriptors, is_steady and max(more_threads, more_descriptors) <= 0
    )


def format_slopes(samples: Mapping[str, Sequence[Sample]]) -> str:
    """A Markdown table with a line for each process."""
    return format_table(SLOPE_COLUMNS, [_slope_cells(name, growth_of(of_one)) for name, of_one in samples.items()])


def format_samples(samples: Mapping[str, Sequence[Sample]]) -> str:
    """A Markdown table of some samples of each process, first and last among them."""
    lines = []
    for name, of_one in samples.items():
        step = max(1, (len(of_one) - 1) // (_SHOWN - 1))
        shown = dict.fromkeys([*of_one[::step], of_one[-1]])
        lines += [_sample_cells(name, sample) for sample in shown]
    return format_table(SAMPLE_COLUMNS, lines)


def _noise_kib(samples: Sequence[Sample]) -> float:
    """How far the samples of the calmer half lie around their own line: a leap is no noise."""
    half = len(samples) // 2
    return min(_spread_kib(samples[:half]), _spread_kib(samples[half:]))


def _spread_kib(samples: Sequence[Sample]) -> float:
    per_request = slope([(sample.num_done, sample.memory_kib) for sample in samples])
    off = [sample.memory_kib - per_request * sample.num_done for sample in samples]
    return max(off) - min(off) if off else 0.0


def _slope_cells(name: str, growth: Growth) -> tuple[str, ...]:
    return (
        name,
        f"{growth.memory_kib_per_1000:+,.1f}",
        f"{growth.more_threads:+d}",
        f"{growth.more_descriptors:+d}",
        "yes" if growth.is_flat else "NO",
    )


def _sample_cells(name: str, sample: Sample) -> tuple[str, ...]:
    memory = f"{sample.memory_kib / 1024:,.1f}"
    return name, f"{sample.num_done:,}", memory, str(sample.num_threads), str(sample.num_descriptors)
