"""Loads that are hard for caches: prefixes that are all new, that change together, or that all requests share."""

from __future__ import annotations

from lab.ablations.common.ablation import Ablation, Case, Estimated, Goal, Workload
from lab.ablations.common.evidence import UNSHOWN, relative, shown, sign, times, told, weighted
from lab.ablations.common.goals import at_most, percent
from lab.ablations.common.looks import imbalance, placed_imbalance, recovery
from lab.ablations.common.metrics import metric, metrics
from lab.loads.changes import flipped, unique, viral
from lab.simulator.config import SimConfig

CHANGED = {"as recorded": None, "all unique": unique, "prefix flip": flipped, "viral prefix": viral}
WORST = "busiest / mean, worst 10 s"
FLIP, VIRAL = "popular prefixes flip", "a prefix goes viral"
LOOKS = (recovery, imbalance, placed_imbalance)


def cases(requests: int | None) -> list[Case]:
    made = []
    on, off = SimConfig(pool_blocks=6000, publish="home"), SimConfig(cache_blocks=0)
    for name, change in CHANGED.items():
        work = Workload("conversation", min(requests or 6000, 6000), change=change)
        made += [Case(name, on, work, look=LOOKS), Case(f"{name}, cache off", off, work)]
    made.append(Case(FLIP, on, Workload("popular", requests), look=LOOKS))
    made.append(Case(VIRAL, on, Workload("goes-viral", requests), look=LOOKS))
    return made


def reading(values: dict[str, dict[str, Estimated]]) -> str:
    cost = relative(values, "mean TTFT, s", "all unique", "all unique, cache off")
    chats = values["prefix flip"]
    after, unlimited = chats["recovered after, s"], chats["unlimited cache, s"]
    limit = {
        0: f": {UNSHOWN} from an unlimited cache that has prompts on arrival ({told(unlimited, '.0f', ' s')}), so "
        "that it could be sooner is not shown: a chat's prefix is wanted again only when its user answers",
        1: f", later than an unlimited cache that has prompts on arrival ({told(unlimited, '.0f', ' s')})",
        -1: f", sooner than an unlimited cache that has prompts on arrival ({told(unlimited, '.0f', ' s')})",
    }[shown(weighted((1.0, after), (-1.0, unlimited)))]
    found, steady = chats["found in 60 s"], chats["found steady"]
    less = {0: f"{UNSHOWN} from", 1: "more than", -1: "less than"}[shown(weighted((1.0, found), (-1.0, steady)))]
    recorded = {0: f"{UNSHOWN} from", 1: "above", -1: "below"}[sign(values, WORST, VIRAL, "as recorded")]
    return (
        f"Unique prefixes change TTFT by {cost}. Popular prefixes are found "
        f"{told(values[FLIP]['recovered after, s'], '.0f', ' s')} after all of them changed. With chats hits are at "
        f"90 % of steady after {told(after, '.0f', ' s')}{limit}. Of what such a cache finds in the minute after the "
        f"change {told(found, '.0%')} are found, {less} the {told(steady, '.0%')} of steady state; nine tenths of that "
        f"share are reached again after {told(chats['caught up after, s'], '.0f', ' s')}. Under a viral prefix the "
        f"busiest node has {told(values[VIRAL][WORST], '.2f', 'x')} the mean load in the worst 10 s, {recorded} "
        f"{told(values['as recorded'][WORST], '.2f', 'x')} with the conversation trace as recorded."
    )


def goals(values: dict[str, dict[str, Estimated]]) -> list[Goal]:
    cost = percent(times(values, "mean TTFT, s", "all unique", "all unique, cache off"))
    chats, least = values["prefix flip"], values["prefix flip"]["unlimited cache, s"].mean
    same = f"the same for chats (an unlimited cache: {least:.0f} s)"
    return [
        at_most("unique prefixes: mean TTFT over cache off", "<= +2 %", cost, 2.0, "+.2f", " %"),
        at_most(
            "hit rate at 90 % of steady after a flip of popular prefixes", "<= 60 s",
            values[FLIP]["recovered after, s"], 60.0, ".0f", " s",
        ),
        at_most(same, "<= 60 s", chats["recovered after, s"], 60.0, ".0f", " s"),
        at_most(
            "the same for chats, of what an unlimited cache finds", "<= 60 s", chats["caught up after, s"], 60.0, ".0f",
            " s",
        ),
        at_most(
            "viral prefix: busiest / mean load from 2 s on, worst 10 s", "<= 1.5", values[VIRAL][WORST], 1.5, ".2f"
        ),
    ]  # fmt: skip


SHIFTS = Ablation(
    "shifts",
    "What do loads that are hard for caches cost?",
    "8P+8D, conversation trace with its prefixes changed, and two generated loads of 20 and 25 requests/s with "
    "prefixes of 8,192 tokens: 100 with Zipf popularity that all change halfway, or one that 80 % want from then on. "
    "Cache off = no node keeps KV; with caches every new block also crosses the network to its home. Found: tokens "
    "found over those found by an unlimited cache that has every prompt as soon as it arrives.",
    cases,
    metrics("mean TTFT, s", "hit rate")
    | {
        "recovered after, s": metric("recovery_s"),
        "unlimited cache, s": metric("unlimited_recovery_s"),
        "caught up after, s": metric("caught_up_s"),
        "found in 60 s": metric("found_in_60_s"),
        "found steady": metric("found_steady"),
        WORST: metric("worst_imbalance"),
        "busiest / mean": metric("imbalance"),
    },
    reading,
    goals=goals,
)
