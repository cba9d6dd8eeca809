"""Which requests are refused: the variants of sched/rejection.py with the answers of the simulated nodes."""

from __future__ import annotations

from collections.abc import Mapping

from lab.simulator.config import SimConfig
from lab.simulator.job import Job
from lab.simulator.models.step_models import StepModel
from lab.simulator.node import Node
from net.user_file import chosen
from sched.classes import scaled, with_objectives
from sched.placement.choice import Placement
from sched.placement.view import View
from sched.rejection import METHODS, Estimate, OutputLengths, Refusal, rejections, running_soon


class Refusals:
    """The refusals of one run. A node does not know the length of an answer: it expects the mean of the finished
    ones."""

    def __init__(self, config: SimConfig, model: StepModel, nodes: Mapping[str, Node], lengths: OutputLengths) -> None:
        self._model, self._nodes = model, nodes
        classes = scaled(with_objectives(config.slo), config.slo_scale, config.tbt_slo_scale or None)
        self._rejection = chosen("--rejection", config.rejection, rejections, METHODS)(classes)
        # The decode node's own scheduler, see papers.md section 3.
        self._again = rejections["stage-load"](classes) if config.recheck else self._rejection
        self._asked = config.rejection != "none"
        self._lengths = lengths

    def at_arrival(self, job: Job, decision: Placement, view: View) -> Refusal | None:
        """Refuses only new requests: a client that has tokens was promised the rest."""
        if not self._asked or job.retries:
            return None
        node = self._nodes[decision.decode]
        step_s = float(view.step_s[view.index[decision.decode]])
        estimate = Estimate(
            service_class=job.service_class,
            ttft_s=decision.estimates["ttft_s"],
            wait_s=decision.estimates["wait_s"],
            step_s=step_s,
            step_soon_s=self.step_soon(node, decision.estimates["ttft_s"], job.input_tokens),
            step_alone_s=node.costs.decode_s(1, job.input_tokens),
            decode_s=self._lengths.mean * step_s,
        )
        return self._rejection.at_arrival(estimate)

    def after_prefill(self, job: Job, node: Node) -> Refusal | None:
        """Called when the prompt's KV has arrived at `node`."""
        if not self._asked or job.retries:
            return None
        alone_s = node.costs.decode_s(1, job.input_tokens)
        step_s = self._of(node, len(node.batch.running) + len(node.batch.joining) + 1, job.input_tokens)
        decode_s = self._lengths.mean * step_s
        return self._again.after_prefill(job.service_class, step_s, alone_s, decode_s)

    def step_soon(self, node: Node, seconds: float, tokens: int) -> float:
        """Seconds of the decode step of `node` after `seconds`, with one more request; it has `tokens` tokens if no
        request runs now."""
        made, most = node.made(), self._model.max_batch
        soon = running_soon(made, node.batch.promised - len(made), self._lengths.mean, node.step_s(), seconds, most)
        return self._of(node, soon + 1, tokens)

    def _of(self, node: Node, batch: int, tokens: int) -> float:
        """Seconds of a step of `batch` requests as long as the running ones."""
        running = len(node.batch.running)
        mean = node.batch.context / running if running else tokens
        return node.decode_s(batch, round(batch * mean))
