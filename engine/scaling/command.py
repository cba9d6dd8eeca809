"""Calls --scale-command or --expert-scale-command: starts a node or a rank, or frees what it ran on.

    CMD start ROLE NAME JOIN   a node with --role ROLE, --node-id NAME and --join JOIN should come up; do nothing if a
                               node of that name runs. Return soon: the cluster sees when the node is ready
    CMD stop ROLE NAME JOIN    the node has left by itself, or was not ready in time: end what is left of it
    CMD start expert-rank NAME JOIN   a process of `mooncake.py expert-rank` with --name NAME and --join JOIN should
                               come up, under the same rules
    CMD stop expert-rank NAME JOIN    it should leave, by SIGTERM; or it has left, or was not ready in time
    exit code                  0 = done; anything else = failed, and a start is tried again later

ROLE is as --role takes it: roles of one node are joined by commas. The user writes the order of the arguments by
placeholders (engine/config/scaling.py). No shell reads them.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from tempfile import TemporaryFile

TIMEOUT_S = 60.0


class CommandFailed(Exception):
    """The message has the exit code and the last line that the command wrote."""


async def call(parts: Sequence[str], action: str, role: str, name: str, join: str) -> None:
    """Run the command and wait for its end, at most TIMEOUT_S. Raises CommandFailed."""
    argv = [part.format(action=action, role=role.replace("+", ","), name=name, join=join) for part in parts]
    with ExitStack() as files:
        try:
            # A pipe would be open for as long as a node that the command leaves behind.
            out = files.enter_context(TemporaryFile())
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,  # Ctrl-C in the terminal of this node is not for the others
            )
        except OSError as error:
            raise CommandFailed(f"{argv[0]}: {error.strerror}") from None
        try:
            async with asyncio.timeout(TIMEOUT_S):
                code = await process.wait()
        except TimeoutError:
            raise CommandFailed(f"still running after {TIMEOUT_S:g} s; it should return when the node starts") from None
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # a shell's ssh that hangs, too
        if code:
            out.seek(0)
            lines = out.read().decode(errors="replace").strip().splitlines() or ["no output"]
            raise CommandFailed(f"exit code {code}: {lines[-1]:.200}")
