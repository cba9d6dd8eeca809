// Paged attention of many rows per request: which path computes it, and how the columns are split over threads.
#include "flash_bf16.h"
#include "flash_float.h"
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <vector>

namespace {

constexpr int MAX_TILES = 16;        // 512 columns share one transposed V and stay, with O^T, in the second-level cache
constexpr int ITEMS_PER_THREAD = 4;  // more, smaller items level out that late rows see more keys

std::vector<PrefillItem> plan_items(const Attend &a, int *tiles) {
  int64_t columns = 0;
  for (int s = a.first; s < a.last; s++) columns += (int64_t)(a.cu_q[s + 1] - a.cu_q[s]) * a.num_heads;
  const int64_t share = columns / COLUMNS / (a.threads == 1 ? 1 : a.threads * ITEMS_PER_THREAD);
  *tiles = std::max<int64_t>(2, std::min<int64_t>(MAX_TILES, share));
  std::vector<PrefillItem> items;
  for (int s = a.first; s < a.last; s++) {
    const int count = (a.cu_q[s + 1] - a.cu_q[s]) * a.group(), step = *tiles * COLUMNS;
    for (int end = count; end > 0; end -= step)  // the rows that see most first
      for (int head = 0; head < a.kv.num_kv_heads; head++) items.push_back({s, head, std::max(0, end - step), end});
  }
  return items;
}

struct NoSetup {
  static void configure() {}
  static void release() {}
};

template <class Path, class Setup> void attend_all(const Attend &a) {
  int tiles;
  const std::vector<PrefillItem> items = plan_items(a, &tiles);
  const int size = a.kv.head_size;
#pragma omp parallel num_threads(a.threads) if (a.threads > 1)
  {
    const size_t columns = tiles * COLUMNS, floats = Path::scratch(size, tiles) + columns * (size + 3);
    float *memory = (float *)aligned_alloc(64, (floats * 4 + 63) / 64 * 64);
    Columns c;
    c.o = memory;
    c.max = c.o + columns * size;
    c.total = c.max + columns;
    c.position = (int32_t *)(c.total + columns);
    Path path(memory + columns * (size + 3), size);
    Setup::configure();
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < items.size(); i++) attend_item(a, items[i], path, c);
    Setup::release();
    free(memory);
  }
}

}  // namespace

// Asks Linux for the tile registers, for this process: 0 if it may use them.
extern "C" int mooncake_request_amx() {
#ifdef __AMX_BF16__
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return (int)syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
#else
  return -1;
#endif
}

extern "C" void mooncake_prefill(const Attend *a) {
#ifdef __AVX512BF16__
  if (a->dtype == BFLOAT16 && (a->kv.dtype == BFLOAT16 || a->kv.quantized())) {
#ifdef __AMX_BF16__
    return attend_all<Bf16Path<AmxProduct>, AmxProduct>(*a);
#else
    return attend_all<Bf16Path<VectorProduct>, VectorProduct>(*a);
#endif
  }
#endif
  if (a->kv.dtype == FLOAT32 || a->kv.quantized()) return attend_all<FloatPath<float>, NoSetup>(*a);
  if (a->kv.dtype == BFLOAT16) return attend_all<FloatPath<Bf16>, NoSetup>(*a);
  return attend_all<FloatPath<Fp16>, NoSetup>(*a);
}
