// The threads of one operation: torch's OpenMP pool, a barrier, memory that stays with a thread.
#pragma once
#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>

struct Range {
    int64_t begin, end;
    int64_t size() const { return end - begin; }
};

// Part `index` of `parts` of 0 .. count, cut at multiples of `unit`.
inline Range share(int64_t count, int64_t unit, int index, int parts) {
    int64_t units = (count + unit - 1) / unit;
    return {std::min(count, units * index / parts * unit), std::min(count, units * (index + 1) / parts * unit)};
}

// A barrier for the threads of one parallel region. They spin, because the wait is about a microsecond, and yield the
// core if it takes longer.
class Barrier {
  public:
    void wait(int threads) {
        if (threads == 1) return;
        const int round = round_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round_.load(std::memory_order_acquire) == round; spins++)
            if (spins < 2000)
                pause();
            else
                sched_yield();
    }

  private:
    static void pause() {
#ifdef __x86_64__
        __builtin_ia32_pause();
#else
        asm volatile("yield");
#endif
    }

    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> round_{0};
};

// Reusable memory of one thread that grows on demand.
template <class T>
class Scratch {
  public:
    ~Scratch() { std::free(memory_); }
    T* get(int64_t elements) {
        if (elements > size_) {
            std::free(memory_);
            size_ = (elements + 31) / 32 * 32;
            memory_ = static_cast<T*>(std::aligned_alloc(64, size_ * sizeof(T)));
        }
        return memory_;
    }

  private:
    T* memory_ = nullptr;
    int64_t size_ = 0;
};

// body(index, threads) on each thread of a team.
template <class Body>
void team(int threads, const Body& body) {
    if (threads <= 1) return body(0, 1);
#pragma omp parallel num_threads(threads)
    body(omp_get_thread_num(), omp_get_num_threads());
}
