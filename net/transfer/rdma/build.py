"""The cffi module around libibverbs, compiled on first use into the user's cache.

It uses cffi's API mode, because much of verbs.h is static inline functions or macros, which dynamic lookup cannot
reach: the C compiler reads the header. shim.c adds calls that work on whole batches.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

from net.compiled import NotCompiled, c_compiler, kept, run

MODULE = "_mooncake_verbs"
SHIM = Path(__file__).with_name("shim.c")

DECLARATIONS = """
typedef int... kv_enum;
union ibv_gid { uint8_t raw[16]; ...; };
struct ibv_device { ...; };
struct ibv_context { int async_fd; ...; };
struct ibv_pd { uint32_t handle; ...; };
struct ibv_mr { uint32_t lkey; uint32_t rkey; ...; };
struct ibv_comp_channel { int fd; ...; };
struct ibv_cq { uint32_t handle; ...; };
struct ibv_qp { uint32_t qp_num; ...; };
struct ibv_device_attr { char fw_ver[64]; uint64_t max_mr_size; int max_qp_wr; int max_cq; int max_cqe;
                         int max_qp_rd_atom; int max_qp_init_rd_atom; ...; };
struct ibv_port_attr { int state; int active_mtu; uint32_t max_msg_sz; uint16_t lid; uint8_t link_layer; ...; };
struct ibv_gid_entry { union ibv_gid gid; uint32_t gid_index; uint32_t port_num; uint32_t gid_type; ...; };
enum { IBV_GID_TYPE_ROCE_V2, IBV_GID_TYPE_IB, ... };
enum { IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_WRITE, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_ATOMIC,
       IBV_ACCESS_RELAXED_ORDERING, ... };
enum { IBV_WC_SUCCESS, IBV_WC_LOC_LEN_ERR, IBV_WC_LOC_QP_OP_ERR, IBV_WC_LOC_PROT_ERR, IBV_WC_WR_FLUSH_ERR,
       IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_OP_ERR, IBV_WC_RETRY_EXC_ERR,
       IBV_WC_RNR_RETRY_EXC_ERR, ... };
enum { IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_READ, IBV_WR_ATOMIC_FETCH_AND_ADD, ... };
enum { IBV_SEND_SIGNALED, ... };
enum { IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_ERR, ... };
enum { IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR, IBV_EVENT_DEVICE_FATAL, IBV_EVENT_QP_FATAL, ... };
enum { IBV_PORT_ACTIVE, IBV_LINK_LAYER_ETHERNET, ... };

struct ibv_device **ibv_get_device_list(int *count);
void ibv_free_device_list(struct ibv_device **list);
const char *ibv_get_device_name(struct ibv_device *device);
struct ibv_context *ibv_open_device(struct ibv_device *device);
int ibv_close_device(struct ibv_context *context);
int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr);
int ibv_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr);
ssize_t ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries, size_t count, uint32_t flags);
struct ibv_pd *ibv_alloc_pd(struct ibv_context *context);
int ibv_dealloc_pd(struct ibv_pd *pd);
struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *address, size_t length, int access);
int ibv_dereg_mr(struct ibv_mr *mr);
struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context);
int ibv_destroy_comp_channel(struct ibv_comp_channel *channel);
struct ibv_cq *ibv_create_cq(struct ibv_context *context, int entries, void *user, struct ibv_comp_channel *channel,
                             int vector);
int ibv_destroy_cq(struct ibv_cq *cq);
int ibv_req_notify_cq(struct ibv_cq *cq, int solicited_only);
int ibv_destroy_qp(struct ibv_qp *qp);
const char *ibv_wc_status_str(kv_enum status);
const char *ibv_event_type_str(kv_enum event);

struct kv_op { ...; };
struct kv_completion { ...; };
struct kv_path { uint32_t qp_num, receive_psn, send_psn; uint8_t gid[16]; uint16_t lid;
                 uint8_t port, gid_index, is_global, mtu, timeout, retries, reads, answers; };
size_t kv_sizeof_op(void);
size_t kv_sizeof_completion(void);
struct ibv_qp *kv_create_qp(struct ibv_pd *pd, struct ibv_cq *cq, uint32_t sends, uint32_t receives);
int kv_to_state(struct ibv_qp *qp, int state);
int kv_to_init(struct ibv_qp *qp, uint8_t port, int access);
int kv_to_ready(struct ibv_qp *qp, const struct kv_path *path);
int kv_state(struct ibv_qp *qp);
int kv_post(struct ibv_qp *qp, const struct kv_op *ops, int n, int *posted);
int kv_receive(struct ibv_qp *qp, int n);
int kv_poll(struct ibv_cq *cq, struct kv_completion *out, int n);
int kv_drain_events(struct ibv_comp_channel *channel);
int kv_next_event(struct ibv_context *context, int *type, uint32_t *qp_num);
int kv_nonblocking(int fd);
"""


def module() -> ModuleType:
    """The compiled module with `ffi` and `lib`, built if the cache does not contain it. Raises NotCompiled."""
    decides = (DECLARATIONS.encode(), SHIM.read_bytes(), sys.version.encode())
    path = kept("verbs", MODULE, decides, compile_to, str(sysconfig.get_config_var("EXT_SUFFIX")))
    spec = importlib.util.spec_from_file_location(MODULE, path)
    if spec is None or spec.loader is None:
        raise NotCompiled(f"{path} is not an extension module; delete it")
    loaded = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(loaded)
    except ImportError as error:  # libibverbs was removed after the build
        raise NotCompiled(f"{error} (Debian: apt install libibverbs1)") from None
    return loaded


def compile_to(path: Path) -> None:
    """Takes about a second. Raises NotCompiled."""
    compiler = c_compiler("gcc libibverbs-dev")
    from cffi import FFI

    ffi = FFI()
    ffi.cdef(DECLARATIONS)
    ffi.set_source(MODULE, SHIM.read_text())
    source = path.with_name(f"{MODULE}.c")
    ffi.emit_c_code(str(source))
    include = f"-I{sysconfig.get_path('include')}"
    try:
        run([compiler, "-O2", "-shared", "-fPIC", include, str(source), "-o", str(path), "-libverbs"])
    except NotCompiled as error:
        first = next((line.strip() for line in str(error).splitlines()[1:] if "error" in line), str(error)[-200:])
        raise NotCompiled(f"cannot compile the verbs module (Debian: apt install libibverbs-dev): {first}") from None
