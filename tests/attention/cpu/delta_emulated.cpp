// Runs one kernel of the gated delta rule on memory that test_delta_neon.py sends, for a CPU that this machine is not.
//
// stdin: the kernel as a letter (s: step, c: chunk), its argument, and for each address in it 8 bytes with the size of
// its memory, -1 for null, and the memory. stdout: the outputs and the memory of the states afterwards.
#include "delta/delta.h"
#include <cstdio>
#include <cstdlib>

extern "C" {
void mooncake_delta_step(const Delta *);
void mooncake_delta_chunk(const Delta *);
}

namespace {

void take(void *to, size_t bytes) {
  if (fread(to, 1, bytes, stdin) != bytes) exit(2);
}

template <typename T> int64_t place(T *&p) {
  int64_t size;
  take(&size, sizeof size);
  if (size < 0) return p = nullptr, 0;
  void *memory = aligned_alloc(64, (size + 63) / 64 * 64);
  take(memory, size);
  p = (T *)memory;
  return size;
}

}  // namespace

int main() {
  char kernel;
  Delta d;
  take(&kernel, 1);
  take(&d, sizeof d);
  for (const void **p : {&d.q, &d.k, &d.v}) place(*p);
  place(d.decay);
  place(d.rate);
  const int64_t out = place(d.out), memory = place(d.memory);
  place(d.pieces);
  place(d.read);
  place(d.write);
  place(d.fresh);
  kernel == 's' ? mooncake_delta_step(&d) : mooncake_delta_chunk(&d);
  const bool sent = fwrite(d.out, 1, out, stdout) == (size_t)out && fwrite(d.memory, 1, memory, stdout) == (size_t)memory;
  return sent ? 0 : 3;
}
