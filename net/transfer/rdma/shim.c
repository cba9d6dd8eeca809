/* Work that Python must not do for each slice: one call posts a whole batch, or polls all completions.
 * Records are flat, so that Python can pack and unpack them with struct. */
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <string.h>

typedef int kv_enum;

struct kv_op { /* one work request of the send queue, 56 bytes */
  uint64_t wr_id, local_address, remote_address, add;
  uint32_t length, lkey, rkey, opcode, flags, unused;
};

struct kv_completion { /* 16 bytes */
  uint64_t wr_id;
  uint32_t status, qp_num;
};

struct kv_path { /* the other end of a connection and how to reach it */
  uint32_t qp_num, receive_psn, send_psn;
  uint8_t gid[16];
  uint16_t lid;
  uint8_t port, gid_index, is_global, mtu, timeout, retries;
  uint8_t reads, answers; /* concurrent READs and atomics: begun here, begun there */
};

enum { CHUNK = 64 };

static size_t kv_sizeof_op(void) { return sizeof(struct kv_op); }
static size_t kv_sizeof_completion(void) { return sizeof(struct kv_completion); }

/* receives: how many writes with an immediate value may arrive before kv_receive is called again. */
static struct ibv_qp *kv_create_qp(struct ibv_pd *pd, struct ibv_cq *cq, uint32_t sends, uint32_t receives) {
  struct ibv_qp_init_attr attr = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC};
  attr.cap.max_send_wr = sends;
  attr.cap.max_recv_wr = receives ? receives : 1; /* some providers take no queue of size 0 */
  attr.cap.max_send_sge = attr.cap.max_recv_sge = 1;
  return ibv_create_qp(pd, &attr);
}

static int kv_to_state(struct ibv_qp *qp, int state) {
  struct ibv_qp_attr attr = {.qp_state = state};
  return ibv_modify_qp(qp, &attr, IBV_QP_STATE);
}

static int kv_to_init(struct ibv_qp *qp, uint8_t port, int access) {
  struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = port, .qp_access_flags = access};
  return ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

static int kv_to_ready(struct ibv_qp *qp, const struct kv_path *path) {
  struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR,
                             .path_mtu = path->mtu,
                             .dest_qp_num = path->qp_num,
                             .rq_psn = path->receive_psn,
                             .max_dest_rd_atomic = path->answers,
                             .min_rnr_timer = 12};
  attr.ah_attr.port_num = path->port;
  attr.ah_attr.dlid = path->lid;
  attr.ah_attr.is_global = path->is_global;
  memcpy(attr.ah_attr.grh.dgid.raw, path->gid, sizeof path->gid);
  attr.ah_attr.grh.sgid_index = path->gid_index;
  attr.ah_attr.grh.hop_limit = 64;
  int error = ibv_modify_qp(qp, &attr,
                            IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
  if (error) return error;
  memset(&attr, 0, sizeof attr);
  attr.qp_state = IBV_QPS_RTS;
  attr.sq_psn = path->send_psn;
  attr.timeout = path->timeout;
  attr.retry_cnt = path->retries;
  attr.rnr_retry = 7;
  attr.max_rd_atomic = path->reads;
  return ibv_modify_qp(qp, &attr,
                       IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
                           IBV_QP_MAX_QP_RD_ATOMIC);
}

static int kv_state(struct ibv_qp *qp) {
  struct ibv_qp_attr attr;
  struct ibv_qp_init_attr init;
  int error = ibv_query_qp(qp, &attr, IBV_QP_STATE, &init);
  return error ? -error : (int)attr.qp_state;
}

/* 0 or errno; *posted = number of the n requests that the provider accepted. */
static int kv_post(struct ibv_qp *qp, const struct kv_op *ops, int n, int *posted) {
  struct ibv_send_wr requests[CHUNK], *bad;
  struct ibv_sge pieces[CHUNK];
  *posted = 0;
  while (*posted < n) {
    int count = n - *posted < CHUNK ? n - *posted : CHUNK;
    for (int i = 0; i < count; i++) {
      const struct kv_op *op = ops + *posted + i;
      struct ibv_send_wr *request = requests + i;
      memset(request, 0, sizeof *request);
      pieces[i] = (struct ibv_sge){.addr = op->local_address, .length = op->length, .lkey = op->lkey};
      request->wr_id = op->wr_id;
      request->next = i + 1 < count ? request + 1 : NULL;
      request->sg_list = pieces + i;
      request->num_sge = op->length ? 1 : 0;
      request->opcode = op->opcode;
      request->send_flags = op->flags;
      if (op->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
        request->wr.atomic.remote_addr = op->remote_address;
        request->wr.atomic.rkey = op->rkey;
        request->wr.atomic.compare_add = op->add;
      } else {
        request->wr.rdma.remote_addr = op->remote_address;
        request->wr.rdma.rkey = op->rkey;
      }
    }
    bad = NULL;
    int error = ibv_post_send(qp, requests, &bad);
    if (error) {
      *posted += bad ? (int)(bad - requests) : 0;
      return error < 0 ? errno : error;
    }
    *posted += count;
  }
  return 0;
}

/* Post n receive requests without memory, with wr_id 0: each gives a completion when a write with an immediate value has
 * landed. 0 or errno. */
static int kv_receive(struct ibv_qp *qp, int n) {
  struct ibv_recv_wr request = {.wr_id = 0}, *bad;
  for (int i = 0; i < n; i++) {
    int error = ibv_post_recv(qp, &request, &bad);
    if (error) return error < 0 ? errno : error;
  }
  return 0;
}

/* Number of completions taken, at most n; -1 if the queue is broken. */
static int kv_poll(struct ibv_cq *cq, struct kv_completion *out, int n) {
  struct ibv_wc taken[CHUNK];
  int total = 0;
  while (total < n) {
    int wanted = n - total < CHUNK ? n - total : CHUNK, got = ibv_poll_cq(cq, wanted, taken);
    if (got < 0) return -1;
    for (int i = 0; i < got; i++) {
      const struct ibv_wc *wc = taken + i;
      struct kv_completion *record = out + total + i;
      record->wr_id = wc->wr_id;
      record->status = wc->status;
      record->qp_num = wc->qp_num;
    }
    total += got;
    if (got < wanted) break;
  }
  return total;
}

/* Take and acknowledge all waiting events of the channel, of any queue; returns their number. */
static int kv_drain_events(struct ibv_comp_channel *channel) {
  struct ibv_cq *which;
  void *context;
  int count = 0;
  for (; ibv_get_cq_event(channel, &which, &context) == 0; count++) ibv_ack_cq_events(which, 1);
  return count;
}

/* 0 and the next asynchronous event, or errno (EAGAIN: none is waiting). */
static int kv_next_event(struct ibv_context *context, int *type, uint32_t *qp_num) {
  struct ibv_async_event event;
  if (ibv_get_async_event(context, &event)) return errno ? errno : EAGAIN;
  *type = event.event_type;
  *qp_num = 0;
  switch (event.event_type) {
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_COMM_EST:
    case IBV_EVENT_SQ_DRAINED:
    case IBV_EVENT_QP_LAST_WQE_REACHED:
      *qp_num = event.element.qp->qp_num;
      break;
    default:
      break;
  }
  ibv_ack_async_event(&event);
  return 0;
}

static int kv_nonblocking(int fd) {
  int flags = fcntl(fd, F_GETFL);
  return flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) ? errno : 0;
}
