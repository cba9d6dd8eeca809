"""Refusals on exactly one line of stderr, however narrow the terminal is and wherever stderr goes."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import NoReturn

from rich.console import Console
from rich.progress import Progress


class TerseParser(ArgumentParser):
    """Refuses a flag without the usage, which would be a page for a command with many flags."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with exit code 2."""
        self.exit(2, f"{self.prog}: error: {_joined(message)}\n")


def refuse(console: Console, command: str, error: object) -> None:
    """Print why `command` does not run. Plain text: a flag's value may look like markup or like the name of an
    emoji."""
    text = f"{command}: {_joined(str(error))}"
    console.print(text, style="red", markup=False, emoji=False, highlight=False, soft_wrap=True)


def progress(console: Console) -> Progress:
    """A progress bar that is shown on terminals only."""
    return Progress(console=console, disable=not console.is_terminal)


def _joined(text: str) -> str:
    return " ".join(text.split())
