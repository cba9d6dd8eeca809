"""Requests beyond memory in a batcher: one at a time, beside others, and nothing of them stays behind."""

from __future__ import annotations

from cache.pool.block_pool import BlockPool
from engine.core.batcher import Batcher, BatchRules
from engine.step.cold import Cold
from engine.step.request import Request, RequestState
from tests.engine.step.test_cold import Tier
from tests.engine.toy_model import EOS, alone, request, run_step

HOT, WINDOW, SIZE, LAYERS = 4, 1, 4, 6


def beyond(blocks: int = 16, arena_len: int = 60, longest: int = 400, **options) -> Batcher:
    return Batcher(BlockPool(blocks), SIZE, 4, 16, arena_len, {EOS}, BatchRules(beyond_len=longest, **options))


def long(name: str, tokens: int, max_tokens: int = 4) -> Request:
    found = request(name, list(range(1, tokens + 1)), max_tokens=max_tokens)
    found.service_class, found.cold = "batch", Cold(HOT, WINDOW, SIZE, LAYERS)
    return found


class Node:
    """Opens and computes what the batcher chooses, as the worker does. A layer of a request beyond memory takes
    `layer_s`."""

    def __init__(self, b: Batcher, layer_s: float = 0.001) -> None:
        self.layer_s = layer_s
        self.b, self.now, self.tiers, self.steps = b, 0.0, dict[str, Tier](), list[list[tuple[str, int, int]]]()

    def load(self) -> list[str]:
        loading = self.b.loads(self.now, 4)
        for r in loading:
            self.opened(r)
        return [r.request_id for r in loading]

    def opened(self, r: Request) -> None:
        if r.cold is not None and not r.cold.open and not r.finished:
            need = max(0, -(-(r.num_tokens + r.sampling.max_tokens) // SIZE) - HOT)
            tier = self.tiers[r.request_id] = Tier(self.b.pool.num_blocks, need)
            self.b.blocks.lodge(r, tier, (), range(need))
        self.b.loaded(self.now, r)

    def step(self, seconds: float = 1.0):
        step = self.b.schedule(self.now)
        if step is None:
            return None
        for row in step.rows:
            if row.request.cold is not None:
                cold = row.request.cold
                cold.make_room(row.start, row.num_tokens)
                hidden = None if row.ends else "hidden"
                cold.computed(row.num_tokens, row.layers, self.layer_s * len(row.layers), hidden)
        self.steps.append([(row.request.request_id, row.start, row.num_tokens) for row in step.rows])
        self.now += seconds
        done = run_step(self.b, self.now, step)
        self.b.check_integrity()
        return done

    def dry(self) -> None:
        for _ in range(500):
            self.load()
            if self.step() is None and not self.b.loads(self.now, 4):
                return
        raise AssertionError(f"not dry: {self.b.requests}")


def test_it_computes_a_prompt_many_times_the_arena():
    node = Node(beyond(blocks=12))
    r = long("long", 200)
    node.b.add(0, r)
    assert node.b.schedule(0) is None, "it waits for its room"
    node.dry()
    assert r.output_ids == alone(list(range(1, 201)), 4) and r.finish_reason == "length"
    assert max(count for rows in node.steps for _, _, count in rows) == (HOT - 1) * SIZE
    tier = node.tiers["long"]
    assert tier.closed == 1 and len(tier.named) == 204 // SIZE - HOT + (204 % SIZE > 0)
    assert [tokens for tokens, _, _ in tier.seen][-3:] == [1, 1, 1]
    assert node.b.pool.usage()["free"] == 12


def test_one_at_a_time_and_others_beside_it():
    node = Node(beyond(blocks=24))
    first, second, short = long("first", 90), long("second", 90), request("short", [7] * 9, max_tokens=12)
    for r in (first, second, short):
        node.b.add(0, r)
    assert set(node.load()) == {"first", "short"}, "the second waits for the first one's room"
    while not first.finished:
        node.step()
        assert not second.cold.open and node.load() in ([], ["second"])
    assert any({"first", "short"} <= {name for name, _, _ in rows} for rows in node.steps)
    node.dry()
    assert second.output_ids == alone(list(range(1, 91)), 4) and short.output_ids == alone([7] * 9, 12)
    assert node.b.pool.usage()["held"] == 0


def test_it_rests_as_long_as_its_last_step_took_while_others_run():
    node = Node(beyond(blocks=24))
    r, short = long("long", 60, max_tokens=20), request("short", [7] * 9, max_tokens=30)
    node.b.add(0, r)
    node.load()
    while r.num_output_tokens < 2:
        node.step(8.0)
    node.b.add(node.now, short)
    node.load()
    begin = len(node.steps)
    while not short.finished and not r.finished:
        node.step(8.0 if node.now >= node.b._cold._rests_until else 1.0)
    turns = ["long" in {name for name, _, _ in rows} for rows in node.steps[begin:]]
    assert 0 < sum(turns) < len(turns) / 4, turns
    node.dry()


def test_prompts_that_take_whole_blocks_of_an_odd_rest_do_not_starve_it():
    """Three decodes leave 13 tokens of the budget; the first prompt takes 12, and the next one gets none of the last.
    The request beyond memory is behind all of them in the order."""
    b = Batcher(BlockPool(400), SIZE, 16, 16, 400, {EOS}, BatchRules(beyond_len=400))
    node = Node(b)
    for i in range(3):
        b.add(0, request(f"d{i}", [2 + i] * 4, max_tokens=300))
    while sum(r.num_output_tokens > 0 for r in b.requests.values()) < 3:
        node.load()
        node.step()
    prompts = [request(f"p{i}", [100 * i + j for j in range(40)], max_tokens=1) for i in range(44)]
    for prompt in prompts[:4]:
        b.add(node.now, prompt)
    r = long("long", 60)
    r.arrival = 1e6
    b.add(node.now, r)
    for i in range(120):
        if i % 3 == 0:
            b.add(node.now, prompts[4 + i // 3])
        node.load()
        node.step()
        assert sum(count for name, _, count in node.steps[-1] if name[0] == "p") >= 12
        assert sum(prompt.request_id in b.requests for prompt in prompts) > 2, "prompts are always waiting"
    assert r.num_output_tokens > 0


def test_it_keeps_what_is_cold_when_others_take_its_blocks():
    node = Node(beyond(blocks=12))
    r = long("long", 100)
    node.b.add(0, r)
    node.load()
    while r.num_computed < 60:
        node.step()
    cold = len(r.cold.slots)
    urgent = request("urgent", list(range(100, 140)), max_tokens=2)
    urgent.service_class = "interactive"
    node.b.add(node.now, urgent)
    node.load()
    node.step()
    assert r.state is RequestState.WAITING and not r.block_ids and r.num_computed == cold * SIZE
    assert r.cold.open and len(r.cold.slots) == cold
    node.dry()
    assert r.output_ids == alone(list(range(1, 101)), 4) and urgent.output_ids == alone(list(range(100, 140)), 2)
    assert node.tiers["long"].closed == 1


def test_an_abort_gives_everything_back_at_any_moment():
    for moment in ("waiting", "loading", "open", "running", "in step"):
        node = Node(beyond(blocks=12))
        r = long("long", 100)
        node.b.add(0, r)
        if moment != "waiting":
            (loading,) = node.b.loads(0, 4)
            if moment != "loading":
                node.opened(loading)
        if moment == "running":
            node.step()
        step = node.b.schedule(node.now) if moment == "in step" else None
        assert node.b.abort(node.now, "long") is r
        other = long("other", 50)
        node.b.add(node.now, other)
        if step is not None:
            assert node.b.pool.usage()["held"] == HOT + WINDOW and node.load() == [], "a step computes it"
            r.cold.make_room(0, step.rows[0].num_tokens)
            run_step(node.b, node.now, step)
        if moment == "loading":
            node.opened(loading)
        assert node.b.pool.usage()["held"] == 0 and not r.cold.open
        assert "long" not in node.tiers or node.tiers["long"].closed == 1
        node.dry()
        assert other.output_ids == alone(list(range(1, 51)), 4)


def test_an_answer_that_grows_past_the_arena_ends_there_unless_it_is_beyond():
    node = Node(beyond(blocks=16, arena_len=60))
    plain, r = request("plain", [3] * 50, max_tokens=100), long("long", 50, max_tokens=100)
    node.b.add(0, plain)
    node.dry()
    assert plain.num_tokens == 60 and plain.finish_reason == "length"
    node.b.add(node.now, r)
    node.dry()
    assert r.num_tokens == 150 and r.finish_reason == "length"


def test_without_prefix_caching_nothing_is_named():
    node = Node(beyond(blocks=12, prefix_caching=False))
    r = long("long", 100)
    node.b.add(0, r)
    node.dry()
    assert r.output_ids == alone(list(range(1, 101)), 4)
    assert not node.tiers["long"].named and node.tiers["long"].closed == 1


def test_its_tokens_pass_the_layers_a_few_at_a_time():
    """Two of six layers fit into a step of its own, one into a step with others; a chunk stays the same meanwhile."""
    node = Node(beyond(blocks=24), layer_s=0.1)
    r, short = long("long", 60), request("short", [7] * 9, max_tokens=40)
    node.b.add(0, r)
    node.load()
    layers: list[tuple[range, int]] = []

    def watched() -> bool:
        step = node.b.schedule(node.now)
        if step is None:
            return False
        for row in step.rows:
            if (cold := row.request.cold) is not None:
                assert row.samples == (row.ends and row.start + row.num_tokens == r.num_tokens)
                assert cold.hidden == (None if row.layers.start == 0 else "hidden")
                cold.make_room(row.start, row.num_tokens)
                cold.computed(row.num_tokens, row.layers, 0.1 * len(row.layers), None if row.ends else "hidden")
                layers.append((row.layers, row.num_tokens))
        node.now += 0.1
        run_step(node.b, node.now, step)
        return True

    while r.num_output_tokens < 1:
        assert watched()
    assert [one for one, _ in layers[:4]] == [range(1), range(1, 3), range(3, 5), range(5, 6)]
    assert {count for _, count in layers[:4]} == {12}
    node.b.add(node.now, short)
    node.load()
    begin = len(layers)
    while not r.finished and not short.finished:
        watched()
    assert any(len(one) == 1 and one.stop < 6 for one, _ in layers[begin:])
    while watched():
        pass
    assert r.output_ids == alone(list(range(1, 61)), 4) and short.output_ids == alone([7] * 9, 40)
    assert r.cold.spent_s == 0 and node.b.pool.usage()["held"] == 0


def test_others_run_while_it_waits_for_a_late_node_and_every_other_step_passes_a_layer():
    """In every step another node is late, about the last of its layers that was not asked before."""
    node = Node(beyond(blocks=24), layer_s=0.001)
    r, short = long("long", 40), request("short", [7] * 9, max_tokens=12)
    for one in (r, short):
        node.b.add(0, one)
    node.load()
    known, passed, waited = set(), list[tuple[int, range]](), 0
    for _ in range(500):
        if (step := node.b.schedule(node.now)) is None:
            assert r.cold.waits or not node.b.requests
            r.cold.waits = False  # its answer is here
        for row in step.rows if step is not None else ():
            if (cold := row.request.cold) is None:
                waited += r.cold.waits
                continue
            assert not cold.waits
            late = [layer for layer in row.layers if (row.start, layer) not in known]
            if late:
                known.add((row.start, late[-1]))
                row.stay(row.layers.start)
                cold.late(late[-1])
            else:
                cold.make_room(row.start, row.num_tokens)
                cold.computed(row.num_tokens, row.layers, 0.001, None if row.ends else "hidden")
                passed.append((row.start, row.layers))
        if step is not None:
            node.now += 1
            run_step(node.b, node.now, step)
            assert all(0 <= share <= 1 for share in step.other_prompts())
        if r.finished:
            break
    assert r.output_ids == alone(list(range(1, 41)), 4) and waited >= 5
    for start in {start for start, _ in passed}:
        assert [layer for at, layers in passed if at == start for layer in layers] == list(range(LAYERS))


def test_blocks_lost_between_two_slices_are_computed_again():
    node = Node(beyond(blocks=12), layer_s=0.1)
    r = long("long", 100)
    node.b.add(0, r)
    node.load()
    while r.num_computed < 40 or not r.cold.pending:
        node.step()
    urgent = request("urgent", list(range(100, 140)), max_tokens=2)
    urgent.service_class = "interactive"
    node.b.add(node.now, urgent)
    node.load()
    node.step()
    assert not r.block_ids and not r.cold.pending and r.cold.hidden is None and r.num_computed == r.cold.cold_tokens
    node.dry()
    assert r.output_ids == alone(list(range(1, 101)), 4)
