"""The rules of the house, read off the imports: dependencies point down, pure cores are pure, torch stays in its rooms.

ARCHITECTURE.md rules 1 and 2. A rule is a line in a table here; a module that breaks it is named with its line.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter

from engine import __version__
from tests.modules import MODULES, ROOMS, ROOT, within

# Which rooms a room may use. A longer name is a module with a rule of its own.
USES = {
    "attention": {"net"},  # compiled code and files of the user: net/compiled.py, net/user_file.py
    "sched": set(),
    "lab": {"attention", "cache", "engine", "net", "sched"},
    "lab.simulator": {"sched", "cache", "net"},  # files of the user: net/user_file.py
    "lab.virtual": {"sched"},
    "net": set(),
    "net.gossip.driver": {"sched"},
    "net.gossip.load_words": {"sched"},
    "cache": {"net"},
    "connect": {"cache", "net"},  # it lives in processes of others
    "engine": {"attention", "cache", "net", "sched"},
}

# Pure cores: no input, no output, no clock, no chance. `sched` stands for all of its modules.
PURE = (
    "engine.step.journal",
    "engine.step.arena_events",
    "engine.backends.answer",
    "engine.backends.load",
    "engine.backends.prefixes",
    "engine.backends.question",
    "engine.backends.told",
    "engine.config.backend_address",
    "engine.node.phases",
    "engine.step.request",
    "engine.core.batcher",
    "engine.core.cold_turns",
    "engine.core.served",
    "engine.front.groups",
    "engine.prefill_group.arrival",
    "engine.prefill_group.messages",
    "engine.step.part",
    "engine.step.cold",
    "engine.beyond.leases",
    "engine.beyond.messages",
    "engine.config.beyond",
    "engine.step.block_book",
    "engine.step.state_tables",
    "engine.observe.estimate_errors",
    "engine.observe.history",
    "engine.observe.merged",
    "engine.observe.moved",
    "engine.observe.recent",
    "engine.front.clocks",
    "engine.observe.intervals",
    "engine.front.persistence",
    "engine.front.moving",
    "engine.handoff.arenas",
    "engine.migration.move",
    "engine.core.kv_ready",
    "engine.experts.placing.balance",
    "engine.experts.placing.eplb",
    "engine.experts.placing.hosts",
    "engine.experts.joining",
    "engine.experts.placing.placement",
    "engine.model.experts.losses",
    "engine.model.experts.shares",
    "engine.speculation.ngram",
    "engine.config.agreement",
    "engine.config.contradictions",
    "engine.config.fits",
    "engine.config.resolve",
    "engine.speculation.speculative",
    "engine.speculation.suffix",
    "engine.sampling.params",
    "engine.sampling.uniform",
    "engine.core.seats",
    "engine.step.step",
    "engine.observe.timeline",
    "engine.observe.truth",
    "engine.handoff.updates",
    "cache.answer_checks",
    "cache.block",
    "cache.groups",
    "cache.layer_groups",
    "cache.bulk_messages",
    "cache.messages",
    "cache.offer",
    "cache.pool.block_pool",
    "cache.pool.prefix",
    "cache.pool.policy",
    "cache.pool.policies",
    "cache.pool.admission",
    "cache.homes.rendezvous",
    "cache.homes.pace",
    "cache.ssd_reads",
    "cache.homes.routing",
    "cache.homes.heat",
    "cache.recent",
    "cache.sessions.parked",
    "cache.sessions.residence",
    "cache.pool.aside",
    "cache.sites.budget",
    "cache.sites.copies",
    "engine.sites.finder",
    "cache.homes.repair",
    "cache.homes.agreement",
    "cache.homes.deciding",
    "connect.lmcache.chunks",
    "connect.sglang.pages",
    "cache.named.names",
    "connect.store.registered",
    "cache.named.tensor_format",
    "engine.core.held_weights",
    "engine.update.served",
    "net.bodies",
    "net.body_readers",
    "net.body_writers",
    "net.channel.wire",
    "net.collectives.matching",
    "net.collectives.membership",
    "net.collectives.plan",
    "net.http.batches.line",
    "net.http.batches.pace",
    "net.http.batches.record",
    "net.http.common.bounds",
    "net.kv_events.arrival",
    "net.kv_events.backlog",
    "net.kv_events.settings",
    "net.kv_events.wire",
    "net.rounds.asking_nodes",
    "net.rounds.fair_queue",
    "net.rounds.layout",
    "net.rounds.rdma.offer",
    "net.rounds.silence",
    "net.channel.doorstep",
    "net.channel.keyring",
    "net.gossip.sealed_packets",
    "net.loop.seldom",
    "net.channel.sealed_stream",
    "net.transfer.common.landed",
    "net.transfer.common.rails",
    "net.loop.restarts",
    "net.transfer.common.topology",
    "net.transfer.common.traffic",
    "net.transfer.rdma.completion_shares",
    "net.transfer.rdma.endpoint",
    "net.transfer.rdma.gids",
    "net.transfer.rdma.send_queue",
    "sched",
    "lab.geometry.architecture",
    "lab.simulator.models.by_formula",
    "lab.simulator.models.caches",
    "lab.simulator.models.contention",
    "lab.simulator.models.fit",
    "lab.simulator.job",
    "lab.simulator.models.loop",
    "lab.simulator.making",
    "lab.simulator.models.step_models",
    "lab.simulator.models.network",
    "lab.simulator.rivals",
    "lab.simulator.node",
    "lab.formulas.long_prompts",
    "lab.formulas.plan",
    "lab.simulator.refusals",
    "lab.simulator.result",
    "lab.simulator.models.segment",
    "lab.simulator.models.speculation",
)
IMPURE_IMPORTS = {
    "asyncio",
    "socket",
    "time",
    "random",
    "threading",
    "os",
    "selectors",
    "subprocess",
    "multiprocessing",
}

# Who may read the wall clock, which people and NTP set: it stamps what is shown, dates files, and tells chat templates
# the day. What decides uses steady clocks.
WALL_CLOCK = (
    "engine.checkpoint.weight_cache",
    "engine.node.front_door",
    "engine.node.history_recorder",
    "engine.node.kv_events",
    "engine.node.node",
    "engine.front.flight_log",
    "engine.observe.live",
    "engine.handoff.messages",
    "engine.handoff.own_load",
    "engine.front.probing",
    "engine.text.chat_template",
    "net.http.batches.answering",
    "net.http.batches.routes",
    "net.http.batches.runner",
    "net.http.info",
    "net.http.openai.routes",
    "net.http.openai.responses",
    "net.gossip.load_words",
)

# What is unpickled can run any code: bytes of peers, clients and disks never are.
PICKLES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "multiprocessing"}
MAY_PICKLE = (
    "engine.experts.processes",
    "engine.experts.worker",
    "engine.loading.rank_processes",
    "engine.loading.rank_worker",
)

# torch costs a second and hundreds of megabytes; a store node starts without it. Only these may import it ...
TORCH = {"torch", "triton", "transformers"}
MAY_TORCH = (
    "engine.model.gpu",
    "engine.step.layer_reports",
    "attention",
    "connect.process_group",
    "engine.loading.cuda_memory",
    "engine.loading.rank_arenas",
    "engine.loading.weight_type",
    "engine.loading.split_arena",
    "engine.loading.split_memory",
    "engine.speculation.draft",
    "engine.speculation.layer_drafts",
    "engine.checkpoint.gguf.weights",
    "engine.sampling.host_draw",
    "engine.step.hidden",
    "engine.step.inputs",
    "engine.step.layer_blocks",
    "engine.model.ops.huge_pages",
    "engine.loading.load_model",
    "engine.loading.offload_model",
    "engine.checkpoint.layered_weights",
    "engine.offload.streamed",
    "engine.sampling.logit_rules",
    "engine.sampling.logprobs",
    "engine.experts.dispatch",
    "engine.experts.group",
    "engine.experts.loading",
    "engine.experts.pulling",
    "engine.experts.remote_worker",
    "engine.experts.share",
    "engine.experts.work",
    "engine.experts.worker",
    "engine.model.decoder",
    "engine.model.graphs",
    "engine.model.experts.moe",
    "engine.model.experts.routing",
    "engine.model.delta",
    "engine.model.draft_layer",
    "engine.model.eagle",
    "engine.checkpoint.eagle_weights",
    "engine.model.latent",
    "engine.model.latent_prompts",
    "engine.model.ops.interface",
    "engine.model.layers_cpu",
    "engine.model.layers",
    "engine.model.ops.choice",
    "engine.model.ops.cpu",
    "engine.model.ops.triton",
    "engine.model.parallel",
    "engine.model.ops.quantized",
    "engine.model.ops.quantized_triton",
    "engine.loading.rank_processes",
    "engine.loading.rank_worker",
    "engine.sampling.race",
    "engine.sampling.rejection",
    "engine.model.rope",
    "engine.step.one_space",
    "engine.step.runner",
    "engine.step.split_attention",
    "engine.beyond.elsewhere",
    "engine.beyond.held",
    "engine.beyond.holder",
    "engine.beyond.host",
    "engine.checkpoint.safetensors_weights",
    "engine.sampling.sampler",
    "engine.checkpoint.weight_cache",
    "engine.checkpoint.weights",
    "engine.checkpoint.packed_weights",
    "engine.checkpoint.byte_weights",
    "engine.checkpoint.fused_rows",
    "engine.checkpoint.joined_experts",
    "engine.checkpoint.row_order",
    "engine.checkpoint.mxfp4_weights",
    "engine.checkpoint.pooled_weights",
    "engine.checkpoint.named_weights",
    "engine.loading.new_weights",
    "engine.checkpoint.quantized_weights",
    "engine.pooled.chosen_blocks",
    "engine.pooled.encoded_blocks",
    "engine.pooled.unlike_blocks",
    "engine.unlike.pooled",
    "engine.unlike.rows",
    "engine.handoff.converting",
    "engine.handoff.wire",
)
# ... these inside a function, for the roles that run a model and for engines that have it already ...
LAZY_TORCH = ("connect.store.tensor_memory", "connect.vllm_plugin", "engine.config.machine")
# ... and these are all that a store node imports at start.
STORE_NODE = (
    "mooncake",
    "engine.node.node",
    "engine.node.report",
    "engine.node.front_door",
    "engine.start",
    "engine.text.tokenizer",
    "cache",
    "net",
    "sched",
)


def imports(source: str, package: str) -> Iterator[tuple[str, int, bool]]:
    """(module, line, inside a function) of every import, `if TYPE_CHECKING:` left out; relative ones made absolute."""

    def walk(nodes: Iterable[ast.AST], lazy: bool) -> Iterator[tuple[str, int, bool]]:
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from ((alias.name, node.lineno, lazy) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                parents = package.split(".")
                base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
                module = ".".join(part for part in (base, node.module) if part)
                yield module, node.lineno, lazy
                yield from ((f"{module}.{alias.name}", node.lineno, lazy) for alias in node.names)
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                yield from walk(node.orelse, lazy)
            else:
                late = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from walk(ast.iter_child_nodes(node), late)

    yield from walk(ast.parse(source).body, False)


@cache
def imports_of(name: str) -> list[tuple[str, int, bool]]:
    path = MODULES[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return list(imports(path.read_text(), package))


def top(module: str) -> str:
    return module.partition(".")[0]


# What nodes run, and the simulator. Benchmarks may use torch, clocks and tasks as they like.
OF_NODES = [name for name in MODULES if top(name) != "lab" or within(name, ("lab.simulator", "lab.virtual"))]


def most_specific(name: str) -> set[str]:
    """The entry of USES with the longest name that covers `name`."""
    return USES[max((rule for rule in USES if within(name, (rule,))), key=len)]


def wrong_imports(names: Iterable[str], wrong: Callable[[str, str, bool], bool]) -> list[str]:
    """wrong(file, module that it imports, inside a function)"""
    return [
        f"{name}:{line} imports {module}"
        for name in names
        for module, line, lazy in imports_of(name)
        if wrong(name, module, lazy)
    ]


def test_dependencies_point_down():
    def wrong(name: str, module: str, _: bool) -> bool:
        if module == "mooncake":  # mooncake.engine is a peer's
            return True
        return top(module) in {*ROOMS, "tests"} and top(module) not in most_specific(name) | {top(name)}

    assert wrong_imports((name for name in MODULES if name != "mooncake"), wrong) == []


FILES = MODULES


def file_of(*modules: str) -> set[str]:
    """The first of `modules` that is a file of ours."""
    return set([one for one in modules if one in FILES][:1])


@cache
def needs(name: str) -> set[str]:
    """The files that this one imports anywhere: at the top, in functions, and for types alone."""
    path, found = FILES[name], set[str]()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = found.union(*(file_of(alias.name) for alias in node.names))
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            found = found.union(*(file_of(f"{module}.{alias.name}", module) for alias in node.names))
    return found - {name}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Nodes of a directed graph that lead back to the first; empty without a circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_two_files_import_each_other():
    """Not even in a function, for types, or by way of others: each file can be read with what lies below it."""
    assert circle({name: needs(name) for name in FILES}) == []


def test_no_two_folders_import_each_other():
    """Inside a room folders point down, too. An `__init__.py` is the front door of its folder: it registers what lies
    below it, and does not count."""
    graph: dict[str, set[str]] = {}
    files = {name: path for name, path in FILES.items() if path.name != "__init__.py" and name != "mooncake"}
    for name, path in files.items():
        below = {files[one].parent for one in needs(name) if one in files} - {path.parent}
        graph.setdefault(str(path.parent.relative_to(ROOT)), set()).update(str(one.relative_to(ROOT)) for one in below)
    assert circle(graph) == []


def test_pure_cores_do_no_input_output_and_read_no_clock():
    pure = [name for name in MODULES if within(name, PURE)]
    assert wrong_imports(pure, lambda name, module, lazy: top(module) in IMPURE_IMPORTS) == []


def test_torch_stays_in_its_rooms():
    def wrong(name: str, module: str, lazy: bool) -> bool:
        return top(module) in TORCH and not (lazy and within(name, LAZY_TORCH))

    assert wrong_imports((name for name in OF_NODES if not within(name, MAY_TORCH)), wrong) == []


def test_nothing_unpickles_what_others_wrote():
    """The pipes of multiprocessing pickle; only a node and the ranks it has started itself talk over one."""
    found = {name for name in OF_NODES for module, _, _ in imports_of(name) if top(module) in PICKLES}
    assert found <= set(MAY_PICKLE)


def test_only_these_read_the_wall_clock():
    reads = re.compile(r"\btime\.time(_ns)?\b|\bdatetime\.now\b|\butcnow\b|from time import .*\btime\b")
    found = {name for name in OF_NODES if reads.search(MODULES[name].read_text())}
    assert found == set(WALL_CLOCK)


def test_every_task_is_made_in_one_place():
    """net/loop/tasks.py: so that nobody can forget to say who hears of its failure."""
    makes = re.compile(r"\b(create_task|ensure_future)\(")
    assert {name for name in OF_NODES if makes.search(MODULES[name].read_text())} == {"net.loop.tasks"}


def test_a_store_node_loads_no_torch():
    """The same by running it: what the modules import may import torch in turn."""
    names = [name for name in MODULES if within(name, STORE_NODE)]
    code = f"import sys\nfor name in {names!r}: __import__(name)\nprint(*sorted({TORCH!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_our_sched_comes_before_the_standard_librarys():
    """The console script starts with neither the checkout nor the caller's directory on sys.path."""
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('mooncake', {str(ROOT / 'mooncake.py')!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "module.main(['--version'])"
    )
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd="/", env=bare, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, f"mooncake {__version__}\n"), done.stderr


def test_every_rule_names_something_that_exists():
    stale = [
        rule
        for rule in (*USES, *PURE, *MAY_TORCH, *LAZY_TORCH, *STORE_NODE)
        if not any(within(m, (rule,)) for m in MODULES)
    ]
    assert stale == []


def test_the_reader_of_circles_sees_every_kind(tmp_path, monkeypatch):
    sources = {
        "a": "from b import c\n",  # a name of b, not a file
        "b": "if TYPE_CHECKING:\n    import p.q\n",
        "p": "",
        "p.q": "def late():\n    from . import r\n",
        "p.r": "import a, ast\n",
    }
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.setattr(sys.modules[__name__], "FILES", {name: tmp_path / f"{name}.py" for name in sources})
    graph = {name: needs(name) for name in sources}
    assert graph == {
        "a": {"b"},
        "b": {"p.q"},
        "p": set(),
        "p.q": {"p.r"},
        "p.r": {"a"},
    }
    found = circle(graph)
    assert len(found) == 5 and set(found) == {"a", "b", "p.q", "p.r"}
    assert circle(graph | {"p.r": set()}) == []


def test_the_import_reader_sees_every_kind():
    source = (
        "import a.b\nfrom c import d\nfrom . import e\nfrom ..f import g\n"
        "if TYPE_CHECKING:\n    import h\nelse:\n    import i\n"
        "def late():\n    import j\n"
    )
    seen = {module: lazy for module, _, lazy in imports(source, "x.y")}
    assert seen == {
        "a.b": False,
        "c": False,
        "c.d": False,
        "x.y": False,
        "x.y.e": False,
        "x.f": False,
        "x.f.g": False,
        "i": False,
        "j": True,
    }


# Folders of engine/, low to high: which others each may import.
FLOORS = {
    "config": set(),
    "observe": set(),
    "model": set(),
    "checkpoint": {"config", "model"},
    "text": {"config", "model", "checkpoint"},
    "sampling": {"text"},
    "step": {"observe", "model", "sampling"},
    "speculation": {"config", "checkpoint", "text", "sampling", "step"},
    "core": {"config", "observe", "model", "sampling", "step", "speculation"},
    "calibration": {"config", "step", "core"},
    "experts": {"config", "observe", "model", "checkpoint", "core"},
    "offload": {"config", "model"},
    "loading": {
        "config",
        "observe",
        "model",
        "checkpoint",
        "sampling",
        "step",
        "speculation",
        "core",
        "experts",
        "offload",
    },
    "unlike": {"config"},
    "pooled": {"unlike"},
    "prefill_group": {"step", "core"},
    "sites": {"step", "pooled"},
    "handoff": {"observe", "sampling", "step", "core", "unlike", "pooled", "prefill_group", "sites"},
    "beyond": {"config", "step", "core", "handoff"},
    "front": {
        "config",
        "observe",
        "text",
        "sampling",
        "step",
        "core",
        "unlike",
        "prefill_group",
        "sites",
        "handoff",
        "beyond",
    },
    "migration": {"config", "observe", "step", "core", "handoff", "front"},
    "backends": {"config", "observe", "sampling", "step", "handoff", "front"},
    "update": {"config", "model", "checkpoint", "core", "loading"},
    "scaling": {"config", "core", "sites"},
    "node": {
        "sites",
        "calibration",
        "scaling",
        "update",
        "backends",
        "config",
        "observe",
        "checkpoint",
        "text",
        "sampling",
        "step",
        "speculation",
        "core",
        "experts",
        "loading",
        "pooled",
        "handoff",
        "beyond",
        "front",
        "migration",
    },
    "start": {"config", "model", "checkpoint", "speculation", "observe", "node"},
    "doctor": {"config"},
}


def floor(name: str) -> str:
    """The folder of engine/ that a file lies in; "" for the package itself and for other rooms."""
    parts = name.split(".")
    return parts[1] if parts[0] == "engine" and len(parts) > 1 else ""


def test_the_folders_of_the_engine_point_down():
    wrong = [
        f"{name} imports {one}"
        for name in FILES
        if floor(name)
        for one in sorted(needs(name))
        if floor(one) not in FLOORS[floor(name)] | {"", floor(name)}
    ]
    assert wrong == []


def test_the_floors_have_no_circle():
    assert circle(FLOORS) == []
