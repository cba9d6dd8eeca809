"""An ablation: a question, simulated cases, the paper's values, and one sentence about the difference."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from itertools import starmap
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Generic, Protocol, Self, TypeVar

from lab.ablations.common.metrics import Metric
from lab.ablations.common.runs import Runs
from lab.loads.generators import GENERATORS, STANDS_FOR
from lab.loads.trace import TraceRow, jittered, read_trace
from lab.loads.traces import find_trace
from lab.simulator.cluster import Cluster
from lab.simulator.config import SimConfig
from lab.simulator.models.step_models import StepModel
from lab.simulator.result import figures

DEFAULT_REQUESTS = 4000
"""Default number of requests of a generated load."""

ROWS = {"conversation": 12_031, "synthetic": 3_993, "toolagent": 23_608}
"""Requests in each released trace."""

T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Student's t for 95 %, of 1 degree of freedom and more."""

T95_MORE = {40: 2.021, 60: 2.000, 120: 1.980}
"""The same for more degrees of freedom; of those between, the next lower one counts, which is the wider interval."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows of a released trace, or, if its file is missing, of the generator fitted to it (the result says which). A
    name of lab/loads/generators.py that is not a trace generates rows by the seed."""

    trace: str = "conversation"
    requests: int | None = None
    speed: float = 1.0
    jitter_s: float = 3.0
    change: Callable[[list[TraceRow], int], list[TraceRow]] | None = None  # (rows, seed) -> rows


Look = Callable[[Cluster], dict[str, float]]
"""Further figures of a run, from its requests; see lab/ablations/common/looks.py."""


class Point(Protocol):
    """A case as tables, plots and result files need it: `series` and `x` place it in a plot."""

    @property
    def label(self) -> str: ...
    @property
    def series(self) -> str: ...
    @property
    def x(self) -> float | None: ...
    def settings(self) -> dict[str, object]: ...
    def as_dict(self) -> dict[str, Any]: ...


class Simulated(Point, Protocol):
    """A case that a simulator plays."""

    @property
    def source(self) -> str:
        """The origin of its requests."""
        ...

    def simulate(self, seed: int) -> dict[str, Any]:
        """Figures under one seed."""
        ...

    def brief(self) -> dict[str, Any]:
        """`as_dict` without defaults."""
        ...


C = TypeVar("C", bound=Point)
S = TypeVar("S", bound=Simulated)


@dataclass(frozen=True, slots=True)
class Case:
    """One bar or point: `label` names it, `series` and `x` place it in a plot."""

    label: str
    config: SimConfig
    workload: Workload = Workload()
    ttft_slo_s: float | None = 30.0  # the limit of an effective request in FAST'25
    tbt_slo_s: float | None = 0.2
    tail_tbt: bool = False  # TBT = the mean of the longest tenth of the gaps instead of the mean
    look: tuple[Look, ...] = ()
    model: StepModel | None = None  # replaces the configuration's preset
    series: str = ""
    x: float | None = None

    def settings(self) -> dict[str, object]:
        """All settings of a run, except the seed and the requests, which its definition describes."""
        limits = {"TTFT objective (s)": self.ttft_slo_s, "TBT objective (s)": self.tbt_slo_s}
        return self.config.as_dict() | {"speed": self.workload.speed} | limits

    def as_dict(self) -> dict[str, Any]:
        """For a result file."""
        model = None if self.model is None else asdict(self.model)
        return {"config": self.config.as_dict(), "model": model, "speed": self.workload.speed}

    def brief(self) -> dict[str, Any]:
        default = SimConfig().as_dict()
        changed = {name: value for name, value in self.config.as_dict().items() if value != default[name]}
        return {"config": changed, "speed": self.workload.speed}

    @property
    def source(self) -> str:
        return rows_of(self.workload, 0)[0]

    def simulate(self, seed: int) -> dict[str, Any]:
        """A cluster plays the requests of the workload."""
        work = self.workload
        source, rows = rows_of(work, seed)
        rows = rows[: work.requests]
        if work.change is not None:
            rows = work.change(rows, seed)
        if not source.startswith(GENERATED):
            rows = jittered(rows, work.jitter_s, seed)
        rows = [replace(row, timestamp_ms=row.timestamp_ms / work.speed) for row in rows]
        cluster = Cluster(replace(self.config, seed=seed), self.model).played(rows)
        found = figures(cluster, self.ttft_slo_s, self.tbt_slo_s, self.tail_tbt)
        for look in self.look:
            found |= look(cluster)
        return found


@dataclass(frozen=True, slots=True)
class Estimated:
    """Mean over seeds, and half of the 95 % confidence interval (NaN for one seed). A mean of NaN: there is no
    value. `samples`: the values by seed."""

    mean: float
    half: float
    samples: tuple[float, ...] = field(default=(), repr=False, compare=False)

    def __str__(self) -> str:
        if math.isnan(self.mean):
            return ""
        return f"{self.mean:.4g}" if math.isnan(self.half) else f"{self.mean:.4g} ±{self.half:.2g}"


@dataclass(frozen=True, slots=True)
class Goal:
    """A target value, and the measured value."""

    text: str
    wanted: str
    ours: str
    met: bool | None  # None: the interval contains the target


@dataclass(frozen=True, slots=True)
class Ablation(Generic[C]):
    """A question and its cases, simulated (`Case`) or live (`LiveCase`). `paper`: the paper's value of the first
    metric, by case label; `reading`: an interpretation computed from the numbers; `goals`: goals of this project that
    the numbers answer."""

    name: str
    question: str
    definition: str
    cases: Callable[[int | None], list[C]]  # maximum number of requests -> cases
    metrics: dict[str, Metric]
    reading: Callable[[dict[str, dict[str, Estimated]]], str]
    paper: dict[str, float] = field(default_factory=dict)
    paper_source: str = ""
    goals: Callable[[dict[str, dict[str, Estimated]]], list[Goal]] | None = None
    x_name: str = ""  # name of the cases' x, if they are points of a curve


@dataclass(slots=True)
class Outcome(Generic[C]):
    """Everything about one ablation's run."""

    ablation: Ablation[C]
    cases: list[C]
    values: dict[str, dict[str, Estimated]]  # label -> metric -> value
    raw: dict[str, list[dict[str, Any]]]  # label -> figures by seed
    source: str  # the origin of the requests
    nodes: Mapping[str, Any] = field(default_factory=dict)  # label -> resolved Config of one of its real nodes

    @classmethod
    def of(cls, ablation: Ablation[C], cases: list[C], raw: dict[str, list[dict[str, Any]]], source: str) -> Self:
        """With every metric of every case."""
        values = {
            label: {name: estimated([of(result) for result in results]) for name, of in ablation.metrics.items()}
            for label, results in raw.items()
        }
        return cls(ablation, cases, values, raw, source)


def run(
    ablation: Ablation[S],
    requests: int | None,
    seeds: int,
    workers: int,
    done: Callable[[], None],
    kept: Runs | None = None,
) -> Outcome[S]:
    """Runs every case with seeds 0..seeds-1, except runs found in `kept`; new runs are stored there. `done` is called
    after each run. Raises ValueError for repeated labels."""
    (outcome,) = run_each([ablation], requests, seeds, workers, lambda name: done(), kept)
    return outcome


def run_each(
    ablations: Sequence[Ablation[Any]],
    requests: int | None,
    seeds: int,
    workers: int,
    done: Callable[[str], None],
    kept: Runs | None = None,
) -> Iterator[Outcome[Any]]:
    """`run` for several, in order. All processes work until the last run of all: while one finishes an ablation the
    others have begun the next. done(name): after each run of the ablation called `name`."""
    started = [Started(ablation, ablation.cases(requests), seeds, kept) for ablation in ablations]
    pool = ProcessPoolExecutor(workers) if workers > 1 and any(one.missing for one in started) else None
    try:
        for one in started:
            one.begin(pool)
        for one in started:
            yield one.outcome(partial(done, one.ablation.name))
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)


class Started:
    """One ablation whose runs are on their way. Raises ValueError for repeated labels."""

    def __init__(self, ablation: Ablation[Any], cases: list[Any], seeds: int, kept: Runs | None) -> None:
        if len({case.label for case in cases}) < len(cases):
            raise ValueError(f"{ablation.name}: labels repeat")
        self.ablation, self._cases, self._kept = ablation, cases, kept
        self._work = [(case, seed) for case in cases for seed in range(seeds)]
        self._known = [None if kept is None else kept.get(ablation.name, case.label, seed) for case, seed in self._work]
        self._results: Iterator[dict[str, Any]] = iter(())

    @property
    def missing(self) -> list[tuple[Any, int]]:
        """Runs that nobody has stored."""
        return [pair for pair, known in zip(self._work, self._known, strict=True) if known is None]

    def begin(self, pool: Executor | None) -> None:
        """Without a pool the runs are made one by one when `outcome` asks for them."""
        self._results = starmap(simulate, self.missing)
        if pool is not None:
            waited = [pool.submit(simulate, *pair) for pair in self.missing]
            self._results = (future.result() for future in waited)

    def outcome(self, done: Callable[[], None]) -> Outcome[Any]:
        """Waits for all runs."""
        raw: dict[str, list[dict[str, Any]]] = {case.label: [] for case in self._cases}
        for (case, seed), known in zip(self._work, self._known, strict=True):
            found = next(self._results) if known is None else known
            if known is None and self._kept is not None:
                self._kept.put(self.ablation.name, case.label, seed, found)
            raw[case.label].append(found)
            done()
        sources = dict.fromkeys(case.source for case in self._cases)
        return Outcome.of(self.ablation, self._cases, raw, ", ".join(sources))


def simulate(case: Simulated, seed: int) -> dict[str, Any]:
    """For other processes. A run makes millions of objects and no cycles before its end, so the cyclic collector would
    walk through them again and again and find nothing: it rests until then."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return case.simulate(seed)
    finally:
        if collects:
            gc.enable()
        gc.collect()


GENERATED = "generated"


def rows_of(work: Workload, seed: int) -> tuple[str, list[TraceRow]]:
    """(their origin, rows)"""
    if work.trace in GENERATORS and work.trace not in STANDS_FOR:
        return f"{GENERATED}: {work.trace}", _generated(work.trace, seed, work.requests or DEFAULT_REQUESTS)
    return _released(work.trace)


@lru_cache(maxsize=4)
def _released(trace: str) -> tuple[str, list[TraceRow]]:
    path = find_trace(trace)
    if path is None:
        kind = STANDS_FOR[trace]
        return f"{GENERATED}: {kind}, in place of the {trace} trace", _generated(kind, 0, ROWS[trace])
    return path.name, list(read_trace(Path(path)))


@lru_cache(maxsize=4)
def _generated(kind: str, seed: int, requests: int) -> list[TraceRow]:
    return GENERATORS[kind](seed, requests)


def student_t(freedom: int) -> float:
    """Half of a 95 % interval of a mean over its standard error; `freedom`: degrees of freedom, at least 1."""
    if freedom <= len(T95):
        return T95[freedom - 1]
    return min((t for least, t in T95_MORE.items() if least <= freedom), default=T95[-1])


def estimated(values: Sequence[float]) -> Estimated:
    mean, samples = fmean(values), tuple(values)
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return Estimated(mean, math.nan, samples)
    return Estimated(mean, student_t(len(values) - 1) * stdev(values) / math.sqrt(len(values)), samples)


first_requests = partial(Workload, "conversation")
"""The conversation trace up to a number of requests."""
