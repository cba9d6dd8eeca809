"""Cuts a small draft model out of the embedded model, and trains it on text that the model itself writes.

  scripts/tools.py cut-draft                          # into the cache; prints the directory
  scripts/tools.py cut-draft --out build/draft --layers 6
  scripts/tools.py cut-draft --quick --out build/draft   # a minute or two, to check that everything works

The draft has the first layers of the model and an output layer of its own (lab/drafts/distill.py). It is for
--speculative-method draft --speculative-model DIR, scripts/bench.py speculative --draft DIR, and
scripts/ablate.py speculative --live. draft.json in its directory says how often it agrees with the model on
conversations that were held out: as it was cut, with its output layer fitted, and trained.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from rich.console import Console

from engine.model.model_error import ModelError
from lab.drafts.cut import Recipe, about, made, make
from lab.flag_types import natural, positive

DEFAULT = Recipe()
QUICK = {"conversations": 8, "answer_tokens": 32, "passes": 1}


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="DIR", help="not in the cache but here; DIR must not exist")
    parser.add_argument("--model", default=DEFAULT.model, help="the embedded model's name or a .gguf file")
    parser.add_argument("--layers", type=positive, default=DEFAULT.layers)
    parser.add_argument("--conversations", type=positive, default=DEFAULT.conversations, help="that the model writes")
    parser.add_argument("--answer-tokens", type=positive, default=DEFAULT.answer_tokens, help="at most, of an answer")
    parser.add_argument("--passes", type=positive, default=DEFAULT.passes, help="of the training over the text")
    parser.add_argument("--seed", type=natural, default=DEFAULT.seed)
    parser.add_argument("--quick", action="store_true", help="little text and little training")
    args = parser.parse_args(argv)
    asked = {one.name: getattr(args, one.name) for one in fields(Recipe)}
    if args.quick:
        asked |= {name: min(value, asked[name]) for name, value in QUICK.items()}
    recipe, console = Recipe(**asked), Console(stderr=True, highlight=False, soft_wrap=True)
    if args.out is not None and args.out.exists():
        parser.error(f"--out {args.out} exists already")
    try:
        if args.out is None:
            directory = made(recipe, console.print)
        else:
            directory = args.out
            make(recipe, directory, console.print)
        said = about(directory)
    except (ModelError, ValueError, OSError) as error:
        print(f"cut-draft: {error}", file=sys.stderr)
        return 2
    for name in ("cut", "fitted", "trained"):
        greedy, sampled = said[name]["greedy"], said[name]["sampled"]
        print(f"{name}: {greedy:.1%} of the most likely tokens, {sampled:.1%} at temperature 1")
    print(f"{said['size']:.1%} of the parameters: {directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
