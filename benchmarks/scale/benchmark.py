"""``scale``: a step of one of N ranks, predicted from one process and the rate of a link; then 70 B on 1,024 ranks.

Measured are steps of one process, of which each token of the plan is traced; what N ranks do to gather and to reduce
one shard while each computes a block that waits for nothing; and steps of N ranks, each on as many rows as the process.
From the first two the simulation predicts the third. Ranks share the cores here: the second also measures what a block
loses to a second of a collective.

The tables behind are the same simulation with the rates of other machines. Nothing of them is measured.
"""

import itertools
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from benchmarks.harness.benchmark import Benchmark, Run
from benchmarks.harness.case import Case, Outcome
from benchmarks.harness.settings import option
from benchmarks.harness.table import at_most, markdown_table
from benchmarks.mesh.methods import Training
from benchmarks.scale.paper import LARGE, Machine, sent_of
from offload.mesh.costs import Link, costs_of_rank, with_updates
from offload.mesh.traffic import SentBytes, traffic_of
from offload.planning.plan import Plan
from offload.planning.simulate import Costs, simulate

ONE = "one process"
TOLERANCE = 0.15  # of a predicted time
COUNTED = ("bytes_gathered", "bytes_reduced", "bytes_agreed")
GIGA = 1e9


@dataclass(frozen=True)
class Settings:
    """The stack that is measured, and the machines for which steps are predicted."""

    ranks: tuple[int, ...] = option((2, 4), "processes of the measured cases", least=2)
    blocks: int = option(6, "transformer blocks; each is a shard", least=2)
    dim: int = option(512, "channels", least=64, multiple=64)
    rows: int = option(4, "rows of each rank")
    positions: int = option(128, "tokens of a row")
    steps: int = option(9, "timed steps of each case")
    memory: bool = option(False, "homes in host memory, not in files")
    tokens: int = option(8192, "on paper: tokens of each rank in a step")
    tera_flops: float = option(200.0, "on paper: 10^12 operations a second of each rank", least=0.001)
    disks: tuple[float, ...] = option((1.0, 6.0), "on paper: GB/s of reads, and of writes, of each rank", least=0.001)
    networks: tuple[float, ...] = option((1.25, 6.25, 50.0), "on paper: GB/s that each rank receives", least=0.001)
    inside: float = option(300.0, "on paper: GB/s that a rank receives from ranks of its machine", least=0.001)
    together: int = option(8, "on paper: ranks of a machine")
    latency: float = option(20e-6, "on paper: seconds of a message", least=0)
    copied: float = option(1000.0, "on paper: GB/s of copies in memory", least=0.001)
    meshes: tuple[int, ...] = option(tuple(2**k for k in range(11)), "on paper: ranks")
    paper: bool = option(False, "nothing is measured: only what is on paper")

    def training(self, ranks: int) -> Training:
        """The stack, and the batch of so many ranks."""
        return Training(self.blocks, self.dim, self.rows * ranks, self.positions)


def measure(run: Run) -> None:
    """One process; collectives of N ranks, and N ranks; one case after the other."""
    settings = run.settings
    machines = [_machine(settings, *rates) for rates in itertools.product(settings.disks, settings.networks)]
    arguments = {"tokens": settings.tokens, "machines": [*map(list, machines)], "meshes": _meshes(settings)}
    run.group("on paper", [Case("on paper", "benchmarks.scale.paper:compute", arguments)])
    if settings.paper:
        return
    run.facts["cores"] = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)

    def case(ranks: int) -> Case:
        how = {"training": asdict(settings.training(ranks)), "rows": settings.rows, "on_disk": not settings.memory}
        name = ONE if ranks == 1 else f"{ranks} ranks"
        return Case(name, "benchmarks.scale.methods:train", {**how, "together": ranks > 1}, ranks=ranks)

    def exchanges(ranks: int) -> Case:
        arguments = {"training": asdict(settings.training(1)), "repeats": 30}
        return Case(f"collectives of {ranks} ranks", "benchmarks.scale.methods:exchange", arguments, ranks=ranks)

    run.group("alone", [case(1)], turns=settings.steps)
    for ranks in settings.ranks:
        run.group(f"{ranks} ranks", [exchanges(ranks), case(ranks)], turns=settings.steps)


def _sent(settings: Settings, ranks: int) -> list[SentBytes]:
    shapes = tuple(tuple(parameter.shape) for parameter in settings.training(1).block(0).parameters())
    return [sent_of(shapes, ranks)] * settings.blocks


def _plan_of(outcome: Outcome) -> Plan:
    found = outcome.result
    return Plan.parse(found["plan"], found["slots"], pending=found["pending"])


def _costs_of(outcome: Outcome, blocks: int) -> Costs:
    """Seconds of each action of one process."""
    seconds, plan = outcome.result["seconds"], _plan_of(outcome)
    counts = Counter(str(action) for action in plan.actions)

    def of(pattern: str) -> list[float]:
        tokens = [pattern.format(j) for j in range(blocks)]
        return [seconds.get(token, 0.0) / max(1, counts[token]) for token in tokens]

    return Costs(of("L{}"), of("F{}.0"), of("B{}.0"), of("D{}"), of("U{}"))


def predicted(run: Run, outcome: Outcome) -> float:
    """Seconds of a step of one of N ranks, from one process and from collectives beside compute."""
    (alone,), settings = run.groups["alone"], run.settings
    ranks, cores = outcome.case.ranks, int(run.facts["cores"])
    costs = _costs_of(alone, settings.blocks)
    if ranks == 1:
        return simulate(_plan_of(alone), costs).seconds
    slower = max(1.0, ranks / cores)
    fields = ("load", "forward", "backward", "drain", "update")
    costs = replace(costs, **{name: [slower * each for each in getattr(costs, name)] for name in fields})
    measured = run.groups[f"{ranks} ranks"][0].result
    costs = costs_of_rank(costs, _sent(settings, ranks), ranks, Link(float("inf")))
    collectives = {name: [seconds] * settings.blocks for name, seconds in measured["seconds"].items()}
    costs = replace(costs, **collectives)
    plan = _plan_of(outcome)
    return simulate(plan if plan.pending else with_updates(plan), costs).seconds


def _received(run: Run, outcome: Outcome) -> tuple[Mapping[str, int], Mapping[str, float]]:
    """Bytes that a rank receives in a step: predicted, and counted in the last one."""
    ranks = outcome.case.ranks
    traffic = traffic_of(_plan_of(outcome), _sent(run.settings, ranks), ranks, norms=1)
    return asdict(traffic), {kind: outcome.steps[-1][kind] for kind in COUNTED}


def _ranks(run: Run) -> list[Outcome]:
    if run.settings.paper:
        return []
    cases = [run.groups["alone"][0], *(run.groups[f"{ranks} ranks"][1] for ranks in run.settings.ranks)]
    return [outcome for outcome in cases if outcome.result is not None]


def report(run: Run) -> list[str]:
    """Predicted and measured; then what bounds a step on other machines."""
    settings, rows = run.settings, []
    if settings.paper:
        return _on_paper(run)
    for outcome in _ranks(run):
        seconds, counted = predicted(run, outcome), _received(run, outcome)
        words = [f"{sum(each.values()):,.0f}" for each in counted]
        difference = f"{seconds / outcome.median() - 1:+.0%}"
        rows.append([outcome.name, f"{outcome.median():.3f}", f"{seconds:.3f}", difference, *words[::-1]])
    header = ["case", "s/step", "predicted", "difference", "bytes received", "predicted"]
    training = settings.training(1)
    place = "host memory" if settings.memory else "files"
    words = (
        f"{training.blocks} blocks of {training.dim} channels: {training.parameters / 1e6:.1f} M parameters in {place}"
        f", {training.tokens:,} tokens a rank; clipping and AdamW; one torch thread a rank, {run.facts['cores']} "
        "cores. Predicted are seconds from the row of one process and from collectives of one shard beside compute, "
        "bytes from shapes alone."
    )
    return [markdown_table(header, rows), words, *_on_paper(run)]


def _machine(settings: Settings, disk: float, network: float) -> Machine:
    return Machine(
        settings.tera_flops * 1e12,
        disk * GIGA,
        network * GIGA,
        settings.inside * GIGA,
        settings.together,
        settings.latency,
        settings.copied * GIGA,
    )


def _on_paper(run: Run) -> list[str]:
    settings, (outcome,) = run.settings, run.groups["on paper"]
    if outcome.result is None:
        return []
    words = (
        f"## {LARGE.parameters / 1e9:.0f} B parameters on paper\n\nNothing below is measured. {LARGE.blocks} blocks of "
        f"width {LARGE.width:,}; each is a shard. Parameters, gradients and two moments in float32 are in files of the "
        f"ranks. Each rank computes {settings.tokens:,} tokens a step at {settings.tera_flops:g} TFLOP/s. A "
        f"parameter and a token take two operations forward, six in a backward that recomputes. A message takes "
        f"{settings.latency * 1e6:g} µs, copies in memory {settings.copied:g} GB/s. A mesh `R x S` stores the model R "
        f"times, each time on S ranks; {settings.together} ranks are one machine, in which a rank receives "
        f"{settings.inside:g} GB/s. A longer row, and replicas, use the network."
    )
    told = (
        "The seconds of a step, and what bounds it: of layers, of the disk of a rank and of its collectives, the one "
        "that would take longest alone. In brackets is the share of the step in which layers compute. Reads and "
        "collectives share one lane, and updates follow the backward, as they do in the engine. Columns: GB/s of reads "
        "and of writes of each rank, and GB/s that a rank receives over the network."
    )
    rows, sizes = [], []
    for line in outcome.result["meshes"]:
        rows.append([line["mesh"], *(f"{step[0]} {step[1]:,.0f} ({step[2]:.0%})" for step in line["steps"])])
        counts = (line[kind] for kind in ("files", "bytes_gathered", "bytes_reduced"))
        sizes.append([line["mesh"], *(f"{count / GIGA:,.1f}" for count in counts)])
    machines = itertools.product(settings.disks, settings.networks)
    header = ["mesh", *(f"disk {disk:g}, network {network:g}" for disk, network in machines)]
    table = markdown_table(["mesh", "in files, GB", "gathered", "reduced"], sizes)
    return [words, told, markdown_table(header, rows), f"What one rank stores, and receives in a step:\n\n{table}"]


def _meshes(settings: Settings) -> list[tuple[int, int]]:
    flat = [(1, ranks) for ranks in settings.meshes]
    hybrid = [(ranks // settings.together, settings.together) for ranks in settings.meshes]
    return flat + [mesh for mesh in hybrid if mesh[0] > 1]


def bounds(run: Run) -> list[str]:
    """Bytes exactly, times within 15 %."""
    broken: list[str] = []
    for outcome in _ranks(run):
        expected, counted = _received(run, outcome)
        if expected != counted:
            broken.append(f"{outcome.name}: expected to receive {expected}, received {counted}")
        apart = abs(predicted(run, outcome) / outcome.median() - 1)
        broken += at_most(f"{outcome.name}: the error of the predicted time", apart, TOLERANCE, "{:.1%}".format)
    return broken


BENCHMARK = Benchmark(Settings, measure, report, bounds)
