"""'auto' becomes values, from the machine, the model and the cluster; and the machine is read right."""

from __future__ import annotations

import os
import resource
from dataclasses import fields, replace

import pytest

from cache.layer_groups import StatePlaces
from engine.config.agreement import disagreement
from engine.config.config import Config
from engine.config.flags import UsageError, parse
from engine.config.machine import MOST_FILES, Gpu, Machine, survey
from engine.config.resolve import OTHER_FILES, GiB, resolve
from engine.config.shape import geometry
from engine.model.delta_config import Delta
from engine.model.model_config import ModelConfig

MODEL = ModelConfig(
    num_layers=30,
    hidden_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_size=64,
    intermediate_size=1536,
    vocab_size=49152,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
)
"""SmolLM2-135M."""
TYPES = ("dtype", "pool_dtype", "wire_dtype")
LAPTOP = Machine(num_cpus=4, free_bytes=8 * GiB, bfloat16=False)
H100 = replace(LAPTOP, gpu=Gpu("H100", 80 * GiB, 79 * GiB, True))


def settle(*argv: str, machine=LAPTOP, model=MODEL, cluster=None) -> Config:
    return resolve(parse(argv), model, machine, "ab12", cluster)


def test_a_laptop():
    config = settle()
    block = geometry(config, MODEL, "float32").block_bytes
    assert (config.device, config.dtype, config.kv_cache_dtype) == ("cpu", "float32", "float32")
    assert config.num_threads == 4
    assert config.kv_cache_bytes == GiB // block * block
    assert config.dram_bytes == GiB // block * block
    assert config.node_id == "mixed-ab12"
    assert config.served_model_name == "smollm2-135m-instruct"
    assert config.max_model_len == 8192
    policies = {
        "tokenizer",
        "load_format",
        "weight_cache",
        "calibration_cache",
        "weight_dtype",
        "attention_backend",
        "cpu_level",
        "latent_prompts",
        "expert_dispatch_dtype",
        "transport",
        "prefix_fetch",
        "rdma_devices",
        "speculative_length",
        "tcp_congestion",
    }
    assert {field.name for field in fields(Config) if getattr(config, field.name) == "auto"} == policies


def test_resolving_twice_changes_nothing():
    config = settle("--role", "prefill")
    assert resolve(config, MODEL, H100, "other") == config


def test_bfloat16_where_the_hardware_has_it():
    assert settle(machine=replace(LAPTOP, bfloat16=True)).dtype == "bfloat16"
    assert settle("--dtype", "float32", machine=replace(LAPTOP, bfloat16=True)).dtype == "float32"


def test_a_joiner_adopts_the_clusters_dtype():
    cluster = {"dtype": "float32", "pool_dtype": "float32"}
    assert settle(machine=replace(LAPTOP, bfloat16=True), cluster=cluster).dtype == "float32"


def test_who_names_a_type_of_computation_names_that_of_the_weights():
    """So float32 on one flag gives the products of float32; and a joiner of such a cluster has them too."""
    machine = replace(LAPTOP, bfloat16=True)
    assert settle(machine=machine).weight_dtype == "auto"
    assert settle("--dtype", "bfloat16", machine=machine).weight_dtype == "wide"
    assert settle("--dtype", "float32", "--weight-dtype", "stored", machine=machine).weight_dtype == "stored"
    cluster = {"dtype": "float32", "pool_dtype": "float32"}
    assert settle(machine=machine, cluster=cluster).weight_dtype == "wide"
    assert settle(machine=machine, cluster=cluster | {"dtype": "bfloat16"}).weight_dtype == "auto"


@pytest.mark.parametrize("flags", [("--weights-from-store",), ("--tensor-parallel-size", "3")])
def test_where_quantized_weights_cannot_be_computed_auto_is_wide(flags):
    assert settle(*flags).weight_dtype == "wide"


def test_on_a_gpu_the_file_and_the_backend_decide():
    assert settle("--device", "cuda", machine=H100).weight_dtype == "auto"
    assert settle("--device", "cuda", "--weight-dtype", "int4", machine=H100).weight_dtype == "int4"
    assert settle("--device", "cuda", "--dtype", "float16", machine=H100).weight_dtype == "wide"


def test_a_joiner_adopts_the_clusters_pool_dtype():
    assert settle().pool_dtype == "float32"
    cluster = {"dtype": "float32", "pool_dtype": "fp8"}
    assert settle(cluster=cluster).pool_dtype == "fp8"
    assert settle("--pool-dtype", "int8", cluster=cluster).pool_dtype == "int8"


def test_a_joiner_adopts_the_clusters_wire_dtype():
    assert settle().wire_dtype == "float32"
    cluster = {"dtype": "float32", "pool_dtype": "float32", "wire_dtype": "int8"}
    joined = settle(cluster=cluster)
    assert (joined.pool_dtype, joined.wire_dtype) == ("float32", "int8")
    assert settle("--wire-dtype", "fp8", cluster=cluster).wire_dtype == "fp8"
    shape = geometry(joined, MODEL, joined.kv_cache_dtype)
    assert shape.wire_encoded and not shape.encoded and shape.pool_bytes == shape.block_bytes


def test_the_staging_areas_have_room_for_four_blocks():
    assert settle("--wire-dtype", "int8").kv_staging_bytes == 16 << 20
    large = settle("--wire-dtype", "int8", "--block-size", "1024")
    shape = geometry(large, MODEL, large.kv_cache_dtype)
    assert large.kv_staging_bytes == 4 * shape.encoded_bytes > 16 << 20
    assert settle("--wire-dtype", "int8", "--kv-staging-bytes", "5M").kv_staging_bytes == 5 << 20


def test_the_dram_share_is_cut_into_blocks_of_the_pool():
    config = settle("--pool-dtype", "int8")
    shape = geometry(config, MODEL, config.kv_cache_dtype)
    assert shape.pool_bytes < shape.block_bytes / 3
    assert config.dram_bytes % shape.pool_bytes == 0 == config.kv_cache_bytes % shape.block_bytes


def test_a_store_node_has_dram_but_no_engine():
    config = settle("--role", "store", machine=H100)
    assert (config.device, config.kv_cache_bytes, config.max_model_len) == ("cpu", 0, 8192)
    assert config.dram_bytes > 0


def test_an_engine_node_gives_no_dram_unless_it_has_an_ssd():
    assert settle("--role", "prefill,decode").dram_bytes == 0
    assert settle("--role", "mixed", "--dram-bytes", "0").dram_bytes == 0
    assert settle("--role", "prefill", "--ssd-path", "x").dram_bytes > 0
    assert settle("--role", "prefill,decode").node_id == "prefill+decode-ab12"


def test_a_gpu_gives_its_memory_less_weights():
    config = settle(machine=H100)
    assert (config.device, config.dtype) == ("cuda", "bfloat16")
    left = int(0.9 * 80 * GiB) - GiB - MODEL.num_parameters * 2 - GiB
    assert 0 <= left - config.kv_cache_bytes < geometry(config, MODEL, "bfloat16").block_bytes


def test_weights_that_stay_as_stored_leave_a_gpu_more_memory():
    """Those of a file in 4 bits; a file in float32 is narrowed. Not for the backend torch, which widens them."""
    wide, few = MODEL.num_parameters * 2, MODEL.num_parameters // 2

    def weights(*flags: str, file_bytes: int) -> int:
        config = resolve(parse(["--device", "cuda", *flags]), MODEL, H100, "ab12", weight_file_bytes=file_bytes)
        left = int(0.9 * 80 * GiB) - GiB - GiB - config.kv_cache_bytes
        block = geometry(config, MODEL, "bfloat16").block_bytes
        return next(each for each in (wide, few, wide * 17 // 32) if 0 <= left - each < block)

    assert weights(file_bytes=few) == weights("--weight-dtype", "stored", file_bytes=few) == few
    assert weights(file_bytes=2 * wide) == weights(file_bytes=0) == wide
    assert weights("--dtype", "bfloat16", file_bytes=few) == weights("--weight-dtype", "fp8", file_bytes=few) == wide
    assert weights("--attention-backend", "torch", file_bytes=few) == wide
    assert weights("--weight-dtype", "int4", file_bytes=wide) == wide * 17 // 32


def test_number_of_parameters_of_the_embedded_model():
    assert MODEL.num_parameters / 1e6 == pytest.approx(134.5, abs=0.1)


def test_model_name_is_the_last_part():
    assert settle("--model", "/models/SmolLM2-135M.Q4_1.gguf").served_model_name == "SmolLM2-135M.Q4_1"
    assert settle("--model", "HuggingFaceTB/SmolLM2-1.7B").served_model_name == "SmolLM2-1.7B"


def test_weights_get_the_memory_that_the_arenas_leave():
    config = settle("--offload", "auto")
    others = config.kv_cache_bytes + config.dram_bytes + config.kv_staging_bytes
    assert config.weight_memory_bytes == LAPTOP.free_bytes - others - GiB
    assert settle("--offload", "auto", "--weight-memory-bytes", "2G").weight_memory_bytes == 2 * GiB
    tight = replace(LAPTOP, free_bytes=GiB)
    assert settle("--offload", "auto", machine=tight).weight_memory_bytes == 1  # refused with arithmetic when it loads


def test_a_small_arena_shortens_auto_and_refuses_an_explicit_length():
    assert settle("--kv-cache-bytes", "32M").max_model_len == 45 * 16  # whole blocks of 46,080 B per token
    with pytest.raises(UsageError, match="give --kv-cache-bytes"):
        settle("--kv-cache-bytes", "32M", "--max-model-len", "8192")


@pytest.mark.parametrize(
    ("argv", "remedy"),
    [
        (["--max-model-len", "9000"], "8192 or less"),
        (["--device", "cuda"], "use --device cpu"),
        (["--kv-cache-bytes", "1K"], "give --kv-cache-bytes"),
        (["--role", "store", "--dram-bytes", "0"], "leave it on auto"),
        (["--role", "decode", "--dram-bytes", "0", "--ssd-path", "x"], "leave it on auto"),
    ],
)
def test_impossible_wishes_name_the_remedy(argv, remedy):
    with pytest.raises(UsageError, match=remedy):
        settle(*argv)


@pytest.mark.parametrize(
    ("flags", "machine", "words"),
    [
        (("--tensor-parallel-size", "2"), LAPTOP, "--tensor-parallel-size 2: the model's 9 attention heads do not"),
        (("--tensor-parallel-size", "3", "--device", "cuda"), H100, "torch sees 1 here; give as many or fewer"),
    ],
)
def test_a_model_that_cannot_be_spread_is_refused(flags, machine, words):
    with pytest.raises(UsageError, match=words):
        settle(*flags, machine=machine)
    assert settle("--tensor-parallel-size", "3").tensor_parallel_size == 3
    assert settle("--tensor-parallel-size", "2", "--role", "store").tensor_parallel_size == 2


@pytest.mark.parametrize(("ranks", "kept"), [(3, 3), (9, 3)])
def test_several_gpus_give_the_memory_of_each(ranks, kept):
    """Three KV heads: three ranks have one each; of nine, three hold the same."""
    many = replace(LAPTOP, gpu=Gpu("H100", 80 * GiB, 79 * GiB, True, count=9))
    model = replace(MODEL, intermediate_size=9 * 128)
    config = settle("--tensor-parallel-size", str(ranks), machine=many, model=model)
    each = int(0.9 * 80 * GiB) - GiB - model.num_parameters * 2 // ranks - 2 * GiB
    assert 0 <= each * kept - config.kv_cache_bytes < geometry(config, model, "bfloat16").block_bytes


def test_a_full_gpu_is_refused():
    full = replace(LAPTOP, gpu=Gpu("H100", 80 * GiB, GiB, True))
    with pytest.raises(UsageError, match="--gpu-memory-utilization"):
        settle(machine=full)


def test_a_joiner_adopts_the_clusters_name_of_the_model():
    cluster = {"dtype": "float32", "model": "ours"}
    assert settle(cluster=cluster).served_model_name == "ours"
    assert settle("--served-model-name", "mine", cluster=cluster).served_model_name == "mine"


def test_peers_must_agree_on_what_kv_means():
    config = settle()
    same = {"model": config.served_model_name, "block_size": 16, "root": "aa"} | dict.fromkeys(TYPES, "float32")
    assert disagreement(config, "aa", same) is None
    other = str(disagreement(config, "aa", same | {"model": "m"}))
    assert "serves its model as m, not smollm2-135m-instruct; pass --served-model-name m" in other
    assert "--cluster-block-size 32, not 16" in str(disagreement(config, "aa", same | {"block_size": 32}))
    assert "--cluster-kv-dtype bfloat16" in str(disagreement(config, "aa", same | {"dtype": "bfloat16"}))
    assert "--pool-dtype int8" in str(disagreement(config, "aa", same | {"pool_dtype": "int8"}))
    assert "--wire-dtype fp8, not float32" in str(disagreement(config, "aa", same | {"wire_dtype": "fp8"}))
    assert "same model" in str(disagreement(config, "bb", same))
    for name in ("pool_dtype", "wire_dtype"):
        older = {key: value for key, value in same.items() if key != name}
        assert f"does not report its {name}" in str(disagreement(config, "aa", older))


def test_survey_reads_proc_and_cgroup(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags\t\t: fpu avx512_bf16 sse\n")
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:  8388608 kB\n")
    machine = survey(False, proc=tmp_path, cgroup=tmp_path)
    assert machine.bfloat16
    assert machine.free_bytes == 8 * GiB
    (tmp_path / "memory.max").write_text(f"{4 * GiB}\n")
    (tmp_path / "memory.current").write_text(f"{GiB}\n")
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    machine = survey(False, proc=tmp_path, cgroup=tmp_path)
    assert machine.free_bytes == 3 * GiB
    assert machine.num_cpus == 1
    # A checkpoint that was read lies in the page cache, which the kernel counts as used and gives back.
    (tmp_path / "memory.current").write_text(f"{4 * GiB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {GiB}\nshmem 4096\ninactive_file {2 * GiB}\nactive_file {GiB // 2}\n")
    assert survey(False, proc=tmp_path, cgroup=tmp_path).free_bytes == 2.5 * GiB


def test_survey_of_this_machine_without_torch():
    machine = survey(look_for_gpu=False)
    assert machine.num_cpus >= 1
    assert machine.free_bytes > 0
    assert machine.gpu is None


def test_a_draft_model_gets_kv_for_as_many_tokens_as_the_model():
    small = replace(MODEL, num_layers=6)
    flags = ("--speculative-method", "draft", "--speculative-model", "small", "--kv-cache-bytes", "90M")

    def kv(*more: str) -> int:
        return resolve(parse([*flags, *more]), MODEL, LAPTOP, "ab12", None, small).speculative_kv_bytes

    block = geometry(settle(), small, "float32").block_bytes
    own = geometry(settle(), MODEL, "float32").block_bytes
    assert kv() == 90 * (1 << 20) // own * block
    assert kv("--speculative-kv-bytes", "1M") == (1 << 20) // block * block
    assert kv("--role", "store") == 0
    with pytest.raises(UsageError, match=f"--speculative-kv-bytes 100 holds no block .* give {block} or more"):
        kv("--speculative-kv-bytes", "100")


@pytest.mark.parametrize(
    "flags",
    [
        ("--speculative-method", "draft"),
        ("--speculative-model", "small"),
        ("--prompt-lookup-min", "5", "--prompt-lookup-max", "4"),
    ],
)
def test_speculation_flags_that_do_not_go_together(flags):
    with pytest.raises(UsageError, match=r"go together|exceeds"):
        parse(flags)


def test_a_gpu_does_not_encode_pooled_blocks():
    with pytest.raises(UsageError, match="--pool-dtype int8"):
        settle("--device", "cuda", "--pool-dtype", "int8", machine=H100)
    plain = settle("--device", "cuda", machine=H100)
    assert plain.pool_dtype == plain.kv_cache_dtype


def test_a_quantized_arena():
    """Nearly twice the tokens of bfloat16 in the same bytes, and the pool keeps the arena's blocks."""
    machine = replace(LAPTOP, bfloat16=True)
    plain, config = settle(machine=machine), settle("--kv-cache-dtype", "int8", machine=machine)
    assert (config.dtype, config.kv_cache_dtype, config.pool_dtype) == ("bfloat16", "int8", "int8")
    wide, shape = (geometry(one, MODEL, one.kv_cache_dtype) for one in (plain, config))
    assert shape.block_bytes == shape.pool_bytes == wide.block_bytes * (64 + 4) // (64 * 2) and not shape.encoded
    assert config.kv_cache_bytes % shape.block_bytes == 0 == config.dram_bytes % shape.block_bytes
    assert resolve(config, MODEL, machine, "other") == config
    on_gpu = settle("--kv-cache-dtype", "fp8", machine=H100)
    assert (on_gpu.device, on_gpu.kv_cache_dtype, on_gpu.pool_dtype) == ("cuda", "fp8", "fp8")


def test_a_joiner_adopts_a_quantized_arena_and_computes_as_it_can():
    cluster = {"dtype": "fp8", "pool_dtype": "fp8"}
    config = settle(machine=replace(LAPTOP, bfloat16=True), cluster=cluster)
    assert (config.dtype, config.kv_cache_dtype, config.pool_dtype) == ("bfloat16", "fp8", "fp8")
    theirs = {"model": config.served_model_name, "block_size": 16, "root": "aa"} | dict.fromkeys(TYPES, "fp8")
    assert disagreement(config, "aa", theirs) is None
    for wish in ("int8", "bfloat16"):
        other = settle("--kv-cache-dtype", wish, cluster=cluster)
        assert (other.kv_cache_dtype, other.cluster_kv_dtype) == (wish, "fp8")
        assert disagreement(other, "aa", theirs) is None
    assert "--cluster-kv-dtype float32" in str(disagreement(config, "aa", theirs | {"dtype": "float32"}))


def test_quantized_arenas_that_cannot_be():
    with pytest.raises(UsageError, match=r"--pool-dtype fp8: with --kv-cache-dtype int8 .* leave out"):
        settle("--kv-cache-dtype", "int8", "--pool-dtype", "fp8")
    with pytest.raises(UsageError, match=r"--kv-cache-dtype int8: .* give --block-size 4 or a multiple"):
        settle("--kv-cache-dtype", "int8", "--block-size", "1", model=replace(MODEL, head_size=66))


def test_an_ssd_tier_larger_than_its_disk_is_refused():
    small = replace(LAPTOP, disk_bytes=10 * GiB)
    assert settle("--ssd-path", "x", "--ssd-bytes", "10G", machine=small).ssd_bytes == 10 * GiB
    assert settle("--ssd-bytes", "11G", machine=small).ssd_path is None, "there is no tier"
    with pytest.raises(UsageError, match=r"--ssd-bytes .* --ssd-path x has 10240 MiB"):
        settle("--ssd-path", "x", "--ssd-bytes", "11G", machine=small)


def test_connections_are_as_many_as_files_may_be_open():
    assert settle(machine=replace(LAPTOP, max_files=1 << 20)).max_connections == Config().max_connections
    assert settle(machine=replace(LAPTOP, max_files=1024)).max_connections == 1024 - OTHER_FILES
    assert settle("--max-connections", "5", machine=replace(LAPTOP, max_files=1024)).max_connections == 5
    with pytest.raises(UsageError, match=r"--max-connections 5: .*ulimit -n"):
        settle("--max-connections", "5", machine=replace(LAPTOP, max_files=OTHER_FILES))


def test_the_disk_and_the_open_files_are_read(tmp_path):
    machine = survey(False, ssd_path=str(tmp_path / "not" / "yet" / "there"))
    stat = os.statvfs(tmp_path)
    assert machine.disk_bytes == stat.f_blocks * stat.f_frsize
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert machine.max_files == soft and (soft == hard or soft >= MOST_FILES)


DELTA = Delta(layers=(0, 1, 2), key_heads=2, key_size=64, value_heads=4, value_size=64, kernel=4)
NEXT = replace(MODEL, num_layers=4, delta=DELTA, max_position_embeddings=1 << 20)


def test_states_take_blocks_of_the_arena():
    config = settle("--kv-cache-bytes", "20M", "--max-num-batched-tokens", "512", model=NEXT)
    shape = geometry(config, NEXT, "float32")
    assert shape.num_layers == 1 and shape.block_bytes == 2 * 3 * 16 * 64 * 4
    states = 3 * DELTA.state_bytes(4)
    assert shape.state_blocks == -(-states // shape.block_bytes) == 9
    longer = settle("--kv-cache-bytes", "20M", "--max-num-batched-tokens", "512", "--state-interval", "1", model=NEXT)
    blocks = config.kv_cache_bytes // shape.block_bytes
    assert config.max_model_len == 16 * (blocks - 9 * StatePlaces(16, 256).most(512))
    assert longer.max_model_len == 16 * (blocks - 9 * StatePlaces(16, 1).most(512)) < config.max_model_len


@pytest.mark.parametrize(
    ("argv", "remedy"),
    [
        (("--kv-groups", "uniform"), "give windows"),
        (("--kv-cache-dtype", "int8"), "leave it on auto"),
        (("--pool-dtype", "fp8"), "leave it on auto"),
        (("--wire-dtype", "int8"), "leave it on auto"),
        (("--speculative-method", "mtp"), "give ngram, suffix or none"),
        (("--speculative-method", "draft", "--speculative-model", "x"), "give ngram, suffix or none"),
        (("--speculative-method", "eagle", "--speculative-model", "x"), "give ngram, suffix or none"),
        (("--prefill-parallel", "cpp"), "with states one node computes all layers of a prompt .*give none"),
        (("--tensor-parallel-size", "2"), "computed by one rank"),
    ],
)
def test_what_a_model_with_states_cannot_have(argv, remedy):
    """In one line that names the flag."""
    with pytest.raises(UsageError, match=f"^{argv[0]} {argv[1]}: .*{remedy}") as found:
        settle(*argv, model=NEXT)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("argv", "remedy"),
    [
        (("--speculative-method", "eagle", "--speculative-model", "x"), "give --kv-groups uniform"),
        (("--prefill-parallel", "cpp"), "with --kv-groups windows one node .*give --kv-groups uniform"),
    ],
)
def test_what_a_model_with_windows_cannot_have(argv, remedy):
    """In one line that names the flag, and what to give instead."""
    windows = replace(MODEL, windows=(512, 0) * 15)
    with pytest.raises(UsageError, match=f"^{argv[0]} {argv[1]}: .*{remedy}") as found:
        settle(*argv, model=windows)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_model_with_states_may_look_drafts_up(method):
    assert settle("--speculative-method", method, model=NEXT).speculative_method == method
