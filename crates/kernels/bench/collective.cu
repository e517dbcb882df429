// Collectives on GPUs: verifies random sequences bitwise, then times every wire against NCCL in the same run. One process, a thread a
// GPU, peers' memory by peer access. The kernels are the committed ones (scripts/kernels --unpack), loaded as the product does.
//
//   nvcc -arch=sm_90 -std=c++17 -O3 collective.cu -o collective -ldl -lpthread -lcuda
//   collective IMAGE [SECONDS_OF_VERIFICATION] [SEED] [RANKS]       NCCL_LIBRARY: path of libnccl.so.2; none: NCCL is not timed
//
// Prints the result first, then tables in microseconds.
#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "../device/p2p.h"
#include "../host/collective_arrange.h"

using namespace collective;
#define CU(call)                                                                          \
  do {                                                                                    \
    const auto error_ = (call);                                                           \
    if ((int)error_) {                                                                    \
      fprintf(stderr, "line %d: %s: error %d\n", __LINE__, #call, (int)error_);           \
      _Exit(1);                                                                           \
    }                                                                                     \
  } while (0)

static int ranks;
static std::atomic<int> arrived{0}, generation{0};
static void barrier() {
  const int before = generation;
  if (++arrived == ranks) {
    arrived = 0;
    ++generation;
  } else {
    while (generation == before) std::this_thread::yield();
  }
}
struct Random {
  uint64_t state;
  uint64_t next() {
    uint64_t z = state += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
  }
  uint64_t below(uint64_t limit) { return next() % limit; }
};

// --- data: what rank r's element i of operation id is ------------------------------------------------------------------------------
enum { bytes_of_any = 1, int_type = 2, float_type = 7, bfloat_type = 9 };
__device__ uint64_t noise(uint64_t id, int rank, uint64_t i) {
  uint64_t z = (id * 8 + rank) * 0x9e3779b97f4a7c15ull + i * 0xd1b54a32d192ed03ull;
  z = (z ^ z >> 29) * 0xbf58476d1ce4e5b9ull;
  return z ^ z >> 32;
}
__device__ uint32_t bfloat(float value) {
  const uint32_t bits = __float_as_uint(value);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
__device__ float as_float(uint64_t noise) { return (float)(int32_t)noise * 4.6566129e-10f; }
__device__ uint32_t element(uint64_t id, int rank, uint64_t i, int type) {
  const uint64_t z = noise(id, rank, i);
  switch (type) {
    case float_type: return __float_as_uint(as_float(z));
    case bfloat_type: return bfloat(as_float(z));
    case int_type: return (uint32_t)z;
    default: return (uint8_t)z;
  }
}
__device__ void put(char* at, uint32_t value, int size) {
  for (int b = 0; b < size; ++b) at[b] = (char)(value >> 8 * b);
}
__device__ uint32_t get(const char* at, int size) {
  uint32_t value = 0;
  for (int b = 0; b < size; ++b) value |= (uint32_t)(uint8_t)at[b] << 8 * b;
  return value;
}
// Where a part of a result was wrong.
struct Found {
  unsigned long long first, last, count;
  uint32_t here, right;
};
__global__ void fill(char* data, uint64_t count, uint64_t id, int rank, int type, int size) {
  for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < count; i += (uint64_t)gridDim.x * blockDim.x)
    put(data + i * size, element(id, rank, i, type), size);
}
// Element i of the result is of all ranks' element first + i (reduced), or of rank source's.
__global__ void check(const char* data, uint64_t count, uint64_t id, int source, uint64_t first, int type, int size, int by, int ranks, unsigned long long* bad, Found* found) {
  for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < count; i += (uint64_t)gridDim.x * blockDim.x) {
    uint32_t right;
    if (source >= 0) {
      right = element(id, source, first + i, type);
    } else if (type == int_type) {
      int32_t sum = (int32_t)element(id, 0, first + i, type);
      for (int r = 1; r < ranks; ++r) {
        const int32_t x = (int32_t)element(id, r, first + i, type);
        sum = by == 2 ? max(sum, x) : (int32_t)((uint32_t)sum + (uint32_t)x);
      }
      right = (uint32_t)(by == 4 ? sum / ranks : sum);
    } else {
      const float scale = by == 4 ? (float)(1.0 / ranks) : 1.0f;
      float sum = 0;
      for (int r = 0; r < ranks; ++r) {
        const uint32_t bits = element(id, r, first + i, type);
        const float x = __fmul_rn(type == float_type ? __uint_as_float(bits) : __uint_as_float(bits << 16), scale);
        sum = r ? __fadd_rn(sum, x) : x;
      }
      right = type == float_type ? __float_as_uint(sum) : bfloat(sum);
    }
    const uint32_t here = get(data + i * size, size);
    if (here == right) continue;
    atomicAdd(bad, 1ull);
    const unsigned long long before = atomicMin(&found->first, i);
    atomicMax(&found->last, i);
    atomicAdd(&found->count, 1ull);
    if (before > i) found->here = here, found->right = right;
  }
}
__global__ void check_margin(const char* data, unsigned long long* bad) {
  if (data[threadIdx.x] != (char)0xa5) atomicAdd(bad, 1ull);
}
__global__ void linger(long long nanoseconds) {
  long long start, now;
  asm volatile("mov.u64 %0,%globaltimer;" : "=l"(start));
  do asm volatile("mov.u64 %0,%globaltimer;" : "=l"(now));
  while (now - start < nanoseconds);
}

// --- one rank ------------------------------------------------------------------------------------------------------------------------
constexpr uint32_t channels_all = 256;
static uint32_t slots_all() { return getenv("SLOTS") ? atoi(getenv("SLOTS")) : ranks <= 4 ? 8 : 4; }
static uint64_t regions[8];
static std::vector<char> image;
struct NcclApi {
  int (*InitAll)(void**, int, const int*);
  int (*AllReduce)(const void*, void*, size_t, int, int, void*, cudaStream_t);
  int (*Broadcast)(const void*, void*, size_t, int, int, void*, cudaStream_t);
  int (*Reduce)(const void*, void*, size_t, int, int, int, void*, cudaStream_t);
  int (*AllGather)(const void*, void*, size_t, int, void*, cudaStream_t);
  int (*ReduceScatter)(const void*, void*, size_t, int, int, void*, cudaStream_t);
  int (*AlltoAll)(const void*, void*, size_t, int, void*, cudaStream_t);
};
static NcclApi nccl;
static void* comms[8];
static double results[8];

struct Grid {
  uint32_t blocks, warps, cluster;
};
static Grid grid_of(Family family, uint32_t channels, uint32_t blocks_max, uint32_t warps_max) {
  Grid grid;
  const uint32_t per_block = family == ll ? getenv("LL_WARPS") ? atoi(getenv("LL_WARPS")) : 4 : 1;
  grid.blocks = std::min(blocks_max, (channels + per_block - 1) / per_block);
  if (grid.blocks > 4 && blocks_max >= 4) grid.blocks = std::min(blocks_max, (grid.blocks + 3) / 4 * 4);
  grid.warps = std::min(warps_max, (channels + grid.blocks - 1) / grid.blocks);
  grid.cluster = grid.blocks % 4 == 0 && !getenv("NO_CLUSTER") ? 4 : 1;
  return grid;
}

struct Rank {
  int rank;
  cudaStream_t stream;
  CUmodule module;
  uint32_t* control;
  char *input, *output;
  unsigned long long* bad;
  Found* found;
  size_t space = 160ull << 20;
  Geometry geometry;

  const char* reducer(const Request& request) {
    if (request.kind == broadcast || request.kind == all_gather || request.kind == all_to_all) return "Copy";
    if (request.by == 0 || request.by == 4) {
      if (request.type == float_type) return "SumF32";
      if (request.type == bfloat_type) return "SumBf16";
      if (request.type == 6) return "SumF16";
    }
    return "Any";
  }
  void launch(const Request& request, const Choice& choice, bool early, uint32_t blocks_max = 32, uint32_t warps_max = 8) {
    WindlassCollectiveLaunch launch = arrange(request, geometry, choice);
    if (!launch.used_channels) return;
    std::copy(regions, regions + 8, launch.regions);
    launch.control = (uint64_t)control;
    if (choice.family == simple_two_phases) warps_max = std::min(warps_max, 4u);
    const Grid grid = grid_of(choice.family, launch.used_channels, blocks_max, warps_max);
    launch.role_warps = grid.warps;
    if (early) launch.flags |= WINDLASS_COLLECTIVE_EARLY_NEXT;
    char name[80];
    const int kernel_ranks = ranks <= 2 ? 2 : ranks <= 4 ? 4 : 8;
    const char* const suffix = straight(launch, choice) ? "_whole" : "";
    if (choice.family == ll) snprintf(name, sizeof name, "ncclWindlass_LL_%s_%d%s", reducer(request), kernel_ranks, suffix);
    else if (choice.family == ll128) snprintf(name, sizeof name, "ncclWindlass_LL128x%d_%s_%d%s", choice.groups, reducer(request), kernel_ranks, suffix);
    else snprintf(name, sizeof name, "ncclWindlass_%s_%s_%d%s", choice.family == two_phases ? "AllReduce" : choice.family == simple ? "Simple" : "SimpleAllReduce", reducer(request), kernel_ranks, suffix);
    CUfunction function;
    CU(cuModuleGetFunction(&function, module, name));
    CUlaunchAttribute attributes[3];
    unsigned count = 0;
    attributes[count].id = CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN;
    attributes[count++].value.memSyncDomain = CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE;
    if (grid.cluster > 1) {
      attributes[count].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
      attributes[count].value.clusterDim.x = grid.cluster;
      attributes[count].value.clusterDim.y = attributes[count].value.clusterDim.z = 1;
      ++count;
    }
    if (early) {
      attributes[count].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
      attributes[count++].value.programmaticStreamSerializationAllowed = 1;
    }
    CUlaunchConfig config{};
    config.gridDimX = grid.blocks;
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
    config.blockDimX = threads(choice.family, grid.warps);
    config.sharedMemBytes = shared_bytes(choice.family);
    config.hStream = stream;
    config.attrs = attributes;
    config.numAttrs = count;
    void* parameters[] = {&launch};
    CU(cuLaunchKernelEx(&config, function, parameters, nullptr));
  }
  void by_nccl(const Request& request) {
    void* const comm = comms[rank];
    const void* in = (void*)request.send;
    void* out = (void*)request.receive;
    switch (request.kind) {
      case all_reduce: CU(nccl.AllReduce(in, out, request.count, request.type, request.by, comm, stream)); break;
      case broadcast: CU(nccl.Broadcast(in, out, request.count, request.type, request.root, comm, stream)); break;
      case reduce: CU(nccl.Reduce(in, out, request.count, request.type, request.by, request.root, comm, stream)); break;
      case all_gather: CU(nccl.AllGather(in, out, request.count, request.type, comm, stream)); break;
      case reduce_scatter: CU(nccl.ReduceScatter(in, out, request.count, request.type, request.by, comm, stream)); break;
      case all_to_all: CU(nccl.AlltoAll(in, out, request.count, request.type, comm, stream)); break;
    }
  }

  void verify(double seconds, uint64_t seed);
  double time(bool graph, const std::function<void()>& one);
  void table(bool graph);
};

static std::atomic<bool> over;
void Rank::verify(double seconds, uint64_t seed) {
  Random random{seed}, own{seed * 31 + rank};
  const auto began = std::chrono::steady_clock::now();
  uint64_t operations = 0, before_bad = 0, told = 0;
  std::vector<std::string> did(64 * 8);
  uint64_t part = 0;
  for (;; ++operations) {
    if (operations % 64 == 0) {
      unsigned long long now = 0;
      CU(cudaMemcpyAsync(&now, bad, 8, cudaMemcpyDeviceToHost, stream));
      CU(cudaStreamSynchronize(stream));
      if (now != before_bad && told < 12) {
        std::vector<Found> all(64 * 8);
        CU(cudaMemcpy(all.data(), found, all.size() * sizeof(Found), cudaMemcpyDeviceToHost));
        for (uint64_t i = 0; i < part && told < 12; ++i)
          if (all[i].count && ++told)
            printf("rank %d: %s: %llu wrong, %llu to %llu, found %08x, right %08x\n", rank, did[i].c_str(), all[i].count, all[i].first, all[i].last, all[i].here, all[i].right);
        fflush(stdout);
      }
      before_bad = now;
      part = 0;
      Found none{~0ull, 0, 0, 0, 0};
      std::vector<Found> nothing(64 * 8, none);
      CU(cudaMemcpyAsync(found, nothing.data(), nothing.size() * sizeof none, cudaMemcpyHostToDevice, stream));
      CU(cudaStreamSynchronize(stream));
      barrier();
      if (rank == 0) over = std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count() > seconds;
      barrier();
      if (over) break;
    }
    Request request{};
    request.kind = (Kind)random.below(kinds);
    const int types[] = {bytes_of_any, int_type, float_type, bfloat_type};
    const bool reduces = request.kind == all_reduce || request.kind == reduce || request.kind == reduce_scatter;
    request.type = types[reduces ? 1 + random.below(3) : random.below(4)];
    request.element_bytes = request.type == bytes_of_any ? 1 : request.type == bfloat_type ? 2 : 4;
    const int bys[] = {0, 0, 4, 2};
    request.by = request.type == int_type ? bys[random.below(4)] : bys[random.below(3)];
    request.root = (uint32_t)random.below(ranks);
    const uint64_t scale = random.below(20);
    request.count = 1 + random.below(1ull << scale) + (random.below(40) == 0 ? random.below(8 << 20) / request.element_bytes : 0);
    Choice choice{ll, 0};
    const uint32_t any = (uint32_t)random.below(request.kind == all_reduce ? 4 : 3);
    switch (any ? any : !goes_by_ll(request.kind, request.count * request.element_bytes, channels_all)) {
      case 1: choice = {ll128, 2}; break;
      case 2: choice = {ll128, ranks > 4 ? 2u : 4u}; break;
      case 3: choice = {two_phases, 2}; break;
    }
    const bool can_post = ranks <= 4 && (request.type == float_type || request.type == bfloat_type) && (request.by == 0 || request.by == 4);
    // All-reduce in one step: only over LL, which send and reduce in one warp.
    if (request.kind == all_reduce && choice.family == ll128) choice = {two_phases, 2};
    if (can_post && random.below(3) == 0) {
      if (request.kind == reduce_scatter) choice = {simple, 4};
      if (request.kind == all_reduce) choice = {simple_two_phases, 4};
    }
    const bool in_place = random.below(2), early = random.below(2) && !getenv("NO_EARLY");
    const uint64_t id = operations + 1;
    const int size = request.element_bytes;
    const uint64_t parts_in = request.kind == reduce_scatter || request.kind == all_to_all ? ranks : 1;
    const uint64_t parts_out = request.kind == all_gather || request.kind == all_to_all ? ranks : 1;
    const uint64_t shift_in = own.below(3) ? 0 : own.below(16) * size, shift_out = own.below(3) ? 0 : own.below(16) * size;
    char* in = input + 64 + shift_in;
    char* out = output + 64 + shift_out;
    if (in_place && request.kind != all_to_all) {
      if (request.kind == all_gather) in = out + rank * request.count * size;
      else if (request.kind == reduce_scatter) out = in + rank * request.count * size;
      else in = out;
    }
    request.send = (uint64_t)in, request.receive = (uint64_t)out;
    const uint64_t out_bytes = parts_out * request.count * size;
    const bool margins = in != out && !(in_place && request.kind == all_gather) && !(in_place && request.kind == reduce_scatter);
    if (margins) {
      CU(cudaMemsetAsync(out - 32, 0xa5, 32, stream));
      CU(cudaMemsetAsync(out + out_bytes, 0xa5, 32, stream));
    }
    fill<<<32, 256, 0, stream>>>(in, parts_in * request.count, id, rank, request.type, size);
    if (own.below(30) == 0) linger<<<1, 1, 0, stream>>>(own.below(200000));
    const uint32_t all_blocks[] = {1, 3, 8, 16, 32, 32, 32}, all_warps[] = {1, 3, 8, 8, 8};
    const uint32_t blocks = all_blocks[own.below(7)], warps = all_warps[own.below(5)];
    launch(request, choice, early, blocks, warps);
    const auto verify_result = [&](const char* at, int source, uint64_t first) {
      char words[200];
      snprintf(words, sizeof words, "%llu %s of %llu x %d type %d by %d, %s%d, root %d, in place %d, early %d, in +%llu, out +%llu, blocks %u warps %u, from %d",
               (unsigned long long)operations, kind_names[request.kind], (unsigned long long)request.count, size, request.type, request.by,
               choice.family == ll ? "LL" : choice.family == ll128 ? "LL128" : choice.family == two_phases ? "phases" : "Simple", choice.groups, request.root, in_place, early,
               (unsigned long long)((uint64_t)in % 16), (unsigned long long)((uint64_t)out % 16), blocks, warps, source);
      did[part] = words;
      check<<<32, 256, 0, stream>>>(at, request.count, id, source, first, request.type, size, request.by, ranks, bad, found + part++);
    };
    switch (request.kind) {
      case all_reduce: verify_result(out, -1, 0); break;
      case broadcast: verify_result(out, request.root, 0); break;
      case reduce: if (rank == (int)request.root) verify_result(out, -1, 0); break;
      case reduce_scatter: verify_result(out, -1, rank * request.count); break;
      case all_gather:
        for (int r = 0; r < ranks; ++r) verify_result(out + r * request.count * size, r, 0);
        break;
      case all_to_all:
        for (int r = 0; r < ranks; ++r) verify_result(out + r * request.count * size, r, rank * request.count);
        break;
    }
    if (margins && (request.kind != reduce || rank == (int)request.root)) {
      check_margin<<<1, 32, 0, stream>>>(out - 32, bad);
      check_margin<<<1, 32, 0, stream>>>(out + out_bytes, bad);
    }
  }
  results[rank] = (double)before_bad;
  barrier();
  if (rank == 0) {
    double all = 0;
    for (int r = 0; r < ranks; ++r) all += results[r];
    printf("verified %llu operations, seed %llu: %.0f wrong elements\n", (unsigned long long)operations, (unsigned long long)seed, all);
    fflush(stdout);
  }
  barrier();
}

// Microseconds of one, the greatest of all ranks; the median of several.
double Rank::time(bool graph, const std::function<void()>& one) {
  constexpr int inner = 40, outer = 7;
  cudaEvent_t from, to;
  CU(cudaEventCreate(&from));
  CU(cudaEventCreate(&to));
  cudaGraphExec_t exec = nullptr;
  // What is set up at the first call is set up now.
  one();
  CU(cudaStreamSynchronize(stream));
  if (graph) {
    cudaGraph_t made;
    CU(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < inner; ++i) one();
    CU(cudaStreamEndCapture(stream, &made));
    CU(cudaGraphInstantiate(&exec, made, 0));
    CU(cudaGraphDestroy(made));
  }
  std::vector<double> all;
  for (int round = 0; round < outer + 2; ++round) {
    barrier();
    if (!graph) for (int i = 0; i < 4; ++i) one();
    else linger<<<1, 1, 0, stream>>>(20000);
    CU(cudaEventRecord(from, stream));
    if (graph) CU(cudaGraphLaunch(exec, stream));
    else for (int i = 0; i < inner; ++i) one();
    CU(cudaEventRecord(to, stream));
    CU(cudaStreamSynchronize(stream));
    float ms;
    CU(cudaEventElapsedTime(&ms, from, to));
    results[rank] = ms * 1000 / inner;
    barrier();
    double most = 0;
    for (int r = 0; r < ranks; ++r) most = std::max(most, results[r]);
    if (round >= 2) all.push_back(most);
    barrier();
  }
  if (exec) CU(cudaGraphExecDestroy(exec));
  CU(cudaEventDestroy(from));
  CU(cudaEventDestroy(to));
  std::sort(all.begin(), all.end());
  return all[all.size() / 2];
}

void Rank::table(bool graph) {
  if (rank == 0) printf("\n%s, fp32, total bytes: microseconds (of NCCL: ratio)\n%-14s %9s %8s %15s %15s %15s %15s %15s\n", graph ? "graph" : "eager", "", "bytes", "NCCL", "LL", "LL128x2", "LL128x4", "two phases", "Simple");
  for (int k = 0; k < kinds; ++k)
    for (uint64_t bytes : {1ull << 10, 16ull << 10, 64ull << 10, 128ull << 10, 256ull << 10, 512ull << 10, 1ull << 20, 2ull << 20, 4ull << 20, 8ull << 20, 16ull << 20, 32ull << 20, 64ull << 20}) {
      if (!graph && bytes > 4 << 20) continue;
      if (getenv("LARGEST") && bytes > strtoull(getenv("LARGEST"), nullptr, 10)) continue;
      if ((k == broadcast || k == reduce) && bytes > 4 << 20) continue;
      Request request{};
      request.kind = (Kind)k;
      request.type = float_type;
      request.element_bytes = 4;
      request.root = 0;
      const bool split = k == all_gather || k == reduce_scatter || k == all_to_all;
      request.count = bytes / 4 / (split ? ranks : 1);
      request.send = (uint64_t)input;
      request.receive = (uint64_t)output;
      double base = 0;
      if (comms[rank]) base = time(graph, [&] { by_nccl(request); });
      const bool early = !graph && bytes <= 2 << 20;
      double ours[5] = {0, 0, 0, 0, 0};
      if (goes_by_ll((Kind)k, request.count * 4, channels_all)) ours[0] = time(graph, [&] { launch(request, {ll, 0}, early); });
      if (k != all_reduce) {
        ours[1] = time(graph, [&] { launch(request, {ll128, 2}, early); });
        if (ranks <= 4) ours[2] = time(graph, [&] { launch(request, {ll128, 4}, early); });
      } else {
        ours[3] = time(graph, [&] { launch(request, {two_phases, 2}, early); });
      }
      if (ranks <= 4 && bytes >= 1 << 20 && k == all_reduce) ours[4] = time(graph, [&] { launch(request, {simple_two_phases, 4}, early); });
      if (ranks <= 4 && bytes >= 1 << 20 && k == reduce_scatter) ours[4] = time(graph, [&] { launch(request, {simple, 4}, early); });
      if (rank == 0) {
        printf("%-14s %9llu %8.2f", kind_names[k], (unsigned long long)bytes, base);
        for (double one : ours) one ? printf(" %8.2f (%4.2f)", one, base ? one / base : 0.0) : printf(" %15s", "");
        printf("\n");
        fflush(stdout);
      }
    }
}

int main(int count, char** arguments) {
  if (count < 2) return fprintf(stderr, "usage: collective IMAGE [SECONDS] [SEED] [RANKS]\n"), 2;
  std::ifstream file(arguments[1], std::ios::binary);
  image.assign(std::istreambuf_iterator<char>(file), {});
  image.push_back(0);
  const double seconds = count > 2 ? atof(arguments[2]) : 10;
  const uint64_t seed = count > 3 ? strtoull(arguments[3], nullptr, 10) : (uint64_t)std::chrono::system_clock::now().time_since_epoch().count();
  CU(cudaGetDeviceCount(&ranks));
  if (count > 4) ranks = std::min(ranks, atoi(arguments[4]));
  if (const char* path = getenv("NCCL_LIBRARY")) {
    void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
#define LOAD(name, symbol) *(void**)&nccl.name = dlsym(library, symbol)
    LOAD(InitAll, "ncclCommInitAll");
    LOAD(AllReduce, "ncclAllReduce");
    LOAD(Broadcast, "ncclBroadcast");
    LOAD(Reduce, "ncclReduce");
    LOAD(AllGather, "ncclAllGather");
    LOAD(ReduceScatter, "ncclReduceScatter");
    LOAD(AlltoAll, "ncclAlltoAll");
    std::vector<int> devices;
    for (int r = 0; r < ranks; ++r) devices.push_back(r);
    CU(nccl.InitAll(comms, ranks, devices.data()));
  }
  std::vector<std::thread> threads;
  std::vector<int> failed(ranks);
  for (int r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      CU(cudaSetDevice(r));
      Rank one{};
      one.rank = r;
      one.space = 160ull << 20;
      one.geometry = Geometry{0x1234567, (uint32_t)r, (uint32_t)ranks, channels_all, slots_all()};
      CU(cudaStreamCreateWithFlags(&one.stream, cudaStreamNonBlocking));
      for (int other = 0; other < ranks; ++other)
        if (other != r) {
          const auto error = cudaDeviceEnablePeerAccess(other, 0);
          if (error != cudaSuccess && error != cudaErrorPeerAccessAlreadyEnabled) CU(error);
          cudaGetLastError();
        }
      void* region;
      const Layout layout(one.geometry);
      CU(cudaMalloc(&region, layout.bytes));
      CU(cudaMemset(region, 0, layout.bytes));
      regions[r] = (uint64_t)region;
      CU(cudaMalloc((void**)&one.input, one.space));
      CU(cudaMalloc((void**)&one.output, one.space));
      CU(cudaMemset(one.input, 0, one.space));
      CU(cudaMalloc((void**)&one.bad, 8));
      CU(cudaMemset(one.bad, 0, 8));
      CU(cudaMalloc((void**)&one.found, 64 * 8 * sizeof(Found)));
      CU(cudaHostAlloc((void**)&one.control, 64, cudaHostAllocMapped | cudaHostAllocPortable));
      *one.control = 0;
      CU(cuModuleLoadData(&one.module, image.data()));
      // All kernels now: a first launch that loads code could wait for a kernel that waits for us.
      unsigned functions = 0;
      CU(cuModuleGetFunctionCount(&functions, one.module));
      std::vector<CUfunction> all(functions);
      CU(cuModuleEnumerateFunctions(all.data(), functions, one.module));
      for (CUfunction function : all) {
        int registers;
        CU(cuFuncGetAttribute(&registers, CU_FUNC_ATTRIBUTE_NUM_REGS, function));
      }
      CU(cudaDeviceSynchronize());
      barrier();
      if (r == 0) printf("%d ranks, %.1f MiB of region a rank\n", ranks, layout.bytes / 1048576.0);
      one.verify(seconds, seed);
      if (getenv("NO_TABLES")) return;
      one.table(true);
      one.table(false);
      one.verify(std::min(seconds, 3.0), seed + 1);
    });
  std::thread([] {
    std::this_thread::sleep_for(std::chrono::seconds(atoi(getenv("LIMIT") ? getenv("LIMIT") : "150")));
    fprintf(stderr, "stuck\n");
    fflush(stdout);
    _Exit(3);
  }).detach();
  for (auto& thread : threads) thread.join();
  fflush(stdout);
  _Exit(0);
}
