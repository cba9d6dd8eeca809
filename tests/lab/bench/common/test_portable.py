"""Result files keep no folder of the machine that measured."""

import sys
import tempfile
from pathlib import Path

from lab.bench.common.portable import portable


def test_paths_of_this_machine_keep_their_last_part():
    here, tmp = Path(__file__).resolve(), Path(tempfile.gettempdir(), "results", "out.json")
    assert portable(here) == "test_portable.py"
    found = portable({"argv": ["--json", str(tmp), f"--peer={sys.executable}"], "at": (f"{here}:12 f", 3)})
    assert found == {
        "argv": ["--json", "out.json", f"--peer={Path(sys.executable).name}"],
        "at": ["test_portable.py:12 f", 3],
    }


def test_what_is_no_path_of_this_machine_stays():
    for text in (
        "http://127.0.0.1:8000/v1/models",
        "/v1/chat/completions",
        "GB/s of ours/theirs",
        "/dev/shm/x",
        "a/b/c",
    ):
        assert portable(text) == text
