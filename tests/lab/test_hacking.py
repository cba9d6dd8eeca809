"""The examples of docs/hacking.md work as they stand there."""

from __future__ import annotations

import random
import re
from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest

from attention.choice.choose import choose as choose_backend
from cache.pool.policies import choose as choose_eviction
from cache.pool.policy import Facts
from engine.checkpoint import hf_config
from engine.config.cache_policies import cache_admission
from engine.config.flags import UsageError, parse
from engine.config.step_policies import batching_policy, queue_order, refusals
from engine.front.placement_policy import placement_policy
from lab.ablations import command as ablation
from lab.ablations import reproduce
from lab.ablations.command import main as ablate
from lab.ablations.common.own_policies import FIELDS, with_own
from lab.ablations.simulated import ABLATIONS, eviction
from lab.simulator.command import main as simulate
from net.transfer import engine as transfer
from net.transfer.common.memory import Region
from net.transfer.engine import Op, TransferEngine
from sched.batching import StepLoad, Tuning
from sched.placement.view import View
from sched.rejection import Estimate
from tests.engine.front.test_placing import DEMAND, MeasuredLinks, node
from tests.lab.own_policies import DECIDES, EXAMPLES, PAGE, POLICIES, ROOT, all_six
from tests.net.peers import channels


@pytest.fixture
def mine(tmp_path):
    """mine("kernel") -> the path of a file with that example."""

    def write(name: str) -> Path:
        path = tmp_path / "mine.py"
        path.write_text(EXAMPLES[name])
        return path

    return write


def test_every_example_has_a_test():
    examples = {"kernel", "placement", "steps", "eviction", "admission", "transport", "transfer"}
    assert set(EXAMPLES) == examples | {"model", "geometry"}


def test_a_kernel(mine):
    backend = choose_backend(f"{mine('kernel')}:Loud", "cpu")
    assert (backend.name, backend.plan(None), backend.steps) == ("loud", None, 1)


def test_a_placement_policy(mine):
    policy = placement_policy(parse(["--placement", f"{mine('placement')}:ShortestQueue"]), random.Random(0))
    view = View(5.0, [node("a", 3.0), node("b", 1.0), node("c", 2.0)], MeasuredLinks(), 256)
    assert policy.place(5.0, DEMAND, view, view.none).prefill == "b"


def test_an_eviction_policy(mine):
    policy = choose_eviction(f"{mine('eviction')}:Newest")
    for item in "abc":
        policy.added(item)
    policy.pinned("c")
    assert (policy.victim(), len(policy)) == ("b", 2)
    policy.unpinned("c")
    policy.removed("b")
    assert (policy.victim(), len(policy)) == ("c", 2)


def test_an_admission_policy(mine):
    policy = cache_admission(parse(["--cache-admission", f"{mine('admission')}:Heads"]))
    policy.wanted("a")
    assert [policy.admits("a", Facts(position), "b") for position in (0, 3, 4)] == [True, True, False]
    with pytest.raises(UsageError, match=r"--cache-admission .*lacks wanted"):
        cache_admission(parse(["--cache-admission", f"{mine('eviction')}:Newest"]))


def test_orders_chunks_and_refusals(mine):
    file = mine("steps")
    config = parse(
        ["--queue-order", f"{file}:Longest", "--batching-policy", f"{file}:Halves", "--rejection", f"{file}:NoBatch"]
    )
    short, long = SimpleNamespace(arrival=0.0, num_uncomputed=10), SimpleNamespace(arrival=1.0, num_uncomputed=90)
    assert queue_order(config).order(2.0, [short, long]) == [long, short]
    assert batching_policy(config, Tuning(256, 0.1, None)).prefill_tokens(StepLoad(1000, 1, 10, 0)) == 500
    seconds = {"ttft_s": 0.0, "wait_s": 0.0, "step_s": 0.0, "step_soon_s": 0.0, "step_alone_s": 0.0, "decode_s": 0.0}
    refused = [refusals(config).at_arrival(Estimate(service_class=name, **seconds)) for name in ("batch", "standard")]
    assert refused[0].reason == "not today" and refused[1] is None
    with pytest.raises(UsageError, match=r"--rejection .*lacks at_arrival"):
        refusals(parse(["--rejection", f"{file}:Halves"]))


@pytest.mark.parametrize("flag", POLICIES)
def test_the_same_file_runs_in_the_simulator(mine, flag, tmp_path):
    """Its figures differ from those of the default: it is used."""
    example, name = POLICIES[flag]
    few = ["--requests", "60", "--prefill", "2", "--decode", "1", "--speed", "20"]
    few += ["--cache-blocks", "40", "--pool-blocks", "40", "--generate", "mixed" if flag == "--rejection" else "agents"]
    told = []
    for own in ([], [flag, f"{mine(example)}:{name}"]):
        out = tmp_path / "out.json"
        assert simulate([*few, *own, "--json", str(out)]) == 0
        told.append([(row["metric"], row["ours"]) for row in orjson.loads(out.read_bytes())["rows"]])
    assert told[0] != told[1]


@pytest.mark.parametrize("flag", POLICIES)
@pytest.mark.parametrize("command", [ablation, reproduce])
def test_the_same_file_and_flag_add_a_case_to_every_ablation(mine, command, flag):
    example, name = POLICIES[flag]
    own, field = f"{mine(example)}:{name}", flag.removeprefix("--").replace("-", "_")
    *known, added = with_own(ABLATIONS["overlap"], command.parser().parse_args([flag, own])).cases(40)
    assert len(known) == 2 and getattr(added.config, field) == own and added.label.endswith(own)
    assert parse([flag, own]) is not None, "a node has the same flag"


def test_all_six_together_decide_in_an_ablation_and_in_a_report(tmp_path, capsys, monkeypatch):
    """In a pool that is full after few requests. They decide on nodes too: tests/e2e/test_own_policies.py."""
    monkeypatch.setattr(eviction, "BLOCKS", 800)
    own, called = all_six(tmp_path)
    few = ["--requests", "60", "--workers", "1", *own]
    assert ablate(["eviction", "--seeds", "1", *few]) == 0
    assert "mine.py:Heads" in capsys.readouterr().out
    assert set(called.read_text().split()) == DECIDES.keys()
    called.write_text("")
    report = tmp_path / "report"
    assert reproduce.main(["--quick", "--only", "eviction", "--out", str(report), *few]) == 0
    assert set(called.read_text().split()) == DECIDES.keys()
    assert "mine.py:Longest" in (report / "report.md").read_text()


def test_every_policy_of_a_user_has_an_example():
    assert {flag.removeprefix("--").replace("-", "_") for flag in POLICIES} == set(FIELDS)


def test_the_same_file_is_one_more_case_of_an_ablation(mine, capsys):
    argv = ["overlap", "--requests", "40", "--seeds", "1", "--workers", "1"]
    assert ablate([*argv, "--placement", f"{mine('placement')}:ShortestQueue"]) == 0
    assert "mine.py:ShortestQueue" in capsys.readouterr().out
    assert ablate([*argv, "--placement", "oracle"]) == 2
    assert ablate([*argv, "--cache-admission", f"{mine('admission')}:Heads"]) == 0
    assert "mine.py:Heads" in capsys.readouterr().out


async def test_a_transfer():
    space: dict = {}
    exec(EXAMPLES["transfer"], space)
    assert await space["send"]() == [True, True, True]


async def test_a_transport():
    space: dict = {}
    try:
        exec(EXAMPLES["transport"], space)
        async with channels("a", "b") as made:
            engines = [TransferEngine(one, ["counted-tcp"]) for one in made]
            with Region.shared("here", 4096) as here, Region.shared("there", 4096) as there:
                engines[0].register(here)
                engines[1].register(there)
                here.memory[:4] = b"moon"
                await engines[0].submit("b", Op.WRITE, "here", "there", [(0, 8, 4)])
                assert bytes(there.memory[8:12]) == b"moon"
                for engine in engines:
                    await engine.close()
    finally:
        transfer.transports.pop("counted-tcp", None)
    assert space["CountedTcp"].submitted == 4


def test_a_model():
    config = {
        "architectures": ["BiasedLlamaForCausalLM"],
        "hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 99,
    }
    config |= {"intermediate_size": 128, "num_hidden_layers": 2, "num_key_value_heads": 2, "hidden_act": "silu"}
    try:
        exec(EXAMPLES["model"], {})
        assert hf_config.from_hf(config).qkv_bias
    finally:
        hf_config.FAMILIES.pop("BiasedLlamaForCausalLM", None)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_every_file_the_pages_name_exists(page):
    named = re.findall(r"`((?:attention|cache|engine|lab|net|sched|scripts|tests|docs)/[\w./-]+)`", page.read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_what_to_read_first_is_short():
    rows = re.findall(r"^\| ([^|]+) \| (`[^|]+`) \| ([\d,]+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 4
    for change, files, most in rows:
        lines = sum(len((ROOT / file).read_text().splitlines()) for file in re.findall(r"`([^`]+)`", files))
        assert 0 < lines <= int(most.replace(",", "")), f"{change}: {lines} lines"


def test_a_request_passes_few_files_on_each_node():
    page = (ROOT / "docs/request.md").read_text()
    roles = dict(re.findall(r"^## On the (.+)\n\n((?:\|.*\n)+)", page, re.MULTILINE))
    assert set(roles) == {"acceptor", "prefill node", "decode node"}
    for role, table in roles.items():
        hops = re.findall(r"^\| \d\. .* \| `([^`]+)` \|$", table, re.MULTILINE)
        assert 0 < len(hops) == len(table.splitlines()) - 2 <= 8, role
        assert len(set(hops)) == len(hops) and all((ROOT / hop).is_file() for hop in hops), hops


def test_what_the_hops_call_is_no_hop_itself():
    page = (ROOT / "docs/request.md").read_text()
    spine, _, rest = page.partition("## What the hops call")
    rows = re.findall(r"^\| `(\w+\.py)` \| .* \| `([^`]+)` \|$", rest.partition("\n## ")[0], re.MULTILINE)
    assert rows and len({called for _, called in rows}) == len(rows)
    for hop, called in rows:
        assert f"/{hop}`" in spine and f"`{called}`" not in spine and (ROOT / called).is_file(), (hop, called)


def test_a_published_model():
    space: dict = {}
    exec(EXAMPLES["geometry"], space)
    (group,) = space["groups"]
    assert (group.kind, group.token_bytes) == ("latent", 31_104)
    assert round(space["parameters"] / 1e9, 1) == 15.7
