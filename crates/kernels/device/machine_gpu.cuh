// The machine as CUDA has it: thin names over PTX. Everything here is one instruction or two.
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

// Code of what is seldom so stands aside: what runs once a launch is short of instructions, which come from far.
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
// Of the lowest bit that is set; ~0 if none is.
WINDLASS_DEVICE uint32_t first_bit(uint32_t bits) { return (uint32_t)__ffs((int)bits) - 1; }
// Nothing else could use the time of a waiting thread.
WINDLASS_DEVICE void pause_thread() {}

// Vain rounds between two looks at the abort word, which may lie across PCIe.
constexpr uint32_t rounds_between_looks = 1024;
// Vain rounds of a sender without room before it asks the host for a larger ring: some 250 ms. A receiver that comes earlier is
// only late. A multiple of the former.
constexpr uint32_t rounds_before_request = 256 * 1024;

// The user's data: read once, written once, so kept out of L1.
// Volatile, so that no load moves above the wait for the kernel before (begin_after_previous).
WINDLASS_DEVICE Vector load_input(const char* from) {
  Vector v;
  asm volatile("ld.global.L1::no_allocate.v2.u64 {%0,%1},[%2];" : "=l"(v.x), "=l"(v.y) : "l"(from));
  return v;
}
WINDLASS_DEVICE void store_output(char* to, Vector v) {
  asm volatile("st.global.v2.u64 [%0],{%1,%2};" ::"l"(to), "l"(v.x), "l"(v.y) : "memory");
}
// Not by a C++ volatile: in a loop with such a load the compiler puts YIELD, and of threads that have yielded no other waits at the end of
// a branch. So the warp stayed parted after the last bytes of a buffer, and its lines were moved in parts (README.md, "The warp must be together").
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
// A vector by pieces of 4 or of 2 bytes.
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

// Lines. The caller has just called sync_warp: a line is stored, or loaded, by one instruction of the whole warp or not at all
// as a line. One block of assembly, so that nothing that could part the warp comes between.
WINDLASS_DEVICE void store_half(char* to, Vector first, Vector second) {
  asm volatile(
      "st.volatile.global.v2.u64 [%0],{%1,%2};\n\t"
      "st.volatile.global.v2.u64 [%0+512],{%3,%4};" ::"l"(to),
      "l"(first.x), "l"(first.y), "l"(second.x), "l"(second.y)
      : "memory");
}
// `groups` loads in flight at once, then the tags are looked at: true if every line read here carries `tag`.
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

// The same for several peers at once: first all accesses, then all tags are looked at, so that none waits for another. What is not
// to be moved (`so` is the same for the whole warp) is left as it is. Predicates, not branches: after a branch the compiler no
// longer takes the warp for one, and what it makes of sync_warp there does not bring its threads together (seen on H200: payload
// loaded early, its tag late).
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
// Whether this lane has found the tags of the lines that it keeps; if all lanes of the warp have, the payload is there.
template <int groups>
WINDLASS_DEVICE bool found_lines(const Vector (&v)[groups], uint64_t tag) {
  bool there = true;
  WINDLASS_UNROLL
  for (int group = 0; group < groups; ++group) there &= v[group].y == tag;
  return there || (lane_index() & 7) != 7;
}

// LL pairs: 8 bytes of payload and 8 of tag, one access of one thread. Likewise.
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

// `value` becomes `other` if so. A branch would make an indexed array of what is chosen from, in local memory.
WINDLASS_DEVICE void choose(uint64_t& value, uint64_t other, bool so) {
  asm("{.reg .pred p; setp.ne.u32 p,%2,0; @p mov.u64 %0,%1;}" : "+l"(value) : "l"(other), "r"((uint32_t)so));
}

// Arithmetic: rounded to nearest, never two operations as one.
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
// Two at once, the first in the low half. Not one by one: of a 16-bit register the compiler (nvcc 13.0) takes single bytes by
// converting its float to an integer.
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

// Slots of bulk channels. Reads bypass L1, which may hold what the slot had before.
WINDLASS_DEVICE Vector load_slot(const char* from) {
  Vector v;
  asm volatile("ld.global.cg.v2.u64 {%0,%1},[%2];" : "=l"(v.x), "=l"(v.y) : "l"(from) : "memory");
  return v;
}
WINDLASS_DEVICE void store_slot(char* to, Vector v) { store_output(to, v); }

// Words.
// Two words of this side's own, 16-byte aligned.
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
// A counter in shared memory that several raise; what it was before.
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
// The copy engine must see the barriers made.
WINDLASS_DEVICE void barriers_made() { asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async;" ::: "memory"); }
// One arrival that expects `bytes`; the barrier's phase ends when they have come.
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
// A copy of its own group.
WINDLASS_DEVICE void bulk_store(char* to, const char* stage, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0],[%1],%2; cp.async.bulk.commit_group;" ::"l"(to),
               "r"(shared_address(stage)), "r"(bytes)
               : "memory");
}
// At most `left` of the newest copies still unfinished; the instruction wants a constant.
WINDLASS_DEVICE void wait_stores(uint32_t left) {
  switch (left) {
    case 0: asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); break;
    case 1: asm volatile("cp.async.bulk.wait_group 1;" ::: "memory"); break;
    case 2: asm volatile("cp.async.bulk.wait_group 2;" ::: "memory"); break;
    case 3: asm volatile("cp.async.bulk.wait_group 3;" ::: "memory"); break;
    default: asm volatile("cp.async.bulk.wait_group 4;" ::: "memory"); break;
  }
}
// Ordinary writes of this thread to shared memory, before copies of this thread that read them.
WINDLASS_DEVICE void fence_stage() { asm volatile("fence.proxy.async;" ::: "memory"); }
#else
WINDLASS_DEVICE void begin_after_previous(bool) {}
#endif
