"""Loads that are hard for caches: prefixes that are all new, that change together, or that all requests share."""

from __future__ import annotations

from lab.ablations.common.ablation import Ablation, Case, Estimated, Goal, Workload, ratio
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
    cost = ratio(values, "mean TTFT, s", "all unique", "all unique, cache off") - 1
    chats, popular = values["prefix flip"], values[FLIP]
    return (
        f"Unique prefixes cost {cost:+.1%} of TTFT. Popular prefixes are found "
        f"{popular['recovered after, s'].mean:.0f} s after all of them changed. With chats hits are at 90 % of steady "
        f"after {chats['recovered after, s'].mean:.0f} s, but an unlimited cache that has prompts on arrival would "
        f"need {chats['unlimited cache, s'].mean:.0f} s: a chat's prefix is wanted again only when its user answers, "
        "half of the hits two minutes or more after the turn before. Of what such a cache finds in the minute after "
        f"the change {chats['found in 60 s'].mean:.0%} are found, of what it finds in steady state "
        f"{chats['found steady'].mean:.0%}; nine tenths of that share are reached again after "
        f"{chats['caught up after, s'].mean:.0f} s. Under a viral prefix the busiest node has "
        f"{values[VIRAL][WORST].mean:.2f}x the mean load in the worst 10 s; on the conversation trace single prompts "
        f"take longer than a window in any case ({values['as recorded'][WORST].mean:.1f}x as recorded)."
    )


def goals(values: dict[str, dict[str, Estimated]]) -> list[Goal]:
    cost = ratio(values, "mean TTFT, s", "all unique", "all unique, cache off") - 1
    back, chats = values[FLIP]["recovered after, s"].mean, values["prefix flip"]
    spread, caught = values[VIRAL][WORST].mean, chats["caught up after, s"].mean
    least, after = chats["unlimited cache, s"].mean, chats["recovered after, s"].mean
    return [
        Goal("unique prefixes: mean TTFT over cache off", "<= +2 %", f"{cost:+.2%}", cost <= 0.02),
        Goal("hit rate at 90 % of steady after a flip of popular prefixes", "<= 60 s", f"{back:.0f} s", back <= 60),
        Goal(f"the same for chats (an unlimited cache: {least:.0f} s)", "<= 60 s", f"{after:.0f} s", after <= 60),
        Goal("the same for chats, of what an unlimited cache finds", "<= 60 s", f"{caught:.0f} s", caught <= 60),
        Goal("viral prefix: busiest / mean load from 2 s on, worst 10 s", "<= 1.5", f"{spread:.2f}", spread <= 1.5),
    ]


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
