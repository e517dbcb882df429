// The operations of machine.cuh in CUDA: thin names over PTX, each of one or a few instructions.
#pragma once
#include <cuda_runtime.h>

#define WINDLASS_DEVICE __device__ __forceinline__
// Inline, so that its name does not depend on the path of the source.
#define WINDLASS_DEVICE_FUNCTION inline __device__ __noinline__
#define WINDLASS_UNROLL _Pragma("unroll")
#define WINDLASS_NO_UNROLL _Pragma("unroll 1")

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define WINDLASS_HAS_BULK_COPIES 1
#else
#define WINDLASS_HAS_BULK_COPIES 0
#endif

// A condition that is rarely true: the compiler places its code apart. Code that runs once a launch waits for its instructions.
#define WINDLASS_SELDOM(condition) __builtin_expect(!!(condition), 0)

WINDLASS_DEVICE uint32_t lane_index() { return threadIdx.x & 31; }
WINDLASS_DEVICE uint32_t warp_index() { return threadIdx.x / 32; }
WINDLASS_DEVICE uint32_t thread_index() { return threadIdx.x; }
WINDLASS_DEVICE uint32_t thread_count() { return blockDim.x; }
WINDLASS_DEVICE uint32_t block_index() { return blockIdx.x; }
WINDLASS_DEVICE uint32_t block_count() { return gridDim.x; }
WINDLASS_DEVICE char* shared_memory() {
  extern __shared__ __align__(128) char shared_bytes[];
  return shared_bytes;
}

WINDLASS_DEVICE void sync_block() { __syncthreads(); }
WINDLASS_DEVICE void sync_warp() { __syncwarp(); }
WINDLASS_DEVICE bool all_of_warp(bool value) { return __all_sync(~0u, value); }
WINDLASS_DEVICE bool any_of_warp(bool value) { return __any_sync(~0u, value); }
WINDLASS_DEVICE uint64_t from_first_lane(uint64_t value) { return __shfl_sync(~0u, (unsigned long long)value, 0); }
WINDLASS_DEVICE uint64_t from_lane(uint64_t value, uint32_t lane) { return __shfl_sync(~0u, (unsigned long long)value, lane); }
WINDLASS_DEVICE uint32_t from_lane(uint32_t value, uint32_t lane) { return __shfl_sync(~0u, value, lane); }
WINDLASS_DEVICE uint32_t ballot_of_warp(bool value) { return __ballot_sync(~0u, value); }
WINDLASS_DEVICE uint32_t bits_set(uint32_t bits) { return (uint32_t)__popc(bits); }
// Index of the lowest set bit; ~0 if none is set.
WINDLASS_DEVICE uint32_t first_bit(uint32_t bits) { return (uint32_t)__ffs((int)bits) - 1; }
// Empty: nothing else could use the time of a waiting thread.
WINDLASS_DEVICE void pause_thread() {}

// Unsuccessful polls between two reads of the abort word, which may lie across PCIe.
constexpr uint32_t rounds_between_looks = 1024;
// Unsuccessful polls of a sender without room before it asks the host for a larger ring: some 250 ms. A receiver that comes
// earlier is only late. A multiple of rounds_between_looks.
constexpr uint32_t rounds_before_request = 256 * 1024;

// User data is read once, so loads do not allocate in L1. The assembly is volatile, so that the compiler moves no load above
// begin_after_previous, the wait for the kernel before.
WINDLASS_DEVICE Vector load_input(const char* from) {
  Vector v;
  asm volatile("ld.global.L1::no_allocate.v2.u64 {%0,%1},[%2];" : "=l"(v.x), "=l"(v.y) : "l"(from));
  return v;
}
WINDLASS_DEVICE void store_output(char* to, Vector v) {
  asm volatile("st.global.v2.u64 [%0],{%1,%2};" ::"l"(to), "l"(v.x), "l"(v.y) : "memory");
}
// PTX, not a C++ volatile: into a loop with a volatile load the compiler puts YIELD, and at the end of a branch no thread waits for threads that have
// yielded. So the warp stayed diverged after the last bytes of a buffer, and moved its lines in parts (README.md, "The warp must be together").
template <class Piece>
WINDLASS_DEVICE Piece load_piece(const char* from) {
  if constexpr (sizeof(Piece) == 8) {
    uint64_t piece;
    asm volatile("ld.global.L1::no_allocate.u64 %0,[%1];" : "=l"(piece) : "l"(from));
    return (Piece)piece;
  } else {
    uint32_t piece;
    if constexpr (sizeof(Piece) == 4) asm volatile("ld.global.L1::no_allocate.u32 %0,[%1];" : "=r"(piece) : "l"(from));
    if constexpr (sizeof(Piece) == 2) asm volatile("ld.global.L1::no_allocate.u16 %0,[%1];" : "=r"(piece) : "l"(from));
    if constexpr (sizeof(Piece) == 1) asm volatile("ld.global.L1::no_allocate.u8 %0,[%1];" : "=r"(piece) : "l"(from));
    return (Piece)piece;
  }
}
// Loads a vector by pieces of 4 or of 2 bytes.
template <class Piece>
WINDLASS_DEVICE Vector load_vector_by(const char* from) {
  Vector v;
  if constexpr (sizeof(Piece) == 4)
    asm volatile(
        "{.reg .b32 p<4>;\n\t"
        "ld.global.L1::no_allocate.u32 p0,[%2];\n\t"
        "ld.global.L1::no_allocate.u32 p1,[%2+4];\n\t"
        "ld.global.L1::no_allocate.u32 p2,[%2+8];\n\t"
        "ld.global.L1::no_allocate.u32 p3,[%2+12];\n\t"
        "mov.b64 %0,{p0,p1};\n\t"
        "mov.b64 %1,{p2,p3};}"
        : "=l"(v.x), "=l"(v.y)
        : "l"(from));
  else
    asm volatile(
        "{.reg .b16 p<8>;\n\t"
        "ld.global.L1::no_allocate.b16 p0,[%2];\n\t"
        "ld.global.L1::no_allocate.b16 p1,[%2+2];\n\t"
        "ld.global.L1::no_allocate.b16 p2,[%2+4];\n\t"
        "ld.global.L1::no_allocate.b16 p3,[%2+6];\n\t"
        "ld.global.L1::no_allocate.b16 p4,[%2+8];\n\t"
        "ld.global.L1::no_allocate.b16 p5,[%2+10];\n\t"
        "ld.global.L1::no_allocate.b16 p6,[%2+12];\n\t"
        "ld.global.L1::no_allocate.b16 p7,[%2+14];\n\t"
        "mov.b64 %0,{p0,p1,p2,p3};\n\t"
        "mov.b64 %1,{p4,p5,p6,p7};}"
        : "=l"(v.x), "=l"(v.y)
        : "l"(from));
  return v;
}
template <class Piece>
WINDLASS_DEVICE void store_piece(char* to, Piece piece) {
  *reinterpret_cast<volatile Piece*>(to) = piece;
}

// Lines. Call these directly after sync_warp: only one instruction of the whole warp stores or loads a line as a unit (A1).
// One block of assembly, so that nothing that could make the warp diverge comes between.
WINDLASS_DEVICE void store_half(char* to, Vector first, Vector second) {
  asm volatile(
      "st.volatile.global.v2.u64 [%0],{%1,%2};\n\t"
      "st.volatile.global.v2.u64 [%0+512],{%3,%4};" ::"l"(to),
      "l"(first.x), "l"(first.y), "l"(second.x), "l"(second.y)
      : "memory");
}
// Issues `groups` loads, then compares the tags. True, in the whole warp, if every line read here carries `tag`.
template <int groups>
WINDLASS_DEVICE bool load_lines(Vector* v, const char* from, uint64_t tag) {
  if (groups == 4)
    asm volatile(
        "ld.volatile.global.v2.u64 {%0,%1},[%8];\n\t"
        "ld.volatile.global.v2.u64 {%2,%3},[%8+512];\n\t"
        "ld.volatile.global.v2.u64 {%4,%5},[%8+1024];\n\t"
        "ld.volatile.global.v2.u64 {%6,%7},[%8+1536];"
        : "=&l"(v[0].x), "=&l"(v[0].y), "=&l"(v[1].x), "=&l"(v[1].y), "=&l"(v[2].x), "=&l"(v[2].y), "=&l"(v[3].x),
          "=&l"(v[3].y)
        : "l"(from)
        : "memory");
  else
    asm volatile(
        "ld.volatile.global.v2.u64 {%0,%1},[%4];\n\t"
        "ld.volatile.global.v2.u64 {%2,%3},[%4+512];"
        : "=&l"(v[0].x), "=&l"(v[0].y), "=&l"(v[1].x), "=&l"(v[1].y)
        : "l"(from)
        : "memory");
  bool there = true;
  if ((lane_index() & 7) == 7) {
    WINDLASS_UNROLL
    for (int group = 0; group < groups; ++group) there &= v[group].y == tag;
  }
  return all_of_warp(there);
}

// The same for several peers at once. The caller issues the accesses of all peers before it compares any tag, so that no peer's loads
// wait for another's. If `so` (equal in the whole warp) is false, nothing moves and `v` keeps its value. Predicates, not branches: after a
// branch the compiler no longer takes the warp for converged, and its code for sync_warp there does not reconverge the threads
// (seen on H200: payload loaded early, its tag late).
WINDLASS_DEVICE void store_half_if(bool so, char* to, Vector first, Vector second) {
  asm volatile(
      "{.reg .pred p; setp.ne.u32 p,%5,0;\n\t"
      "@p st.volatile.global.v2.u64 [%0],{%1,%2};\n\t"
      "@p st.volatile.global.v2.u64 [%0+512],{%3,%4};}" ::"l"(to),
      "l"(first.x), "l"(first.y), "l"(second.x), "l"(second.y), "r"((uint32_t)so)
      : "memory");
}
template <int groups>
WINDLASS_DEVICE void load_lines_if(bool so, Vector (&v)[groups], const char* from, uint64_t) {
  static_assert(groups == 2 || groups == 4, "groups");
  if constexpr (groups == 2)
    asm volatile(
        "{.reg .pred p; setp.ne.u32 p,%5,0;\n\t"
        "@p ld.volatile.global.v2.u64 {%0,%1},[%4];\n\t"
        "@p ld.volatile.global.v2.u64 {%2,%3},[%4+512];}"
        : "+l"(v[0].x), "+l"(v[0].y), "+l"(v[1].x), "+l"(v[1].y)
        : "l"(from), "r"((uint32_t)so)
        : "memory");
  else
    asm volatile(
        "{.reg .pred p; setp.ne.u32 p,%9,0;\n\t"
        "@p ld.volatile.global.v2.u64 {%0,%1},[%8];\n\t"
        "@p ld.volatile.global.v2.u64 {%2,%3},[%8+512];\n\t"
        "@p ld.volatile.global.v2.u64 {%4,%5},[%8+1024];\n\t"
        "@p ld.volatile.global.v2.u64 {%6,%7},[%8+1536];}"
        : "+l"(v[0].x), "+l"(v[0].y), "+l"(v[1].x), "+l"(v[1].y), "+l"(v[2].x), "+l"(v[2].y), "+l"(v[3].x), "+l"(v[3].y)
        : "l"(from), "r"((uint32_t)so)
        : "memory");
}
// Whether the lines that this lane keeps carry `tag`; true for lanes that keep none. If true in all lanes, the payload is there.
template <int groups>
WINDLASS_DEVICE bool found_lines(const Vector (&v)[groups], uint64_t tag) {
  bool there = true;
  WINDLASS_UNROLL
  for (int group = 0; group < groups; ++group) there &= v[group].y == tag;
  return there || (lane_index() & 7) != 7;
}

// LL pairs: 8 bytes of payload and 8 of tag, in one access of one thread. If `so` is false nothing moves; it may differ by thread.
WINDLASS_DEVICE void store_ll_if(bool so, char* to, uint64_t payload, uint64_t tag) {
  asm volatile("{.reg .pred p; setp.ne.u32 p,%3,0; @p st.volatile.global.v2.u64 [%0],{%1,%2};}" ::"l"(to), "l"(payload), "l"(tag),
               "r"((uint32_t)so)
               : "memory");
}
WINDLASS_DEVICE void load_ll_if(bool so, const char* from, uint64_t, uint64_t& payload, uint64_t& found) {
  asm volatile("{.reg .pred p; setp.ne.u32 p,%3,0; @p ld.volatile.global.v2.u64 {%0,%1},[%2];}"
               : "+l"(payload), "+l"(found)
               : "l"(from), "r"((uint32_t)so)
               : "memory");
}

// `value` becomes `other` if `so`. With a branch the compiler would keep the choices as an indexed array in local memory.
WINDLASS_DEVICE void choose(uint64_t& value, uint64_t other, bool so) {
  asm("{.reg .pred p; setp.ne.u32 p,%2,0; @p mov.u64 %0,%1;}" : "+l"(value) : "l"(other), "r"((uint32_t)so));
}

// Arithmetic: rounded to nearest, never contracted to a fused multiply-add.
WINDLASS_DEVICE float add_floats(float a, float b) { return __fadd_rn(a, b); }
WINDLASS_DEVICE float multiply_floats(float a, float b) { return __fmul_rn(a, b); }
WINDLASS_DEVICE double add_doubles(double a, double b) { return __dadd_rn(a, b); }
WINDLASS_DEVICE double multiply_doubles(double a, double b) { return __dmul_rn(a, b); }
// A NaN loses against a number; +0 is above -0.
WINDLASS_DEVICE float max_floats(float a, float b) { return fmaxf(a, b); }
WINDLASS_DEVICE float min_floats(float a, float b) { return fminf(a, b); }
WINDLASS_DEVICE double max_doubles(double a, double b) { return fmax(a, b); }
WINDLASS_DEVICE double min_doubles(double a, double b) { return fmin(a, b); }
WINDLASS_DEVICE float float_of_bits(uint32_t bits) { return __uint_as_float(bits); }
WINDLASS_DEVICE uint32_t bits_of_float(float value) { return __float_as_uint(value); }
WINDLASS_DEVICE double double_of_bits(uint64_t bits) { return __longlong_as_double((long long)bits); }
WINDLASS_DEVICE uint64_t bits_of_double(double value) { return (uint64_t)__double_as_longlong(value); }
WINDLASS_DEVICE float float_of_half(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0,%1;" : "=f"(value) : "h"(bits));
  return value;
}
// Converts two floats at once, the first into the low half. Not one by one: from a 16-bit register the compiler (nvcc 13.0)
// takes single bytes by converting its float to an integer.
WINDLASS_DEVICE uint32_t halves_of_floats(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
WINDLASS_DEVICE uint32_t bfloats_of_floats(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

// Add two elements each, and round once.
WINDLASS_DEVICE uint32_t add_halves(uint32_t a, uint32_t b) {
  uint32_t sum;
  asm("add.rn.f16x2 %0,%1,%2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}
WINDLASS_DEVICE uint32_t add_bfloats(uint32_t a, uint32_t b) {
  uint32_t sum;
  // GPUs of 8.0 have no addition. A factor of one changes nothing.
  asm("fma.rn.bf16x2 %0,%1,%2,%3;" : "=r"(sum) : "r"(a), "r"(0x3f803f80), "r"(b));
  return sum;
}

// Slots of bulk channels and of Simple. Loads bypass L1, which may hold the slot's earlier content.
WINDLASS_DEVICE Vector load_slot(const char* from) {
  Vector v;
  asm volatile("ld.global.cg.v2.u64 {%0,%1},[%2];" : "=l"(v.x), "=l"(v.y) : "l"(from) : "memory");
  return v;
}
WINDLASS_DEVICE void store_slot(char* to, Vector v) { store_output(to, v); }

// Words. First two neighbouring words that only this rank uses, 16-byte aligned, by one access.
WINDLASS_DEVICE Vector load_own_words(uint64_t address) {
  Vector v;
  asm volatile("ld.volatile.global.v2.u64 {%0,%1},[%2];" : "=l"(v.x), "=l"(v.y) : "l"(address) : "memory");
  return v;
}
WINDLASS_DEVICE void store_own_words(uint64_t address, Vector v) {
  asm volatile("st.volatile.global.v2.u64 [%0],{%1,%2};" ::"l"(address), "l"(v.x), "l"(v.y) : "memory");
}
WINDLASS_DEVICE uint64_t load_word_relaxed(uint64_t address) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0,[%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}
WINDLASS_DEVICE uint64_t load_word_acquire(uint64_t address) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0,[%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}
WINDLASS_DEVICE void store_word(uint64_t address, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0],%1;" ::"l"(address), "l"(value) : "memory");
}
WINDLASS_DEVICE uint32_t load_control(uint64_t address) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0,[%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
WINDLASS_DEVICE void set_byte(uint64_t address) { *reinterpret_cast<volatile uint8_t*>(address) = 1; }
WINDLASS_DEVICE uint32_t claim(uint32_t* counter) { return atomicAdd(counter, 1); }
WINDLASS_DEVICE void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

WINDLASS_DEVICE uint32_t shared_address(const void* pointer) { return (uint32_t)__cvta_generic_to_shared(pointer); }
WINDLASS_DEVICE void tell(uint32_t* counter, uint32_t value) {
  asm volatile("st.release.cta.shared.u32 [%0],%1;" ::"r"(shared_address(counter)), "r"(value) : "memory");
}
WINDLASS_DEVICE uint32_t told(uint32_t* counter) {
  uint32_t value;
  asm volatile("ld.acquire.cta.shared.u32 %0,[%1];" : "=r"(value) : "r"(shared_address(counter)) : "memory");
  return value;
}
// Raises a counter in shared memory to at least `value` and returns its value before. Several threads may call it at once.
WINDLASS_DEVICE uint32_t raise(uint32_t* counter, uint32_t value) {
  uint32_t before;
  asm volatile("atom.acq_rel.cta.shared.max.u32 %0,[%1],%2;" : "=r"(before) : "r"(shared_address(counter)), "r"(value) : "memory");
  return before;
}
WINDLASS_DEVICE uint32_t set_bits(uint32_t* counter, uint32_t bits) {
  uint32_t before;
  asm volatile("atom.acq_rel.cta.shared.or.b32 %0,[%1],%2;" : "=r"(before) : "r"(shared_address(counter)), "r"(bits) : "memory");
  return before;
}

#if WINDLASS_HAS_BULK_COPIES
typedef uint64_t Barrier;

WINDLASS_DEVICE void begin_after_previous(bool let_next_begin) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (let_next_begin) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
WINDLASS_DEVICE void barrier_make(Barrier* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0],1;" ::"r"(shared_address(barrier)) : "memory");
}
// Makes the initialised barriers visible to the asynchronous copies, which complete on them.
WINDLASS_DEVICE void barriers_made() { asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async;" ::: "memory"); }
// Arrives once at the barrier, expecting `bytes`, and starts the load; the barrier's phase ends when they have arrived.
WINDLASS_DEVICE void bulk_load(char* stage, const char* from, uint32_t bytes, Barrier* barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
  if (bytes)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(
                     shared_address(stage)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}
WINDLASS_DEVICE bool barrier_passed(Barrier* barrier, uint32_t parity) {
  uint32_t passed;
  asm volatile(
      "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p,[%1],%2; selp.u32 %0,1,0,p;}"
      : "=r"(passed)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return passed;
}
// Starts a copy and commits it as a bulk group of its own.
WINDLASS_DEVICE void bulk_store(char* to, const char* stage, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0],[%1],%2; cp.async.bulk.commit_group;" ::"l"(to),
               "r"(shared_address(stage)), "r"(bytes)
               : "memory");
}
// Waits until at most the `left` newest copies are unfinished; the instruction wants a constant.
WINDLASS_DEVICE void wait_stores(uint32_t left) {
  switch (left) {
    case 0: asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); break;
    case 1: asm volatile("cp.async.bulk.wait_group 1;" ::: "memory"); break;
    case 2: asm volatile("cp.async.bulk.wait_group 2;" ::: "memory"); break;
    case 3: asm volatile("cp.async.bulk.wait_group 3;" ::: "memory"); break;
    default: asm volatile("cp.async.bulk.wait_group 4;" ::: "memory"); break;
  }
}
// Orders this thread's ordinary writes to shared memory before its later bulk copies that read them.
WINDLASS_DEVICE void fence_stage() { asm volatile("fence.proxy.async;" ::: "memory"); }
#else
WINDLASS_DEVICE void begin_after_previous(bool) {}
#endif
