"""Whether the experts of a model can be shared out over ranks. Pure."""

from __future__ import annotations


def problem(num_experts: int, ranks: int, least: int, redundant: int) -> str | None:
    """Why experts cannot be placed like this, as the end of a line that begins with the flags; None if they can."""
    if not num_experts:
        return "the model has no experts; leave out --expert-parallel-size"
    if least > ranks:
        return f"{least} copies of an expert need {least} ranks; give --expert-replicas {ranks} or less"
    copies = least * num_experts + redundant
    if copies > num_experts * ranks:
        most = num_experts * (ranks - least)
        return f"{ranks} ranks have no use for more than {most} redundant experts of {num_experts}"
    if copies % ranks:
        more = -copies % ranks
        return (
            f"{copies} copies of the model's {num_experts} experts do not divide by {ranks}; give another number of "
            f"ranks, or --num-redundant-experts {redundant + more}"
        )
    return None
