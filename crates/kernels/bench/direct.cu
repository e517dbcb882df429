// Direct stores: an all-gather whose ranks write into each other's output, a reduce-scatter whose ranks read each other's input, and messages
// that are stored into the receiver's buffer, one way and both ways at once, as windows would let them. Two GPUs of one process, a block's flags for its own part, 20 of a kind in a graph; microseconds each.
//
//   nvcc -O3 -std=c++20 -arch=sm_90 direct.cu -o direct && ./direct
//
// What it lacks: more than two ranks, sizes that are no whole vectors, aborts.
#include <cuda_runtime.h>

#include <algorithm>
#include <barrier>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#define CHECK(call)                                                                     \
  do {                                                                                  \
    const auto code_ = (call);                                                          \
    if (code_) {                                                                        \
      fprintf(stderr, "%s answered %d, line %d\n", #call, (int)code_, __LINE__);        \
      exit(1);                                                                          \
    }                                                                                   \
  } while (0)

constexpr int BLOCKS_MAX = 64, OPERATIONS = 20, BATCHES = 15, UNROLL = 4;

__device__ void tell(uint32_t *flag, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

__device__ void wait_for(const uint32_t *flag, uint32_t value) {
  uint32_t seen;
  do {
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
  } while (static_cast<int32_t>(seen - value) < 0);
}

struct Flags {
  uint32_t *mine, *peers; // the peer writes mine
  uint32_t *count;        // of operations, a block each
};

// Both are here: what the peer reads is written, and what it had of my output is not used any more.
__device__ uint32_t meet(const Flags &flags) {
  __shared__ uint32_t count;
  if (threadIdx.x == 0) {
    count = flags.count[blockIdx.x] + 2;
    tell(flags.peers + blockIdx.x, count - 1);
    wait_for(flags.mine + blockIdx.x, count - 1);
  }
  __syncthreads();
  return count;
}

__device__ void part(const Flags &flags, uint32_t count) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    tell(flags.peers + blockIdx.x, count);
    wait_for(flags.mine + blockIdx.x, count);
    flags.count[blockIdx.x] = count;
  }
}

template <class Each>
__device__ void for_each(size_t vectors, Each each) {
  const size_t step = size_t(gridDim.x) * blockDim.x;
  size_t at = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; at + (UNROLL - 1) * step < vectors; at += UNROLL * step) each(at, step, UNROLL);
  for (; at < vectors; at += step) each(at, step, 1);
}

__global__ void __launch_bounds__(512) gather(Flags flags, const uint4 *in, uint4 *out, uint4 *peers_out, size_t vectors) {
  const uint32_t count = meet(flags);
  for_each(vectors, [&](size_t at, size_t step, int times) {
    uint4 got[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; i++)
      if (i < times) got[i] = in[at + i * step];
#pragma unroll
    for (int i = 0; i < UNROLL; i++)
      if (i < times) {
        peers_out[at + i * step] = got[i];
        out[at + i * step] = got[i];
      }
  });
  part(flags, count);
}

__global__ void __launch_bounds__(512) scatter(Flags flags, const float4 *in, const float4 *peers_in, float4 *out, size_t vectors) {
  const uint32_t count = meet(flags);
  for_each(vectors, [&](size_t at, size_t step, int times) {
    float4 mine[UNROLL], theirs[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; i++)
      if (i < times) {
        theirs[i] = __ldcv(peers_in + at + i * step);
        mine[i] = in[at + i * step];
      }
#pragma unroll
    for (int i = 0; i < UNROLL; i++)
      if (i < times) {
        const float4 a = mine[i], b = theirs[i];
        out[at + i * step] = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
      }
  });
  part(flags, count);
}

// The receiver only says that its buffer may be written, and waits.
__global__ void __launch_bounds__(512) message(Flags flags, const uint4 *in, uint4 *peers_out, size_t vectors, bool sends) {
  const uint32_t count = meet(flags);
  if (sends)
    for_each(vectors, [&](size_t at, size_t step, int times) {
      uint4 got[UNROLL];
#pragma unroll
      for (int i = 0; i < UNROLL; i++)
        if (i < times) got[i] = in[at + i * step];
#pragma unroll
      for (int i = 0; i < UNROLL; i++)
        if (i < times) peers_out[at + i * step] = got[i];
    });
  part(flags, count);
}

enum Kind { ALL_GATHER, REDUCE_SCATTER, ONE_WAY, BOTH_WAYS, KINDS };
const char *const NAMES[] = {"all_gather", "reduce_scatter", "one way", "both ways"};

int main() {
  constexpr size_t MOST = size_t(256) << 20;
  char *in[2], *out[2];
  uint32_t *flags[2], *counts[2];
  cudaStream_t streams[2];
  for (int me = 0; me < 2; me++) {
    CHECK(cudaSetDevice(me));
    CHECK(cudaDeviceEnablePeerAccess(1 - me, 0));
    CHECK(cudaMalloc(&in[me], MOST));
    CHECK(cudaMalloc(&out[me], MOST));
    CHECK(cudaMalloc(&flags[me], BLOCKS_MAX * sizeof(uint32_t)));
    CHECK(cudaMalloc(&counts[me], BLOCKS_MAX * sizeof(uint32_t)));
    CHECK(cudaMemset(flags[me], 0, BLOCKS_MAX * sizeof(uint32_t)));
    CHECK(cudaMemset(counts[me], 0, BLOCKS_MAX * sizeof(uint32_t)));
    std::vector<float> values(MOST / 4);
    for (size_t i = 0; i < values.size(); i++) values[i] = float(i % 1000 + 1000 * me);
    CHECK(cudaMemcpy(in[me], values.data(), MOST, cudaMemcpyHostToDevice));
    CHECK(cudaStreamCreate(&streams[me]));
    CHECK(cudaDeviceSynchronize());
  }
  std::barrier<> together(2);
  auto rank = [&](int me) {
    CHECK(cudaSetDevice(me));
    const int peer = 1 - me;
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    for (int kind = 0; kind < KINDS; kind++)
      for (size_t bytes : {size_t(1) << 10, size_t(64) << 10, size_t(256) << 10, size_t(1) << 20, size_t(4) << 20, size_t(16) << 20, size_t(64) << 20, MOST})
        for (int blocks : {1, 4, 8, 16, 32, 64}) {
          const size_t half = bytes / 2, vectors = half / 16;
          if (size_t(blocks) * 64 > std::max<size_t>(vectors, 64)) continue;
          const Flags mine{flags[me], flags[peer], counts[me]};
          auto issue = [&] {
            if (kind == ONE_WAY || kind == BOTH_WAYS)
              message<<<blocks, 512, 0, streams[me]>>>(mine, (const uint4 *)in[me], (uint4 *)out[peer], bytes / 16, kind == BOTH_WAYS || me == 0);
            else if (kind == ALL_GATHER)
              gather<<<blocks, 512, 0, streams[me]>>>(mine, (const uint4 *)in[me], (uint4 *)(out[me] + me * half),
                                                      (uint4 *)(out[peer] + me * half), vectors);
            else
              scatter<<<blocks, 512, 0, streams[me]>>>(mine, (const float4 *)(in[me] + me * half), (const float4 *)(in[peer] + me * half),
                                                       (float4 *)out[me], vectors);
          };
          CHECK(cudaMemset(out[me], 0, bytes));
          CHECK(cudaDeviceSynchronize());
          together.arrive_and_wait();
          cudaGraph_t graph;
          cudaGraphExec_t replay;
          CHECK(cudaStreamBeginCapture(streams[me], cudaStreamCaptureModeThreadLocal));
          for (int i = 0; i < OPERATIONS; i++) issue();
          CHECK(cudaStreamEndCapture(streams[me], &graph));
          CHECK(cudaGraphInstantiate(&replay, graph, 0));
          std::vector<float> us;
          for (int batch = 0; batch < BATCHES; batch++) {
            CHECK(cudaDeviceSynchronize());
            together.arrive_and_wait();
            issue();
            CHECK(cudaEventRecord(begin, streams[me]));
            CHECK(cudaGraphLaunch(replay, streams[me]));
            CHECK(cudaEventRecord(end, streams[me]));
            CHECK(cudaStreamSynchronize(streams[me]));
            float ms;
            CHECK(cudaEventElapsedTime(&ms, begin, end));
            us.push_back(ms * 1e3f / OPERATIONS);
          }
          CHECK(cudaGraphExecDestroy(replay));
          CHECK(cudaGraphDestroy(graph));
          const bool is_message = kind == ONE_WAY || kind == BOTH_WAYS;
          std::vector<float> got((kind == REDUCE_SCATTER ? half : bytes) / 4);
          CHECK(cudaMemcpy(got.data(), out[me], got.size() * 4, cudaMemcpyDeviceToHost));
          size_t wrong = 0;
          for (size_t i = 0; i < got.size(); i++) {
            const size_t own = i % (half / 4), whose = i / (half / 4), first = me * half / 4 + i;
            const float expected = is_message           ? float(i % 1000 + 1000 * peer)
                                   : kind == ALL_GATHER ? float(own % 1000 + 1000 * whose)
                                                        : float(2 * (first % 1000) + 1000);
            if (kind == ONE_WAY && me == 0) break;
            wrong += got[i] != expected;
          }
          std::sort(us.begin(), us.end());
          if (me == 0 || wrong)
            printf("%-14s %9zu bytes, %2d blocks: %7.2f us, %zu wrong\n", NAMES[kind], bytes, blocks,
                   us[us.size() / 2], wrong);
          fflush(stdout);
          together.arrive_and_wait();
        }
  };
  std::thread other(rank, 1);
  rank(0);
  other.join();
}
