"""The command lines of stock clients, and how their own results show success."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
REQUESTS = 8


VLLM_BENCH_SERVE = """
from argparse import ArgumentParser
from vllm.benchmarks.serve import add_cli_args, main
parser = ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""`vllm bench serve` without the vllm command, which does not start in builds for CPUs, because it asks for the version
of a distribution with another name."""


class Unexpected(Exception):
    """A client's own result is wrong."""


@dataclass(frozen=True, slots=True)
class Target:
    """The server, and the other inputs of clients."""

    url: str
    model: str
    tokenizer: Path  # a Hugging Face directory
    scratch: Path  # folder for results


@dataclass(frozen=True, slots=True)
class Run:
    """One command of one client."""

    what: str
    argv: list[str]
    read: Callable[[str], str]  # its standard output -> one line about its result; raises Unexpected
    env: Mapping[str, str] = field(default_factory=dict)  # in addition to that of the command
    offline: bool = True  # tell the Hugging Face libraries that there is no hub


def openai_package(python: str, target: Target) -> Iterator[Run]:
    """sync and async, streams, tools, structured output, log probabilities, errors."""
    yield Run("application", [python, str(HERE / "openai_checks.py"), target.url, target.model], _checks)


def library(module: str) -> Callable[[str, Target], Iterator[Run]]:
    """The runs of a client library whose checks are lab/clients/libraries/MODULE.py."""

    def runs(python: str, target: Target) -> Iterator[Run]:
        argv = [python, str(HERE / "libraries" / "run.py"), module, target.url, target.model]
        yield Run("application", argv, _checks)

    runs.__doc__ = f"lab/clients/libraries/{module}.py"
    return runs


def _checks(output: str) -> str:
    checks = [json.loads(line) for line in output.splitlines() if line.startswith('{"check"')]
    failed = {check["check"]: check["error"].strip().splitlines()[-1] for check in checks if check["error"] is not None}
    if failed or not checks:
        raise Unexpected("; ".join(f"{name}: {error}" for name, error in failed.items()) or "no check ran")
    return f"{len(checks)} checks: {', '.join(check['check'] for check in checks)}"


def lm_eval(python: str, target: Target) -> Iterator[Run]:
    """local-completions on a task of this repository: log likelihoods of choices and of whole texts, generation."""
    tasks = target.scratch / "tasks"
    tasks.mkdir(exist_ok=True)
    for path in (HERE / "tasks").glob("*.yaml"):
        (tasks / path.name).write_text(path.read_text().replace("{folder}", str(HERE / "tasks")))
    names = ("mooncake_capitals_choice", "mooncake_capitals_generate", "mooncake_capitals_rolling")
    local = f"tokenizer_backend=huggingface,tokenizer={target.tokenizer},tokenized_requests=True"
    ways = {"text, the server's tokenizer": "tokenized_requests=False", "token ids, a local tokenizer": local}
    for way, more in ways.items():
        out = target.scratch / f"lm_eval {more[:12]}"
        arguments = f"model={target.model},base_url={target.url}/v1/completions,{more}"
        arguments += ",num_concurrent=2,max_retries=1,max_length=1024"
        argv = [python, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments]
        argv += ["--tasks", ",".join(names), "--include_path", str(tasks), "--output_path", str(out)]

        def read(output: str, out: Path = out) -> str:
            found = json.loads(_only(out, "results_*.json").read_text())["results"]
            choice = found[names[0]]["acc,none"]
            generated = found[names[1]]["exact_match,stripped"]
            bits = found[names[2]]["bits_per_byte,none"]
            if choice < 0.5 or generated < 0.5 or not 0 < bits < 2:
                raise Unexpected(f"acc {choice}, exact match {generated}, bits per byte {bits}")
            return f"12 questions: acc {choice:.2f}, exact match {generated:.2f}, bits per byte {bits:.4f}"

        yield Run(f"loglikelihood, rolling, generate_until; {way}", argv, read)


def vllm_bench(python: str, target: Target) -> Iterator[Run]:
    """vllm bench serve, both backends."""
    for backend, endpoint in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
        argv = [python, "-c", VLLM_BENCH_SERVE, "--backend", backend]
        argv += ["--base-url", target.url, "--endpoint", endpoint, "--model", target.model]
        argv += ["--tokenizer", str(target.tokenizer), "--dataset-name", "random", "--random-input-len", "64"]
        argv += ["--random-output-len", "16", "--num-prompts", str(REQUESTS), "--request-rate", "4", "--ignore-eos"]
        argv += ["--save-result", "--result-dir", str(target.scratch), "--result-filename", f"vllm-{backend}.json"]

        def read(output: str, path: Path = target.scratch / f"vllm-{backend}.json") -> str:
            found = json.loads(path.read_text())
            if found["completed"] != REQUESTS or found["total_output_tokens"] != 16 * REQUESTS:
                raise Unexpected(f"{found['completed']} completed, {found['total_output_tokens']} output tokens")
            return f"{REQUESTS} requests, {found['total_output_tokens']} output tokens"

        yield Run(f"bench serve --backend {backend}", argv, read)


def guidellm(python: str, target: Target) -> Iterator[Run]:
    """guidellm run, chat and text completions."""
    for route in ("/v1/chat/completions", "/v1/completions"):
        out = target.scratch / f"guidellm-{route.replace('/', '-')}.json"
        argv = [python, "-m", "guidellm", "run"]
        argv += ["--backend", f"kind=openai_http,target={target.url},model={target.model},request_format={route}"]
        argv += ["--tokenizer", f"kind=hf_auto,model={target.tokenizer}"]
        argv += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"]
        argv += ["--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={REQUESTS}"]
        argv += ["--output", f"kind=json,path={out}", "--disable-console-interactive"]

        def read(output: str, out: Path = out) -> str:
            (benchmark,) = json.loads(out.read_text())["benchmarks"]
            done = benchmark["requests"]
            bad, good = len(done["errored"]) + len(done["incomplete"]), len(done["successful"])
            if bad or good < REQUESTS - 1:  # it stops at the last request, and may not report it
                raise Unexpected(f"{good} requests completed, {bad} failed")
            return f"{good} of {REQUESTS} requests reported, none failed"

        yield Run(f"run, {route}", argv, read)


def aiperf(python: str, target: Target) -> Iterator[Run]:
    """aiperf profile, chat and completions."""
    for kind in ("chat", "completions"):
        out = target.scratch / f"aiperf-{kind}"
        argv = [python, "-m", "aiperf", "profile", "--model", target.model, "--url", target.url]
        argv += ["--endpoint-type", kind, "--streaming", "--tokenizer", str(target.tokenizer), "--concurrency", "2"]
        argv += ["--request-count", str(REQUESTS), "--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "16"]
        argv += ["--extra-inputs", "ignore_eos:true", "--artifact-dir", str(out), "--ui", "none"]

        def read(output: str, out: Path = out) -> str:
            found = json.loads(_only(out, "profile_export_aiperf.json").read_text())
            count, errors = found["request_count"]["avg"], found.get("error_request_count", {}).get("avg", 0)
            if count != REQUESTS or errors:
                raise Unexpected(f"{count} requests completed, {errors} failed")
            return f"{count:g} requests, TTFT {found['time_to_first_token']['avg']:.0f} ms on average"

        # Offline it looks for every tokenizer in the hub's cache, even for a directory.
        yield Run(f"profile --endpoint-type {kind}", argv, read, offline=False)


def _only(folder: Path, pattern: str) -> Path:
    found = list(folder.rglob(pattern))
    if len(found) != 1:
        raise Unexpected(f"{len(found)} files {pattern} in {folder}")
    return found[0]
