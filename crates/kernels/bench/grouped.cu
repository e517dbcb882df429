// Groups of several collectives of one communicator: what a group takes, graph and eager, on two GPUs with a thread each.
//
//   nvcc -O2 -std=c++20 -arch=sm_90 -I NCCL/include grouped.cu -o grouped -L NCCL/lib -l:libnccl.so.2
//   LD_LIBRARY_PATH=FOLDER_OF_NCCL_OR_WINDLASS ./grouped [eager]
//
// With an argument nothing is captured, here or before: what a communicator has captured once, Windlass orders all later calls after.
#include <cuda_runtime.h>
#include <nccl.h>

#include <algorithm>
#include <barrier>
#include <cstdio>
#include <cstdlib>
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

constexpr int RANKS = 2, GROUPS = 20, BATCHES = 15;
constexpr size_t MIB = 1 << 20, BUFFER_BYTES = 128 * MIB;
enum Kind { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER };
const char *const NAMES[] = {"all_reduce", "all_gather", "reduce_scatter"};

int main(int arguments, char **) {
  const bool captures = arguments < 2;
  ncclComm_t communicators[RANKS];
  CHECK(ncclCommInitAll(communicators, RANKS, nullptr));
  std::barrier<> together(RANKS);
  auto rank = [&](int me) {
    CHECK(cudaSetDevice(me));
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    char *send, *receive;
    CHECK(cudaMalloc(&send, BUFFER_BYTES));
    CHECK(cudaMalloc(&receive, BUFFER_BYTES));
    CHECK(cudaMemset(send, 0, BUFFER_BYTES));
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    for (Kind kind : {ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER})
      for (size_t bytes : {size_t(1) << 10, size_t(16) << 10, size_t(64) << 10, size_t(256) << 10, MIB, 2 * MIB, 4 * MIB, 8 * MIB})
        for (int calls : {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64}) {
          if (calls * bytes > BUFFER_BYTES) continue;
          auto group = [&] {
            CHECK(ncclGroupStart());
            for (int call = 0; call < calls; call++) {
              char *from = send + call * bytes, *to = receive + call * bytes;
              const ncclComm_t communicator = communicators[me];
              if (kind == ALL_REDUCE) CHECK(ncclAllReduce(from, to, bytes / 4, ncclFloat, ncclSum, communicator, stream));
              if (kind == ALL_GATHER) CHECK(ncclAllGather(from, to, bytes / 4 / RANKS, ncclFloat, communicator, stream));
              if (kind == REDUCE_SCATTER)
                CHECK(ncclReduceScatter(from, to, bytes / 4 / RANKS, ncclFloat, ncclSum, communicator, stream));
            }
            CHECK(ncclGroupEnd());
          };
          group();
          CHECK(cudaDeviceSynchronize());
          together.arrive_and_wait();
          cudaGraph_t graph;
          cudaGraphExec_t replay;
          if (captures) {
            CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
            for (int i = 0; i < GROUPS; i++) group();
            CHECK(cudaStreamEndCapture(stream, &graph));
            CHECK(cudaGraphInstantiate(&replay, graph, 0));
          }
          float medians[2] = {};
          for (int mode = captures ? 0 : 1; mode < 2; mode++) {
            std::vector<float> us;
            for (int batch = 0; batch < BATCHES; batch++) {
              CHECK(cudaDeviceSynchronize());
              together.arrive_and_wait();
              CHECK(ncclAllReduce(send, send, 1, ncclFloat, ncclSum, communicators[me], stream));
              CHECK(cudaEventRecord(begin, stream));
              if (mode == 0) CHECK(cudaGraphLaunch(replay, stream));
              else
                for (int i = 0; i < GROUPS; i++) group();
              CHECK(cudaEventRecord(end, stream));
              CHECK(cudaDeviceSynchronize());
              float ms;
              CHECK(cudaEventElapsedTime(&ms, begin, end));
              us.push_back(ms * 1e3f / GROUPS);
            }
            std::sort(us.begin(), us.end());
            medians[mode] = us[us.size() / 2];
          }
          if (captures) {
            CHECK(cudaGraphExecDestroy(replay));
            CHECK(cudaGraphDestroy(graph));
          }
          if (me == 0) printf("%-14s %7zu bytes x %2d: graph %7.2f us, eager %7.2f us\n", NAMES[kind], bytes, calls, medians[0], medians[1]);
          together.arrive_and_wait();
        }
  };
  std::vector<std::thread> threads;
  for (int me = 0; me < RANKS; me++) threads.emplace_back(rank, me);
  for (auto &thread : threads) thread.join();
  for (auto communicator : communicators) CHECK(ncclCommDestroy(communicator));
}
