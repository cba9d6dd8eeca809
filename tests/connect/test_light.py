"""A program that imports upstream's names does not load what only a node needs."""

import subprocess
import sys

from lab.conformance.answers import ours


def test_no_server_and_no_model_is_loaded():
    code = "import mooncake.store, mooncake.engine, sys\n"
    code += "rooms = ['mooncake_rooms.net.http.server', 'mooncake_rooms.engine']\n"
    code += "print([name for name in [*rooms, 'pydantic', 'torch', 'tokenizers'] if name in sys.modules])"
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd="/", env=ours(), capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr


def test_calls_for_tensors_say_that_torch_is_missing():
    code = "import sys\nsys.modules['torch'] = None\nimport mooncake.store\n"
    code += "store = mooncake.store.MooncakeDistributedStore()\nprint(store.put('k', b'v'))\n"
    code += "try:\n    store.put_tensor('k', 5)\nexcept ImportError as error:\n    print(error.name)\n"
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd="/", env=ours(), capture_output=True, text=True, timeout=120)
    assert done.stdout == "-703\ntorch\n", done.stderr
