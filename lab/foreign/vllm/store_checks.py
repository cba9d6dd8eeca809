"""MooncakeStoreConnector of two vLLM processes on three nodes of ours: shared prefixes, a lost node, a restart."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from lab.foreign.common.checks import ANSWER_TOKENS, BLOCK_TOKENS, Checks
from lab.foreign.common.completions import Answer, ask, ask_together
from lab.foreign.common.our_pool import OurPool, our_pool
from lab.foreign.common.processes import free_port
from lab.foreign.vllm.connectors import store_connector, write_store_config
from lab.foreign.vllm.engines import Engine, Say

VALUE_BYTES = "6M"
"""Of a slot: a block of the embedded model in float32 has 5.9 MB, in 30 pieces."""

KILLED = "store-1"
KILL_AFTER_S = (0.03, 0.08, 0.2)
SETTLE_S = 1.0
"""Copies to a node that has come back count as new blocks, too."""

DOCUMENTS = 2 + 2 * len(KILL_AFTER_S)


def check_store(engine: Engine, packages: Path, checks: Checks, say: Say) -> None:
    """Two vLLM processes on three store nodes; then all of them again."""
    run_dir = engine.run_dir
    with our_pool(run_dir, VALUE_BYTES) as pool:
        config = run_dir / "mooncake.json"
        write_store_config(config, pool.addresses, 0)
        both = {name: store_connector(packages, config, free_port()) for name in ("one", "two")}
        say("store: starting two vLLM processes on three store nodes")
        with engine.running(both, say) as running:
            one, two = running["one"].url, running["two"].url
            store = StoreChecks(pool, one, two, checks)
            store.share()
            for round_number, after_s in enumerate(KILL_AFTER_S):
                store.lose_a_node(2 + 2 * round_number, after_s)
        say("store: all processes end and start again")
        pool.restart()
        write_store_config(config, pool.addresses, 0)
        with engine.running(both, say) as running:
            StoreChecks(pool, running["one"].url, running["two"].url, checks).begin_again()


class StoreChecks:
    """Two vLLM processes, at the URLs `one` and `two`, and their pool. Each process also has a cache of its own, so a
    document is loaded from the pool by the process that has not seen it yet."""

    def __init__(self, pool: OurPool, one: str, two: str, checks: Checks, name: str = "store") -> None:
        self._pool, self._one, self._two, self._checks, self._name = pool, one, two, checks, name
        self._blocks = checks.questions.shared_tokens // BLOCK_TOKENS

    def _ask(self, url: str, document: int, question: int) -> dict[tuple[int, int], Answer]:
        return {(document, question): ask(url, self._checks.questions(document, question), ANSWER_TOKENS)}

    def _ask_and_store(self, url: str, document: int, question: int) -> dict[tuple[int, int], Answer]:
        """Returns when the document is in the pool."""
        before = self._pool.blocks()
        answer = self._ask(url, document, question)
        self._pool.wait_for(before + self._blocks)
        time.sleep(SETTLE_S)
        return answer

    def share(self) -> None:
        """Documents 0 and 1."""
        compare = self._checks.compare
        compare(f"{self._name}: a new prefix", self._ask_and_store(self._one, 0, 0), cached=False)
        compare(f"{self._name}: a prefix that the other process computed", self._ask(self._two, 0, 1), cached=True)
        self._ask_and_store(self._two, 1, 0)
        compare(f"{self._name}: the same in the other direction", self._ask(self._one, 1, 1), cached=True)

    def lose_a_node(self, document: int, after_s: float) -> None:
        """One process loads a document and the other saves the next one; after `after_s` seconds a node is killed. Then
        both go on without it, and it starts again."""
        self._ask_and_store(self._two, document, 0)
        asked = {(document, 1): self._one, (document + 1, 0): self._two}
        requests = [(url, self._checks.questions(*key), 0.0) for key, url in asked.items()]
        kill = asyncio.to_thread(self._pool.cluster.kill, KILLED)
        answers = asyncio.run(ask_together(requests, ANSWER_TOKENS, kill, after_s))
        case = f"{KILLED} killed {1000 * after_s:.0f} ms after one process began to load and the other to save"
        self._checks.compare(f"{self._name}: {case}", dict(zip(asked, answers, strict=True)))
        after = self._ask(self._one, document + 1, 1) | self._ask(self._two, document, 2)
        self._checks.compare(f"{self._name}: without {KILLED}", after)
        self._pool.start_again(KILLED)

    def begin_again(self) -> None:
        before = self._pool.ssd_hits()
        answers = self._ask(self._one, 0, 2) | self._ask(self._two, 0, 0) | self._ask(self._one, 1, 2)
        self._checks.compare(f"{self._name}: after a restart of both vLLMs and of all nodes", answers, cached=True)
        hits = self._pool.ssd_hits() - before
        note = f"{hits} blocks read from SSD; the documents have {2 * self._blocks}"
        self._checks.say(f"{self._name}: the prefixes came from SSD", hits >= 2 * self._blocks, note)
