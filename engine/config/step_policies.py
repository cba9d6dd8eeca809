"""The policies of steps and admission that the flags name: built-in ones, or a user's file."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from engine.config.config import Config
from engine.config.flags import UsageError
from net.user_file import chosen
from sched import batching, queueing, rejection
from sched.batching import BatchingPolicy, Tuning
from sched.classes import scaled
from sched.queueing import QueueOrder
from sched.rejection import Rejection

T = TypeVar("T")


def batching_policy(config: Config, tuning: Tuning) -> BatchingPolicy:
    """Raises UsageError; exceptions of the user's file pass through."""
    name, built_in = config.batching_policy, batching.batching_policies
    return _maker(lambda: chosen("--batching-policy", name, built_in, batching.METHODS))(tuning)


def queue_order(config: Config) -> QueueOrder:
    """A new order. Raises UsageError; exceptions of the user's file pass through."""
    name, built_in = config.queue_order, queueing.queue_orders
    return _maker(lambda: chosen("--queue-order", name, built_in, queueing.METHODS))(config.classes)


def refusals(config: Config) -> Rejection:
    """By the scaled objectives. Raises UsageError; exceptions of the user's file pass through."""
    name, objectives = config.rejection, scaled(config.classes, config.slo_scale)
    return _maker(lambda: chosen("--rejection", name, rejection.rejections, rejection.METHODS))(objectives)


def _maker(find: Callable[[], T]) -> T:
    try:
        return find()
    except ValueError as error:
        raise UsageError(str(error)) from None
