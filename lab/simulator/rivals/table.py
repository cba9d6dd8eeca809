"""Placement policies of the simulator by name: those of nodes, and those that only the simulator has."""

from __future__ import annotations

from lab.simulator.rivals.decode_choice import DecodeByLoad, DecodeInTurn
from lab.simulator.rivals.dynaserve import DynaServe
from lab.simulator.rivals.nexus import Nexus
from sched.placement import table
from sched.placement.two_stages import TwoStages

only_simulated: dict[str, type[TwoStages]] = {
    "dynaserve": DynaServe,
    "nexus": Nexus,
    "decode-in-turn": DecodeInTurn,
    "decode-by-load": DecodeByLoad,
}

placements: dict[str, type[TwoStages]] = table.placements | only_simulated
