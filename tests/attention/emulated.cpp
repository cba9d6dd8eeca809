// Runs one kernel of attention on memory that emulated.py sends, for a CPU that this machine is not.
//
// stdin: the kernel's name as a letter (d, p, w), 8 bytes with the size of the memory, the kernel's argument, the memory.
// An address in the argument is 1 + an offset into the memory, or null. stdout: the memory afterwards.
#include "paged.h"
#include <cstdio>
#include <cstdlib>

extern "C" {
void mooncake_decode(const Attend *);
void mooncake_prefill(const Attend *);
void mooncake_write(const Write *);
}

namespace {

char *memory;
int64_t size;

void take(void *to, size_t bytes) {
  if (fread(to, 1, bytes, stdin) != bytes) exit(2);
}

template <typename T> void place(T *&p) {
  if (p) p = (T *)(memory + (intptr_t)p - 1);
}

template <class Argument> Argument argument() {
  Argument a;
  take(&a, sizeof a);
  memory = (char *)aligned_alloc(64, (size + 63) / 64 * 64);
  take(memory, size);
  place(a.kv.data);
  place(a.q);
  return a;
}

Attend attend() {
  Attend a = argument<Attend>();
  place(a.out);
  place(a.sinks);
  place(a.block_tables);
  place(a.cu_q);
  place(a.ctx_lens);
  return a;
}

Write written() {
  Write w = argument<Write>();
  place(w.k);
  place(w.v);
  place(w.cos);
  place(w.sin);
  place(w.slots);
  return w;
}

}  // namespace

int main() {
  char kernel;
  take(&kernel, 1);
  take(&size, sizeof size);
  if (kernel == 'w') {
    const Write w = written();
    mooncake_write(&w);
  } else {
    const Attend a = attend();
    kernel == 'd' ? mooncake_decode(&a) : mooncake_prefill(&a);
  }
  return fwrite(memory, 1, size, stdout) == (size_t)size ? 0 : 3;
}
