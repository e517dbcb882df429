// The operations of machine.cuh on threads of this host, for tests: a warp is a thread, its 32 lanes are fibers, shared memory is a buffer.
// Every operation may be followed by a random delay.
//
// What is modelled, and how it is weaker or stronger than a GPU:
//  - store_half directly after sync_warp: the payload first, then (after the warp has met) the tag words, with release.
//    load_lines directly after sync_warp: the tag words with acquire, and only if they match the payload. So payload and
//    tag are 8-byte accesses with nothing between them but the order that LL128 claims of a GPU: a reader that finds the
//    tag has the payload written with it. Lines of a packet may arrive one by one.
//    Without sync_warp directly before (memory operations, votes and shuffles end its effect) the warp counts as diverged:
//    every lane stores or loads its 16 bytes in its own time, and tags may be seen before payload.
//  - Slots and user buffers are ordinary memory: with ThreadSanitizer, any overwriting of a slot that is still read,
//    or reading of one not yet announced, is a data race and reported.
//  - Words that the GPU loads relaxed are loaded with acquire here, and stored with release. On the GPU the order comes from
//    loads that have returned before their values are used (A2), which C++ cannot express.
//  - Bulk copies: the load happens late, when its barrier is polled; the store reads its stage as late as wait_stores
//    allows, and after wait_stores its bytes are still in flight: they arrive when some thread of the block makes a
//    system fence. A protocol that announces a chunk without that fence reads old bytes here at once.
//  - Lanes of a warp are scheduled one by one and switch only at collectives and pauses; a collective that not all
//    lanes reach ends the program.
//  - Residency: without a Device all blocks of all kernels are resident. A Device has room for a number of blocks of all
//    kernels launched on it, whatever their threads and shared memory. Blocks come in by order of launches, a kernel's
//    ascending, clusters whole, each as soon as there is room; a block's room comes free when its last warp has ended.
//    A GPU may let a kernel in before all blocks of the kernel before are in, or place a block beside smaller ones. Here
//    that never happens, so no test passes because of it.
#pragma once
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#define WINDLASS_DEVICE inline
#define WINDLASS_DEVICE_FUNCTION inline
#define WINDLASS_UNROLL
#define WINDLASS_SELDOM(condition) (condition)
#define WINDLASS_NO_UNROLL
#define WINDLASS_HAS_BULK_COPIES 1

#if defined(__SANITIZE_THREAD__)
#define HOST_TSAN 1
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#else
#define HOST_TSAN 0
#endif

// Not sanitized: the fibers of one thread share the scheduler's fields, and never run at once.
#define HOST_QUIET __attribute__((no_sanitize("thread")))

namespace host {

struct Random {
  uint64_t state;
  HOST_QUIET uint64_t next() {
    uint64_t z = state += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
  }
  HOST_QUIET uint64_t below(uint64_t limit) { return next() % limit; }
};

// One in so many operations is followed by a delay; 0: none is.
inline std::atomic<uint32_t> delay_rarity{64};
// Called before each load of a word, unless empty. Tests set it while no kernel runs.
inline std::function<void(uint64_t)> before_load;
// Set whenever a warp has moved something, for residency::Threads, which finds kernels that wait for ever. A flag, as hundreds of
// threads would contend for a count.
inline std::atomic<bool> something_moved{false};

struct Copy {
  char* to;
  std::vector<char> bytes;
};

struct Kernel;
struct Block {
  uint32_t index, count, threads;
  Kernel* kernel;
  uint32_t live;  // warps that have not ended
  std::vector<uint64_t> memory;
  std::atomic<uint32_t> arrived{0}, generation{0};
  std::mutex in_flight_lock;  // protects in_flight; no other lock is taken while it is held
  std::deque<Copy> in_flight;
};

struct PendingLoad {
  char* stage;
  const char* from;
  uint32_t bytes;
  uint64_t* barrier;
};
struct PendingStore {
  char* to;
  const char* stage;
  uint32_t bytes;
  bool read;
  std::vector<char> data;
};

// Switches to another fiber's stack. Weak, as each of the objects that become one library defines it.
extern "C" void host_switch_stack(void** save, void* to);
#if defined(__x86_64__)
asm(R"(
.text
.weak host_switch_stack
.type host_switch_stack,@function
host_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size host_switch_stack, .-host_switch_stack
)");
#elif defined(__aarch64__)
asm(R"(
.text
.weak host_switch_stack
.type host_switch_stack,%function
host_switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
#else
#error "fibers: write host_switch_stack for this processor"
#endif

struct Warp;
inline thread_local Warp* current = nullptr;
inline void fiber_main();

constexpr size_t stack_bytes = 64 << 10;

struct Fiber {
  void* stack_pointer = nullptr;
  void* sanitizer = nullptr;
  std::unique_ptr<char[]> stack;
  bool done = true;
};

// Sleeps before a warp's next poll. The sleep is longer the longer the warp has waited, and the more warps wait: hundreds of them, each
// polling a thousand times a second, would else leave no processor time to the warps that they wait for.
inline void wait_a_while(uint32_t polls) {
  static std::atomic<uint32_t> waiting{0};
  if (polls < 8) {
    sched_yield();
    return;
  }
  const uint32_t share = 1 + waiting.fetch_add(1, std::memory_order_relaxed) / 16;
  const uint32_t microseconds = (HOST_TSAN ? 300u : 30u) << std::min(polls / 8 - 1, 5u);
  std::this_thread::sleep_for(std::chrono::microseconds(std::min(microseconds * share, 10000u)));
  waiting.fetch_sub(1, std::memory_order_relaxed);
}

// The warp that a thread of this host runs; a thread runs warps one after the other.
struct Warp {
  Fiber fibers[32];
  Fiber home;  // the thread's own stack
  uint32_t lane = 0;
  uint32_t live = 0;
  // A collective of lanes: every live lane arrives, the last one lets all go on.
  uint32_t arrived = 0;
  uint64_t generation = 0;
  uint64_t values[32] = {};
  Random random{0};
  uint32_t idle = 0;  // pauses since something moved
  bool together[32] = {};  // since its last sync_warp this lane has done nothing that could make the warp diverge

  Block* block = nullptr;
  uint32_t index = 0;
  const std::function<void()>* body = nullptr;
  std::deque<PendingLoad> loads;
  std::deque<PendingStore> stores;

  HOST_QUIET void switch_to(Fiber& from, Fiber& to) {
#if HOST_TSAN
    __tsan_switch_to_fiber(to.sanitizer, 1);
#endif
    host_switch_stack(&from.stack_pointer, to.stack_pointer);
  }

  HOST_QUIET void run() {
    current = this;
#if HOST_TSAN
    if (!home.sanitizer) home.sanitizer = __tsan_get_current_fiber();
    __tsan_release(this);
#endif
    arrived = 0;
    live = 32;
    for (Fiber& fiber : fibers) {
      if (!fiber.stack) {
        fiber.stack.reset(new char[stack_bytes]);
#if HOST_TSAN
        fiber.sanitizer = __tsan_create_fiber(0);
#endif
      }
      fiber.done = false;
      auto* top = reinterpret_cast<uint64_t*>((reinterpret_cast<uint64_t>(fiber.stack.get()) + stack_bytes) & ~63ull);
#if defined(__x86_64__)
      *--top = 0;                                          // where fiber_main would return to
      *--top = reinterpret_cast<uint64_t>(&fiber_main);    // popped by ret
      for (int i = 0; i < 6; ++i) *--top = 0;
#else
      top -= 20;
      std::memset(top, 0, 160);
      top[11] = reinterpret_cast<uint64_t>(&fiber_main);
#endif
      fiber.stack_pointer = top;
    }
    lane = (uint32_t)random.below(32);
    switch_to(home, fibers[lane]);
    current = nullptr;
#if HOST_TSAN
    __tsan_acquire(this);
#endif
  }

  HOST_QUIET void yield() {
    const uint32_t from = lane;
    uint32_t to = from;
    do to = (to + 1) & 31;
    while (fibers[to].done && to != from);
    if (to == from) return;
    lane = to;
    switch_to(fibers[from], fibers[to]);
  }

  HOST_QUIET void finish_lane() {
    const uint32_t from = lane;
    fibers[from].done = true;
#if HOST_TSAN
    __tsan_release(this);
#endif
    if (--live == 0) {
      switch_to(fibers[from], home);
    } else {
      if (arrived) {
        std::fprintf(stderr, "lane %u ended while %u others wait at a collective\n", from, arrived);
        std::abort();
      }
      uint32_t to = from;
      while (fibers[to].done) to = (to + 1) & 31;
      lane = to;
      switch_to(fibers[from], fibers[to]);
    }
    std::abort();
  }

  HOST_QUIET void meet() {
    if (live != 32) {
      std::fprintf(stderr, "a collective of %u lanes\n", live);
      std::abort();
    }
#if HOST_TSAN
    __tsan_release(this);
#endif
    if (++arrived == live) {
      arrived = 0;
      ++generation;
    } else {
      const uint64_t before = generation;
      while (generation == before) yield();
    }
#if HOST_TSAN
    __tsan_acquire(this);
#endif
  }

  // Two barriers: all lanes have read the values before any lane writes the next ones.
  template <class Result>
  HOST_QUIET Result exchange(uint64_t value, Result (*combine)(const uint64_t*)) {
    part();
    values[lane] = value;
    meet();
    const Result result = combine(values);
    meet();
    return result;
  }

  HOST_QUIET uint64_t take(uint64_t value, uint32_t from) {
    part();
    values[lane] = value;
    meet();
    const uint64_t taken = values[from & 31];
    meet();
    return taken;
  }

  // Waiting warps sleep, so that warps with work get this host's few processors.
  HOST_QUIET void pause() {
    const bool first = lane == 0;
    yield();
    if (!first) return;
    wait_a_while(++idle);
  }
  HOST_QUIET void moved() {
    idle = 0;
    if (!something_moved.load(std::memory_order_relaxed)) something_moved.store(true, std::memory_order_relaxed);
  }
  HOST_QUIET void part() { together[lane] = false; }
  HOST_QUIET void join() { together[lane] = true; }
  HOST_QUIET bool is_together() { return together[lane]; }
  // For a diverged warp: this lane goes on some time before or after the others.
  HOST_QUIET void straggle() {
    for (uint64_t turns = random.below(3); turns; --turns) yield();
    if (random.below(16) == 0) sched_yield();
  }

  HOST_QUIET void delay() {
    const uint32_t rarity = delay_rarity.load(std::memory_order_relaxed);
    if (!rarity || random.below(rarity)) return;
    switch (random.below(8)) {
      case 0: std::this_thread::sleep_for(std::chrono::microseconds(random.below(60))); break;
      case 1:
      case 2: yield(); break;
      default: sched_yield();
    }
  }
};

HOST_QUIET inline void fiber_main() {
#if HOST_TSAN
  __tsan_acquire(current);
#endif
  (*current->body)();
  current->finish_lane();
}

// A GPU, as room for blocks.
struct Device {
  uint32_t free;                     // room for so many blocks. Machine::lock_ protects this and the queue
  std::deque<Kernel*> queue;         // kernels whose blocks wait for room, in order of launches
  std::atomic<uint32_t> launched{0};  // kernels, from init

  explicit Device(uint32_t slots) : free(slots) {}
};

struct Kernel {
  const uint32_t blocks, threads, shared_bytes, cluster;
  const std::function<void()>& body;
  Device* const device;  // null: room for all blocks
  Random random;
  std::vector<std::unique_ptr<Block>> admitted;
  uint32_t ended;  // blocks
};

// Its `launch` runs `body` on blocks * threads / 32 warps and returns when all have ended: a launch and its synchronisation.
class Machine {
 public:
  ~Machine() {
    {
      std::lock_guard<std::mutex> guard(lock_);
      closing_ = true;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  void launch(uint32_t blocks, uint32_t threads, uint32_t shared_bytes, uint64_t seed, const std::function<void()>& body,
              Device* device = nullptr, uint32_t cluster = 1) {
    Kernel kernel{blocks, threads, shared_bytes, cluster, body, device, {seed}, {}, 0};
    std::unique_lock<std::mutex> guard(lock_);
    if (device) {
      device->queue.push_back(&kernel);
      ++device->launched;
      fill(*device);
    } else {
      admit(kernel, blocks);
    }
    ended_.wait(guard, [&] { return kernel.ended == blocks; });
  }

 private:
  struct Task {
    Block* block;
    uint32_t warp;
    uint64_t seed;
  };

  void fill(Device& device) {
    while (!device.queue.empty()) {
      Kernel& kernel = *device.queue.front();
      if (kernel.admitted.size() == kernel.blocks) {
        device.queue.pop_front();
        continue;
      }
      const uint32_t left = kernel.blocks - (uint32_t)kernel.admitted.size(), together = kernel.cluster < left ? kernel.cluster : left;
      if (device.free < together) return;
      device.free -= together;
      admit(kernel, together);
    }
  }

  // Every warp of a resident block has a thread of its own.
  void admit(Kernel& kernel, uint32_t blocks) {
    const uint32_t warps = kernel.threads / 32;
    wanted_ += blocks * warps;
    for (; blocks; --blocks) {
      kernel.admitted.emplace_back(new Block);
      Block& block = *kernel.admitted.back();
      block.index = (uint32_t)kernel.admitted.size() - 1;
      block.count = kernel.blocks;
      block.threads = kernel.threads;
      block.kernel = &kernel;
      block.live = warps;
      block.memory.assign(kernel.shared_bytes / 8 + 32, 0xcdcdcdcdcdcdcdcdull);
      for (uint32_t w = 0; w < warps; ++w) waiting_.push_back({&block, w, kernel.random.next()});
    }
    while (workers_.size() < wanted_) workers_.emplace_back([this] { work(); });
    wake_.notify_all();
  }

  void end(Block& block) {
    Kernel& kernel = *block.kernel;
    wanted_ -= kernel.threads / 32;
    something_moved = true;
    if (++kernel.ended == kernel.blocks) ended_.notify_all();
    if (!kernel.device) return;
    ++kernel.device->free;
    fill(*kernel.device);
  }

  void work() {
    Warp warp;
    std::unique_lock<std::mutex> guard(lock_);
    for (;;) {
      wake_.wait(guard, [&] { return closing_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      const Task task = waiting_.front();
      waiting_.pop_front();
      guard.unlock();
      warp.block = task.block;
      warp.index = task.warp;
      warp.body = &task.block->kernel->body;
      warp.random.state = task.seed;
      warp.loads.clear();
      warp.stores.clear();
      warp.run();
      if (!warp.loads.empty() || !warp.stores.empty()) {
        std::fprintf(stderr, "a warp ended with bulk copies under way\n");
        std::abort();
      }
      guard.lock();
      if (--task.block->live == 0) end(*task.block);
    }
  }

  std::mutex lock_;  // protects all fields below
  std::condition_variable wake_, ended_;
  std::deque<Task> waiting_;
  std::vector<std::thread> workers_;
  size_t wanted_ = 0;
  bool closing_ = false;
};

}  // namespace host

HOST_QUIET inline uint32_t lane_index() { return host::current->lane; }
HOST_QUIET inline uint32_t warp_index() { return host::current->index; }
inline uint32_t thread_index() { return warp_index() * 32 + lane_index(); }
HOST_QUIET inline uint32_t thread_count() { return host::current->block->threads; }
HOST_QUIET inline uint32_t block_index() { return host::current->block->index; }
HOST_QUIET inline uint32_t block_count() { return host::current->block->count; }
HOST_QUIET inline char* shared_memory() {
  return reinterpret_cast<char*>((reinterpret_cast<uint64_t>(host::current->block->memory.data()) + 127) & ~127ull);
}

inline void sync_warp() {
  host::current->meet();
  host::current->join();
}
inline bool all_of_warp(bool value) {
  return host::current->exchange<bool>(value, [](const uint64_t* values) {
    for (int i = 0; i < 32; ++i)
      if (!values[i]) return false;
    return true;
  });
}
inline bool any_of_warp(bool value) { return !all_of_warp(!value); }
inline uint64_t from_first_lane(uint64_t value) {
  return host::current->exchange<uint64_t>(value, [](const uint64_t* values) { return values[0]; });
}
// Each lane gives its value and takes that of `lane`, at once.
HOST_QUIET inline uint64_t from_lane(uint64_t value, uint32_t lane) { return host::current->take(value, lane); }
HOST_QUIET inline uint32_t from_lane(uint32_t value, uint32_t lane) { return (uint32_t)host::current->take(value, lane); }
inline uint32_t bits_set(uint32_t bits) { return (uint32_t)__builtin_popcount(bits); }
inline uint32_t first_bit(uint32_t bits) { return (uint32_t)__builtin_ffs((int)bits) - 1; }
inline uint32_t ballot_of_warp(bool value) {
  return host::current->exchange<uint32_t>(value, [](const uint64_t* values) {
    uint32_t bits = 0;
    for (int i = 0; i < 32; ++i) bits |= (uint32_t)(values[i] != 0) << i;
    return bits;
  });
}
inline void sync_block() {
  sync_warp();
  if (lane_index() == 0) {
    host::Block& block = *host::current->block;
    const uint32_t before = block.generation.load();
    if (block.arrived.fetch_add(1) + 1 == block.threads / 32) {
      block.arrived = 0;
      block.generation.fetch_add(1);
    } else {
      for (uint32_t polls = 1; block.generation.load() == before; ++polls) host::wait_a_while(polls);
    }
  }
  sync_warp();
}
// A poll takes longer here: up to a millisecond, and much more where processors are few. The host's question (CONTROL_ASK) lasts half a second.
constexpr uint32_t rounds_between_looks = 8;
constexpr uint32_t rounds_before_request = HOST_TSAN ? 32 : 512;
inline void pause_thread() { host::current->pause(); }

inline Vector load_input(const char* from) {
  host::current->part();
  return *reinterpret_cast<const Vector*>(from);
}
inline void store_output(char* to, Vector v) {
  host::current->part();
  *reinterpret_cast<Vector*>(to) = v;
}
template <class Piece>
inline Piece load_piece(const char* from) {
  host::current->part();
  if (reinterpret_cast<uint64_t>(from) % sizeof(Piece)) std::abort();
  return *reinterpret_cast<const Piece*>(from);
}
template <class Piece>
inline Vector load_vector_by(const char* from) {
  Piece pieces[16 / sizeof(Piece)];
  for (uint32_t at = 0; at < 16 / sizeof(Piece); ++at) pieces[at] = load_piece<Piece>(from + at * sizeof(Piece));
  Vector v;
  std::memcpy(&v, pieces, sizeof v);
  return v;
}
template <class Piece>
inline void store_piece(char* to, Piece piece) {
  host::current->part();
  if (reinterpret_cast<uint64_t>(to) % sizeof(Piece)) std::abort();
  *reinterpret_cast<Piece*>(to) = piece;
}

inline void store_half(char* to, Vector first, Vector second) {
  const bool keeper = (lane_index() & 7) == 7;
  const bool together = host::current->is_together();
  host::current->moved();
  for (Vector v : {first, second}) {
    auto* words = reinterpret_cast<uint64_t*>(to);
    if (!together) host::current->straggle();
    words[0] = v.x;
    if (!keeper) words[1] = v.y;
    if (together) host::current->meet();
    host::current->delay();
    if (keeper) __atomic_store_n(words + 1, v.y, __ATOMIC_RELEASE);
    to += 512;
  }
}
template <int groups>
inline bool load_lines(Vector* v, const char* from, uint64_t tag) {
  const bool keeper = (lane_index() & 7) == 7;
  const bool together = host::current->is_together();
  const auto words = [&](int group) { return reinterpret_cast<const uint64_t*>(from + group * 512); };
  const auto load_payload_words = [&] {
    for (int group = 0; group < groups; ++group) v[group] = Vector{words(group)[0], keeper ? tag : words(group)[1]};
  };
  bool there = true;
  if (!together) {
    host::current->straggle();
    load_payload_words();
  }
  for (int group = 0; keeper && group < groups; ++group)
    there &= __atomic_load_n(words(group) + 1, __ATOMIC_ACQUIRE) == tag;
  host::current->delay();
  if (!all_of_warp(there)) return false;
  host::current->moved();
  if (together) load_payload_words();
  return true;
}

inline void store_half_if(bool so, char* to, Vector first, Vector second) {
  if (so) store_half(to, first, second);
}
// Loads payload only if the tags are there; else every lane's tags are made wrong, for found_lines.
template <int groups>
inline void load_lines_if(bool so, Vector (&v)[groups], const char* from, uint64_t tag) {
  if (!so) return;
  const bool together = host::current->is_together();
  if (!load_lines<groups>(v, from, tag))
    for (int group = 0; group < groups; ++group) v[group].y = ~tag;
  // On a GPU there is no vote here, so the warp stays converged for the next peer's lines.
  if (together) host::current->join();
}
template <int groups>
inline bool found_lines(const Vector (&v)[groups], uint64_t tag) {
  bool there = true;
  for (int group = 0; group < groups; ++group) there &= v[group].y == tag;
  return there || (lane_index() & 7) != 7;
}

inline void store_ll_if(bool so, char* to, uint64_t payload, uint64_t tag) {
  if (!so) return;
  auto* words = reinterpret_cast<uint64_t*>(to);
  host::current->moved();
  words[0] = payload;
  host::current->delay();
  __atomic_store_n(words + 1, tag, __ATOMIC_RELEASE);
}
inline void load_ll_if(bool so, const char* from, uint64_t tag, uint64_t& payload, uint64_t& found) {
  if (!so) return;
  auto* words = reinterpret_cast<const uint64_t*>(from);
  host::current->delay();
  found = __atomic_load_n(words + 1, __ATOMIC_ACQUIRE);
  if (found == tag) payload = words[0];
}

inline void choose(uint64_t& value, uint64_t other, bool so) {
  if (so) value = other;
}

template <class To, class From>
inline To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
inline float float_of_bits(uint32_t bits) { return same_bits<float>(bits); }
inline uint32_t bits_of_float(float value) { return same_bits<uint32_t>(value); }
inline double double_of_bits(uint64_t bits) { return same_bits<double>(bits); }
inline uint64_t bits_of_double(double value) { return same_bits<uint64_t>(value); }
// This program is compiled for a processor without fused operations, or told to use none.
//
// Chooses the NaN that results from NaNs: this host takes that of the first operand, and the compiler orders operands as it likes. GPUs have
// one NaN of 32 bits, and of 64 bits keep the same one in either order.
inline float settled(float result) { return std::isnan(result) ? float_of_bits(0x7fffffff) : result; }
inline double settled(double result, double a, double b) {
  constexpr uint64_t quiet = 1ull << 51;
  if (!std::isnan(result)) return result;
  if (!std::isnan(a) && !std::isnan(b)) return double_of_bits(0xfff8000000000000);
  const uint64_t of_a = std::isnan(a) ? bits_of_double(a) | quiet : 0, of_b = std::isnan(b) ? bits_of_double(b) | quiet : 0;
  return double_of_bits(of_a > of_b ? of_a : of_b);
}
inline float add_floats(float a, float b) { return settled(a + b); }
inline float multiply_floats(float a, float b) { return settled(a * b); }
inline double add_doubles(double a, double b) { return settled(a + b, a, b); }
inline double multiply_doubles(double a, double b) { return settled(a * b, a, b); }
// As on GPUs, but not in this host's library: a NaN, signaling or not, loses against a number, and +0 is above -0.
template <class Float>
inline Float larger(Float a, Float b) {
  if (std::isnan(a)) return b;
  if (std::isnan(b)) return a;
  return a == b ? (std::signbit(a) ? b : a) : a > b ? a : b;
}
inline float max_floats(float a, float b) { return settled(larger(a, b)); }
inline float min_floats(float a, float b) { return settled(-larger(-a, -b)); }
inline double max_doubles(double a, double b) { return settled(larger(a, b), a, b); }
inline double min_doubles(double a, double b) { return settled(-larger(-a, -b), a, b); }
inline float float_of_half(uint16_t bits) {
  const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent == 31) return float_of_bits(sign | 0x7f800000 | fraction << 13);
  if (exponent) return float_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
  const float value = (float)fraction / 16777216.0f;
  return sign ? -value : value;
}
// To nearest, ties to even.
inline uint16_t half_of_float(float value) {
  const uint32_t bits = bits_of_float(value), sign = bits >> 16 & 0x8000, all = bits & 0x7fffffff;
  if (all > 0x7f800000) return 0x7fff;
  if (all >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
  if (all < 0x38800000) {
    // Subnormal results: counts steps of 2^-24, a product that is exact for floats of this size.
    const float steps = float_of_bits(all) * 16777216.0f;
    uint32_t whole = (uint32_t)steps;
    const float rest = steps - (float)whole;
    if (rest > 0.5f || (rest == 0.5f && (whole & 1))) ++whole;
    return (uint16_t)(sign | whole);
  }
  const uint32_t rounded = all + 0xfff + (all >> 13 & 1);
  return (uint16_t)(sign | (rounded - 0x38000000) >> 13);
}
inline uint16_t bfloat_of_float(float value) {
  const uint32_t bits = bits_of_float(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline uint32_t halves_of_floats(float low, float high) { return half_of_float(low) | (uint32_t)half_of_float(high) << 16; }
inline uint32_t bfloats_of_floats(float low, float high) { return bfloat_of_float(low) | (uint32_t)bfloat_of_float(high) << 16; }
inline uint32_t add_halves(uint32_t a, uint32_t b) {
  return halves_of_floats(float_of_half((uint16_t)a) + float_of_half((uint16_t)b), float_of_half((uint16_t)(a >> 16)) + float_of_half((uint16_t)(b >> 16)));
}
inline uint32_t add_bfloats(uint32_t a, uint32_t b) {
  return bfloats_of_floats(float_of_bits(a << 16) + float_of_bits(b << 16), float_of_bits(a & 0xffff0000u) + float_of_bits(b & 0xffff0000u));
}

inline Vector load_slot(const char* from) { return *reinterpret_cast<const Vector*>(from); }
inline void store_slot(char* to, Vector v) { *reinterpret_cast<Vector*>(to) = v; }

inline Vector load_own_words(uint64_t address) { return *reinterpret_cast<Vector*>(address); }
inline void store_own_words(uint64_t address, Vector v) { *reinterpret_cast<Vector*>(address) = v; }
inline uint64_t load_word_acquire(uint64_t address) {
  host::current->delay();
  if (host::before_load) host::before_load(address);
  return __atomic_load_n(reinterpret_cast<uint64_t*>(address), __ATOMIC_ACQUIRE);
}
inline uint64_t load_word_relaxed(uint64_t address) { return load_word_acquire(address); }
inline void store_word(uint64_t address, uint64_t value) {
  host::current->delay();
  host::current->moved();
  // Words only grow: a word that steps back has two writers.
  if (__atomic_load_n(reinterpret_cast<uint64_t*>(address), __ATOMIC_RELAXED) > value) std::abort();
  __atomic_store_n(reinterpret_cast<uint64_t*>(address), value, __ATOMIC_RELEASE);
}
inline uint32_t load_control(uint64_t address) {
  return __atomic_load_n(reinterpret_cast<uint32_t*>(address), __ATOMIC_RELAXED);
}
inline void set_byte(uint64_t address) { __atomic_store_n(reinterpret_cast<uint8_t*>(address), 1, __ATOMIC_RELAXED); }
inline uint32_t claim(uint32_t* counter) { return __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }
inline void tell(uint32_t* counter, uint32_t value) {
  host::current->moved();
  host::current->delay();
  __atomic_store_n(counter, value, __ATOMIC_RELEASE);
}
inline uint32_t told(uint32_t* counter) { return __atomic_load_n(counter, __ATOMIC_ACQUIRE); }

inline uint32_t raise(uint32_t* counter, uint32_t value) {
  host::current->delay();
  uint32_t before = __atomic_load_n(counter, __ATOMIC_ACQUIRE);
  while (before < value && !__atomic_compare_exchange_n(counter, &before, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
  }
  return before;
}
inline uint32_t set_bits(uint32_t* counter, uint32_t bits) {
  host::current->delay();
  return __atomic_fetch_or(counter, bits, __ATOMIC_ACQ_REL);
}

inline void begin_after_previous(bool) {}

#if !defined(HOST_WITHOUT_FENCE)
inline void fence_system() {
  host::current->delay();
  host::Block& block = *host::current->block;
  std::lock_guard<std::mutex> guard(block.in_flight_lock);
  for (const host::Copy& copy : block.in_flight) std::memcpy(copy.to, copy.bytes.data(), copy.bytes.size());
  block.in_flight.clear();
}
#else
// A deliberate fault, to see that the tests find it.
inline void fence_system() {}
#endif

typedef uint64_t Barrier;  // phases that have ended
inline void barrier_make(Barrier* barrier) { *barrier = 0; }
inline void barriers_made() {}
inline void bulk_load(char* stage, const char* from, uint32_t bytes, Barrier* barrier) {
  if (reinterpret_cast<uint64_t>(stage) % 16 || reinterpret_cast<uint64_t>(from) % 16 || bytes % 16) std::abort();
  // The kernel must have waited until earlier stores from this stage had read it.
  for (const host::PendingStore& store : host::current->stores)
    if (store.stage == stage && !store.read) {
      std::fprintf(stderr, "a stage is loaded again before its store has read it\n");
      std::abort();
    }
  host::current->moved();
  host::current->loads.push_back({stage, from, bytes, barrier});
}
inline bool barrier_passed(Barrier* barrier, uint32_t parity) {
  auto& loads = host::current->loads;
  if (!loads.empty() && loads.front().barrier == barrier && host::current->random.below(3) == 0) {
    std::memcpy(loads.front().stage, loads.front().from, loads.front().bytes);
    loads.pop_front();
    ++*barrier;
  }
  return (*barrier & 1) != parity;
}
inline void read_stage(host::PendingStore& store) {
  if (store.read) return;
  store.data.assign(store.stage, store.stage + store.bytes);
  store.read = true;
}
inline void bulk_store(char* to, const char* stage, uint32_t bytes) {
  if (reinterpret_cast<uint64_t>(to) % 16 || bytes % 16 || bytes == 0) std::abort();
  host::current->stores.push_back({to, stage, bytes, false, {}});
  if (host::current->random.below(2)) read_stage(host::current->stores.back());
}
inline void wait_stores(uint32_t left) {
  auto& stores = host::current->stores;
  host::Block& block = *host::current->block;
  while (stores.size() > left) {
    read_stage(stores.front());
    std::lock_guard<std::mutex> guard(block.in_flight_lock);
    block.in_flight.push_back({stores.front().to, std::move(stores.front().data)});
    stores.pop_front();
  }
}
inline void fence_stage() {}
