"""The command `llm`: answers, a continued conversation, a schema."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import QUESTION, City, Server


def llm_command(server: Server) -> None:
    entry = {"model_id": "ours", "model_name": server.model, "api_base": f"{server.url}/v1", "supports_schema": True}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "extra-openai-models.yaml")
        path.write_text(json.dumps([entry | {"supports_tools": True}]))  # JSON is YAML

        def llm(*argv: str) -> str:
            command = [sys.executable, "-m", "llm", *argv]
            env = os.environ | {"LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0, done.stderr[-1000:]
            return done.stdout

        options = ["-m", "ours", "-o", "max_tokens", "96", "-o", "temperature", "0"]
        assert "Paris" in llm(QUESTION, *options) and "Paris" in llm(QUESTION, *options, "--no-stream")
        assert llm("And of Italy?", *options, "-c")
        schema = json.dumps(City.model_json_schema())
        City.model_validate_json(llm(QUESTION, *options, "--no-stream", "--schema", schema))
