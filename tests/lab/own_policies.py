"""The examples of docs/hacking.md that are policies, in one file that notes which of them are called."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/hacking.md").read_text()
EXAMPLES = dict(re.findall(r"```python (\w+)\n(.*?)```", PAGE, re.DOTALL))

POLICIES = {
    "--placement": ("placement", "ShortestQueue"),
    "--eviction": ("eviction", "Newest"),
    "--cache-admission": ("admission", "Heads"),
    "--queue-order": ("steps", "Longest"),
    "--batching-policy": ("steps", "Halves"),
    "--rejection": ("steps", "NoBatch"),
}
"""Flag -> (example, class in it)."""

DECIDES = {
    "ShortestQueue": "choose_prefill",
    "Newest": "victim",
    "Heads": "admits",
    "Longest": "rank",
    "Halves": "prefill_tokens",
    "NoBatch": "at_arrival",
}
"""The method of each class that decides."""

NOTING = """

def _noting(kind, method):
    decide = getattr(kind, method)

    def noted(self, *args):
        with open({path!r}, "a") as file:
            file.write(kind.__name__ + "\\n")
        return decide(self, *args)

    setattr(kind, method, noted)


"""


def all_six(folder: Path) -> tuple[list[str], Path]:
    """(flags of all policies, the file that names each class once per decision) of a file in `folder`."""
    file, called = folder / "mine.py", folder / "called"
    examples = [EXAMPLES[name] for name in dict.fromkeys(example for example, _ in POLICIES.values())]
    noting = "".join(f"_noting({kind}, {method!r})\n" for kind, method in DECIDES.items())
    file.write_text("\n\n".join(examples) + NOTING.format(path=str(called)) + noting)
    called.touch()
    return [text for flag, (_, name) in POLICIES.items() for text in (flag, f"{file}:{name}")], called
